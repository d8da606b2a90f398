"""A recipe as plain data that remembers where each key was written, so that an error can name the file and the line.

Three things become one nested dict here: the files of an `extends` chain (the base first), then the overrides of a command
line. What the keys mean is unknown here; `recipes.py` validates them.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from storage.errors import ConfigError

log = logging.getLogger(__name__)

KeyPath: TypeAlias = tuple[str, ...]
EXTENDS_DEPTH_MAX = 8
NESTING_MAX = 32
SUFFIXES = (".yaml", ".yml")
"""Of a file; the name of a recipe has none."""
ALTERNATIVES: dict[str, frozenset[str]] = {
    "prompts": frozenset({"builtin", "path", "hub"}),
    "model": frozenset({"tiny", "path", "hub"}),
}
"""Section → keys of which exactly one is set. Writing one on top of a base recipe takes the base's choice away."""
SHORTCUTS: dict[str, KeyPath] = {"prompts": ("data", "prompts")}
"""First part of an override → what it stands for, for the keys that people type most."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads `5e-5` as the number it is; YAML 1.1 asks for a dot and would make it text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as it was."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


@dataclass(frozen=True)
class Place:
    """Where a key was written. Example: `Place("recipes/mine.yaml", 12)`; an override has no line."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}, line {self.line}"


@dataclass
class Source:
    """Nested plain data and the place of every key in it; a list item is a key by its index."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """Of the key, or of the nearest section above it that was written at all (a missing key has only that)."""
        for length in range(len(path), 0, -1):
            if (found := self.places.get(path[:length])) is not None:
                return found
        return Place(self.name)


def read_source(recipe: str, folders: tuple[Path, ...]) -> Source:
    """A recipe by its name in one of `folders`, by its path, or as YAML text (anything with a line break), with what it
    extends below it. The first of `folders` has the recipes that come with AstraFlow. Raises ConfigError for a file that is
    not there, that is no YAML, or that extends itself."""
    chain: list[Source] = []
    seen: list[str] = []
    here: Path | None = None
    wanted: str | None = recipe
    while wanted is not None:
        name, text, here = _open(wanted, folders, here)
        if name in seen or len(seen) >= EXTENDS_DEPTH_MAX:
            raise ConfigError(f"{' extends '.join([*seen, name])}: a recipe cannot extend itself; remove one `extends`")
        seen.append(name)
        source = parse(text, name)
        base = source.data.pop("extends", None)
        if base is not None and not isinstance(base, str):
            raise ConfigError(f"{source.place(('extends',))}: extends: must be the name of one recipe, not {base!r}")
        chain.append(source)
        wanted = base
    merged = Source(chain[0].name)
    for source in reversed(chain):
        _merge(merged, source.data, source.places, ())
    return merged


def find(recipe: str, folders: tuple[Path, ...], here: Path | None = None) -> Path | None:
    """The file that a name or a path means; None for YAML text. Raises ConfigError where there is none.

    With a slash or a suffix it is a path, seen from the folder `here` of the recipe that extends it, then from the working
    directory; without, it is the name of a recipe in the first of `folders`, in `here` or in the other `folders`. So no file
    of the working directory ever takes the place of a recipe that comes with AstraFlow.
    """
    if "\n" in recipe:
        return None
    found = next((candidate for candidate in _candidates(recipe, folders, here) if candidate.is_file()), None)
    if found is not None:
        return found
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    near = [Path(recipe).stem] if is_path(recipe) and Path(recipe).stem in known else []
    near += [f"./{file}" for file in _namesakes(recipe)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"{recipe}: no such recipe; give a file, or one of {', '.join(known) or '(none found)'}{hint}")


def is_path(recipe: str) -> bool:
    """Whether a file is named, and not a recipe by its name."""
    return "/" in recipe or recipe.endswith(SUFFIXES)


def _candidates(recipe: str, folders: tuple[Path, ...], here: Path | None) -> list[Path]:
    """Files that a name or a path may mean, the first one that is there first."""
    nearer = [] if here is None else [here]
    if is_path(recipe):
        return [folder / recipe for folder in (*nearer, Path())]
    return [folder / f"{recipe}.yaml" for folder in (*folders[:1], *nearer, *folders[1:])]


def _namesakes(recipe: str) -> list[Path]:
    """Files of the working directory that look like a recipe's name and are not what it means."""
    return [] if is_path(recipe) else [file for file in map(Path, (recipe, *(recipe + s for s in SUFFIXES))) if file.is_file()]


