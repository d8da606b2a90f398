"""A recipe as plain data that remembers where each key was written, so that an error can name the
file and the line.

Three things become one nested dict here: the files of an `extends` chain (the base first), then the
overrides of a command line. Where one selects another variant of a union than the one below it, the
settings of the old variant are dropped (`schema.py`). `loader.py` validates the result.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.errors import ConfigError
from tasks.recipes import schema, yaml_file
from tasks.recipes.yaml_file import NESTING_MAX
from tasks.recipes.yaml_file import KeyPath as KeyPath

log = logging.getLogger(__name__)

EXTENDS_DEPTH_MAX = 8
SHOWN_MAX = 100
"""Characters of an assignment or a name in a message."""
SUFFIXES = (".yaml", ".yml")
"""Of a file; the name of a recipe has none."""
SHORTCUTS: dict[str, KeyPath] = {"prompts": ("data", "prompts")}
"""First part of an override → what it stands for, for the keys that people type most."""


@dataclass(frozen=True)
class SourceLine:
    """Where a key was written. Example: `SourceLine("recipes/mine.yaml", 12)`; an override has no
    line.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}, line {self.line}"


@dataclass
class Source:
    """Nested plain data and the place of every key in it; a list item is a key by its index."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, SourceLine] = field(default_factory=dict)

    def place(self, path: KeyPath) -> SourceLine:
        """Of the key, or of the nearest section above it that was written at all (a missing key has
        only that).
        """
        for length in range(len(path), 0, -1):
            if (found := self.places.get(path[:length])) is not None:
                return found
        return SourceLine(self.name)


def read_source(recipe: str, folders: tuple[Path, ...]) -> Source:
    """A recipe by its name in one of `folders`, by its path, or as YAML text (anything with a line
    break), with what it extends below it. The first of `folders` has the recipes that come with
    AstraFlow. Raises ConfigError for a file that is not there, that is no YAML, or that extends
    itself.
    """
    chain: list[Source] = []
    seen: list[str] = []
    here: Path | None = None
    wanted: str | None = recipe
    while wanted is not None:
        _refuse_name(wanted)
        name, text, here = _open(wanted, folders, here)
        if name in seen or len(seen) >= EXTENDS_DEPTH_MAX:
            raise ConfigError(
                f"{' extends '.join([*seen, name])}: a recipe cannot extend itself; remove one "
                "`extends`"
            )
        seen.append(name)
        source = parse(text, name)
        base = source.data.pop("extends", None)
        if base is not None and not isinstance(base, str):
            raise ConfigError(
                f"{source.place(('extends',))}: extends: must be the name of one recipe, not "
                f"{base!r}"
            )
        chain.append(source)
        wanted = base
    merged = Source(chain[0].name)
    for source in reversed(chain):
        _merge(merged, source.data, source.places, ())
    return merged


def find(recipe: str, folders: tuple[Path, ...], here: Path | None = None) -> Path | None:
    """The file that a name or a path means; None for YAML text. Raises ConfigError where there is
    none.

    With a slash or a suffix it is a path, seen from the folder `here` of the recipe that extends
    it, then from the working directory; without, it is the name of a recipe in the first of
    `folders`, in `here` or in the other `folders`. So no file of the working directory ever takes
    the place of a recipe that comes with AstraFlow.
    """
    if "\n" in recipe:
        return None
    found = next(
        (
            candidate
            for candidate in _candidates(recipe, folders, here)
            if os.path.isfile(candidate)
        ),
        None,
    )
    if found is not None:
        return found
    if is_path(recipe) and (
        other := next(filter(os.path.exists, _candidates(recipe, folders, here)), None)
    ):
        what = "a folder" if os.path.isdir(other) else "a pipe, a device or a socket"
        raise ConfigError(f"{recipe} is {what}; name a file with a recipe in it")
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    near = [Path(recipe).stem] if is_path(recipe) and Path(recipe).stem in known else []
    near += [f"./{file}" for file in _namesakes(recipe)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"{recipe}: no such recipe; give a file, or one of "
        f"{', '.join(known) or '(none found)'}{hint}"
    )


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
    return (
        []
        if is_path(recipe)
        else [
            file
            for file in map(Path, (recipe, *(recipe + s for s in SUFFIXES)))
            if os.path.isfile(file)
        ]
    )


def dump(source: Source) -> str:
    """The source as YAML text, without what it extended."""
    return yaml_file.write(source.data)


def parse(text: str, name: str) -> Source:
    """YAML text as plain data with places; raises ConfigError naming the line of a syntax error or
    of a repeated key.
    """
    found = yaml_file.read(text, name)
    if found.value is None and not found.lines:
        return Source(name)
    if not isinstance(found.value, dict):
        raise ConfigError(f"{name}, line {found.first_line}: a recipe is `key: value` lines")
    return Source(
        name, found.value, {path: SourceLine(name, line) for path, line in found.lines.items()}
    )


def override(source: Source, overrides: Mapping[str, Any]) -> None:
    """Lays dotted keys over the source. `*` stands for every key that is there:
    `policies.*.batch_size`.
    """
    for dotted, value in overrides.items():
        parts = tuple(dotted.split("."))
        if not all(parts) or len(parts) > NESTING_MAX:
            raise ConfigError(
                f"--set {brief(dotted)}: not a dotted key; write it like "
                "policies.solver.train.lr=1e-4"
            )
        parts = SHORTCUTS.get(parts[0], parts[:1]) + parts[1:]
        place = SourceLine(f"--set {dotted}")
        for path in _expand(source.data, parts, ()):
            nested: Any = value
            for part in reversed(path):
                nested = {part: nested}
            written = [
                at
                for at in _paths(nested, ())
                if len(at) >= len(path) or not _holds(source.data, at)
            ]
            _merge(source, nested, dict.fromkeys(written, place), ())


def parse_assignments(assignments: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """`("steps=40", "policies.*.train.lr=1e-4")` as overrides; values are read as YAML. Raises
    ConfigError.
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"--set {brief(assignment)}: write it as key=value, for example steps=40"
            )
        overrides[key.strip()] = yaml_file.read(value, f"--set {brief(key.strip())}").value
    return overrides