def dump(source: Source) -> str:
    """The source as YAML text, without what it extended."""
    return yaml.dump(source.data, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


def parse(text: str, name: str) -> Source:
    """YAML text as plain data with places; raises ConfigError naming the line of a syntax error or of a repeated key."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return Source(name)
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{name}, line {node.start_mark.line + 1}: a recipe is `key: value` lines")
        source = Source(name)
        for path, line in _walk(node, (), name):
            source.places[path] = Place(name, line)
        source.data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.context_mark or error.problem_mark  # the context is where the broken thing begins
        raise ConfigError(f"{name}, line {mark.line + 1 if mark else 1}: not valid YAML: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    return source


def override(source: Source, overrides: Mapping[str, Any]) -> None:
    """Lays dotted keys over the source. `*` stands for every key that is there: `policies.*.batch_size`."""
    for dotted, value in overrides.items():
        parts = tuple(dotted.split("."))
        if not all(parts):
            raise ConfigError(f"--set {dotted}: not a dotted key; write it like policies.solver.train.lr=1e-4")
        parts = SHORTCUTS.get(parts[0], parts[:1]) + parts[1:]
        place = Place(f"--set {dotted}")
        for path in _expand(source.data, parts, ()):
            nested: Any = value
            for part in reversed(path):
                nested = {part: nested}
            written = [at for at in _paths(nested, ()) if len(at) >= len(path) or not _holds(source.data, at)]
            _merge(source, nested, dict.fromkeys(written, place), ())


def parse_assignments(assignments: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """`("steps=40", "policies.*.train.lr=1e-4")` as overrides; values are read as YAML. Raises ConfigError."""
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment}: write it as key=value, for example steps=40")
        try:
            overrides[key.strip()] = yaml.load(value, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {assignment}: the value is not valid YAML: {error}") from None
    return overrides


def _open(recipe: str, folders: tuple[Path, ...], here: Path | None) -> tuple[str, str, Path | None]:
    """Name for messages, text, and the folder that the recipe's own `extends` is seen from."""
    file = find(recipe, folders, here)
    if file is None:
        return "recipe", recipe, None
    if others := _others(recipe, file, folders, here):
        log.warning(
            "the recipe %s is %s; to use %s, name it by this path", recipe, _shown(file), " or ".join(map(_as_path, others))
        )
    try:
        return _shown(file), file.read_text(encoding="utf-8"), file.resolve().parent
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error}") from None


def _others(recipe: str, file: Path, folders: tuple[Path, ...], here: Path | None) -> list[Path]:
    """Other files that a person may have meant by the name of a recipe."""
    alike = [] if is_path(recipe) else [*_candidates(recipe, folders, here), *_namesakes(recipe)]
    return [other for other in alike if other.is_file() and not other.samefile(file)]


def _as_path(file: Path) -> str:
    """The file as `is_path` takes it for one."""
    shown = _shown(file)
    return shown if "/" in shown else f"./{shown}"


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _walk(node: yaml.Node, path: KeyPath, name: str) -> Iterator[tuple[KeyPath, int]]:
    """Every key path of a composed document with its line (from 1)."""
    if len(path) > NESTING_MAX:  # an anchor that contains itself would go on for ever
        raise ConfigError(f"{name}, line {node.start_mark.line + 1}: nested deeper than {NESTING_MAX} sections")
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in lines and key.value != "<<":
                raise ConfigError(
                    f"{name}, line {line}: {'.'.join((*path, key.value))}: written twice (first on line "
                    f"{lines[key.value]}); keep one"
                )
            lines[key.value] = line
            yield (*path, key.value), line
            yield from _walk(value, (*path, key.value), name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, str(index)), item.start_mark.line + 1
            yield from _walk(item, (*path, str(index)), name)


def _paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, str(key)))


def _holds(data: Any, path: KeyPath) -> bool:
    """Whether a section stands at `path`."""
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return isinstance(data, dict)


def _expand(data: Any, parts: KeyPath, path: KeyPath) -> Iterator[KeyPath]:
    """The paths that a dotted key with `*` in it names."""
    if not parts:
        yield path
        return
    keys = list(data) if parts[0] == "*" and isinstance(data, dict) else [parts[0]]
    for key in keys:
        yield from _expand(data.get(key) if isinstance(data, dict) else None, parts[1:], (*path, key))


def _merge(target: Source, data: Mapping[str, Any], places: Mapping[KeyPath, Place], path: KeyPath) -> None:
    """Sections are merged key by key; anything else, lists included, is replaced whole."""
    section: Any = target.data
    for part in path:
        section = section[part]
    if path and (alternatives := ALTERNATIVES.get(path[-1])) and alternatives & set(data):
        for key in alternatives - set(data):
            section.pop(key, None)
    for raw_key, value in data.items():
        key = str(raw_key)
        here = (*path, key)
        if here in places:
            target.places[here] = places[here]
        if isinstance(value, Mapping):
            if not isinstance(section.get(key), dict):
                section[key] = {}
                _forget_below(target, here)
            _merge(target, value, places, here)
        else:
            section[key] = value
            _forget_below(target, here)
            target.places.update({at: place for at, place in places.items() if at[: len(here)] == here})


def _forget_below(target: Source, path: KeyPath) -> None:
    """What stood below a value that is replaced as a whole stands nowhere any more."""
    for at in [at for at in target.places if len(at) > len(path) and at[: len(path)] == path]:
        del target.places[at]