def brief(text: str) -> str:
    """The text, cut where it is too long for a message."""
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _refuse_name(recipe: str) -> None:
    """ConfigError for what can be no file's name. Text of a recipe has a line break, and is
    none.
    """
    parts = recipe.split("/")
    if "\n" not in recipe and not (
        recipe.isprintable() and recipe and len(parts) < 100 and all(len(p) < 200 for p in parts)
    ):
        raise ConfigError(
            f"{brief(recipe)!r} can be no recipe's name; give a name, a file, or YAML text of "
            "several lines"
        )


def _open(
    recipe: str, folders: tuple[Path, ...], here: Path | None
) -> tuple[str, str, Path | None]:
    """Name for messages, text, and the folder that the recipe's own `extends` is seen from."""
    file = find(recipe, folders, here)
    if file is None:
        return "recipe", recipe, None
    if others := _others(recipe, file, folders, here):
        log.warning(
            "the recipe %s is %s; to use %s, name it by this path",
            recipe,
            _shown(file),
            " or ".join(map(_as_path, others)),
        )
    try:
        with file.open("rb") as opened:
            text = opened.read(yaml_file.BYTES_MAX + 1).decode()
        return _shown(file), text, file.resolve().parent
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error}") from None


def _others(recipe: str, file: Path, folders: tuple[Path, ...], here: Path | None) -> list[Path]:
    """Other files that a person may have meant by the name of a recipe."""
    alike = [] if is_path(recipe) else [*_candidates(recipe, folders, here), *_namesakes(recipe)]
    return [other for other in alike if os.path.isfile(other) and not other.samefile(file)]


def _as_path(file: Path) -> str:
    """The file as `is_path` takes it for one."""
    shown = _shown(file)
    return shown if "/" in shown else f"./{shown}"


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


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
        yield from _expand(
            data.get(key) if isinstance(data, dict) else None, parts[1:], (*path, key)
        )


def _merge(
    target: Source, data: Mapping[str, Any], places: Mapping[KeyPath, SourceLine], path: KeyPath
) -> None:
    """Sections are merged key by key; anything else, lists included, is replaced whole. What a file
    wrote for a choice that `data` makes otherwise is dropped; another override of the same command
    line is not, so that no one of two is lost.
    """
    section: Any = target.data
    for part in path:
        section = section[part]
    for key in schema.overruled(target.data, path, data):
        if target.place((*path, key)).line is not None:
            del section[key]
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
            target.places.update(
                {at: place for at, place in places.items() if at[: len(here)] == here}
            )


def _forget_below(target: Source, path: KeyPath) -> None:
    """What stood below a value that is replaced as a whole stands nowhere any more."""
    for at in [at for at in target.places if len(at) > len(path) and at[: len(path)] == path]:
        del target.places[at]
