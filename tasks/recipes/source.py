"""A recipe as plain data with the file and the line of each key.

The files of an `extends` chain (the base first) and the overrides of a command line are merged into
one nested dict. If a layer selects another variant of a union than the layer below it, the settings
of the other variant are dropped (`schema.py`). `loader.py` validates the result.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.errors import ConfigError
from storage.formats.json_values import storable_text
from tasks.recipes import schema, yaml_file
from tasks.recipes.yaml_file import NESTING_MAX
from tasks.recipes.yaml_file import KeyPath as KeyPath

log = logging.getLogger(__name__)

EXTENDS_DEPTH_MAX = 8
OVERRIDDEN_MAX = 100_000
"""Keys and list items that the overrides of one command write, with the repetitions by `*`."""
SHOWN_MAX = 100
"""Characters of an assignment or a name in a message."""
SUFFIXES = (".yaml", ".yml")
"""Of a recipe's file; a recipe's name has no suffix."""
SHORTCUTS: dict[str, KeyPath] = {"prompts": ("data", "prompts")}
"""First part of an override → the path that it abbreviates."""


@dataclass(frozen=True)
class SourceLine:
    """Where a key was written: a file and a line, or an override.

    Example: `SourceLine("recipes/mine.yaml", 12)`, `SourceLine("--set steps")`.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}, line {self.line}"


@dataclass
class Source:
    """Nested plain data and the place of every key; the key of a list item is its index."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, SourceLine] = field(default_factory=dict)

    def place(self, path: KeyPath) -> SourceLine:
        """The place of the key; for a missing key that of the nearest section above it."""
        for length in range(len(path), 0, -1):
            if (place := self.places.get(path[:length])) is not None:
                return place
        return SourceLine(self.name)


def read_source(recipe: str, folders: tuple[Path, ...]) -> Source:
    """Read a recipe and the recipes that it extends, merged.

    Args:
        recipe: its name in one of `folders`, its path, or YAML text (a text with a line break).
        folders: the first one contains AstraFlow's own recipes.

    Raises:
        ConfigError: a file does not exist, is no valid YAML, or extends itself.
    """
    chain: list[Source] = []
    seen: list[str] = []
    here: Path | None = None
    reference: str | None = recipe
    while reference is not None:
        _refuse_name(reference)
        name, text, here = _open(reference, folders, here)
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
                f"{brief(repr(base))}"
            )
        chain.append(source)
        reference = base
    merged = Source(chain[0].name)
    for source in reversed(chain):
        _merge(merged, source.data, source.places, ())
    return merged


def find(recipe: str, folders: tuple[Path, ...], here: Path | None = None) -> Path | None:
    """Find the file of a recipe; None for YAML text. Raises ConfigError if there is no such file.

    A text with a slash or a suffix is a path, relative to the folder `here` of the recipe that
    extends it, else to the working directory. Any other text is the name of a recipe in the first
    of `folders`, in `here`, or in the other `folders`. So no file of the working directory replaces
    one of AstraFlow's own recipes.
    """
    if "\n" in recipe:
        return None
    candidates = _candidates(recipe, folders, here)
    if (file := next(filter(os.path.isfile, candidates), None)) is not None:
        if storable_text(path := str(file.resolve())) != path:
            raise ConfigError(
                f"the recipe {storable_text(path)} is in a place whose name is not UTF-8, which "
                "Prefect cannot store; move it"
            )
        return file
    if is_path(recipe) and (other := next(filter(os.path.exists, candidates), None)):
        what = "a folder" if os.path.isdir(other) else "a pipe, a device or a socket"
        raise ConfigError(f"{recipe} is {what}; name a file with a recipe in it")
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    similar = [Path(recipe).stem] if is_path(recipe) and Path(recipe).stem in names else []
    similar += [f"./{path}" for path in _namesakes(recipe)]
    hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
    raise ConfigError(
        f"{recipe}: no such recipe; give a file, or one of "
        f"{', '.join(names) or '(none found)'}{hint}"
    )


def is_path(recipe: str) -> bool:
    """Whether the text is the path of a file, not the name of a recipe."""
    return "/" in recipe or recipe.endswith(SUFFIXES)


def _candidates(recipe: str, folders: tuple[Path, ...], here: Path | None) -> list[Path]:
    """Possible files of a name or a path; the first that exists is used."""
    base = [] if here is None else [here]
    if is_path(recipe):
        return [folder / recipe for folder in (*base, Path())]
    return [folder / f"{recipe}.yaml" for folder in (*folders[:1], *base, *folders[1:])]


def _namesakes(recipe: str) -> list[Path]:
    """Files of the working directory that have the name of a recipe, and are not found by it."""
    if is_path(recipe):
        return []
    names = (recipe, *(recipe + suffix for suffix in SUFFIXES))
    return [Path(name) for name in names if os.path.isfile(name)]


def dump(source: Source) -> str:
    """The merged source as YAML text, without the key `extends`."""
    return yaml_file.write(source.data)


def parse(text: str, name: str) -> Source:
    """Parse YAML text; raises ConfigError with the line of a syntax error or of a repeated key."""
    document = yaml_file.read(text, name)
    if document.value is None and not document.lines:
        return Source(name)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{name}, line {document.first_line}: a recipe is `key: value` lines")
    places = {path: SourceLine(name, line) for path, line in document.lines.items()}
    return Source(name, document.value, places)


def override(source: Source, overrides: Mapping[str, Any]) -> None:
    """Apply overrides by dotted keys; `*` means every existing key: `policies.*.batch_size`.

    Raises ConfigError for what is no key, and for values that are too deep or too many.
    """
    num_values = 0
    for dotted, value in overrides.items():
        parts = tuple(dotted.split("."))
        if not all(parts) or len(parts) > NESTING_MAX:
            raise ConfigError(
                f"--set {brief(dotted)}: not a dotted key; write it like "
                "policies.solver.train.lr=1e-4"
            )
        if _is_deeper(value, NESTING_MAX):
            raise ConfigError(f"--set {brief(dotted)}: nested deeper than {NESTING_MAX} sections")
        parts = SHORTCUTS.get(parts[0], parts[:1]) + parts[1:]
        place = SourceLine(f"--set {dotted}")
        paths = list(_expand(source.data, parts, ()))
        if not paths:
            raise ConfigError(
                f"--set {brief(dotted)}: no section has keys that * can stand for; write the key "
                "without *"
            )
        num_values += len(paths) * sum(1 for _ in _paths(value, parts))
        if num_values > OVERRIDDEN_MAX:
            raise ConfigError(
                f"--set {brief(dotted)}: with the overrides before it, more than "
                f"{OVERRIDDEN_MAX:,} values; write smaller ones, or fewer * in the keys"
            )
        nested: dict[str, Any] = {}
        for *sections, key in paths:
            section = nested
            for part in sections:
                section = section.setdefault(part, {})
            section[key] = value
        written = [
            at for at in _paths(nested, ()) if len(at) >= len(parts) or not _holds(source.data, at)
        ]
        _merge(source, nested, dict.fromkeys(written, place), ())


def parse_assignments(assignments: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """Parse `("steps=40", "policies.*.train.lr=1e-4")` into overrides; values are YAML.

    Raises ConfigError for a text that is no assignment.
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
    """The text, cut to `SHOWN_MAX` characters."""
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _refuse_name(recipe: str) -> None:
    """Raise ConfigError for a text that is neither a file's name nor a recipe's text."""
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
    """Return the name for messages, the text, and the folder to which `extends` is relative."""
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
    """Other files with the name of a recipe, for a warning."""
    if is_path(recipe):
        return []
    similar = [*_candidates(recipe, folders, here), *_namesakes(recipe)]
    return [other for other in similar if os.path.isfile(other) and not other.samefile(file)]


def _as_path(file: Path) -> str:
    """The file as a text that is a path for `is_path`."""
    shown = _shown(file)
    return shown if "/" in shown else f"./{shown}"


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield `path` and the paths of everything in the value."""
    if path:
        yield path
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    else:
        items = enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, str(key)))


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a value from a form, which has no limit, has more levels of sections and lists."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(item, levels - 1) for item in items)


def _holds(data: Any, path: KeyPath) -> bool:
    """Whether the value at `path` is a section."""
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return isinstance(data, dict)


def _expand(data: Any, parts: KeyPath, path: KeyPath) -> Iterator[KeyPath]:
    """The paths that match a dotted key with `*` in it."""
    if not parts:
        yield path
        return
    keys = data if isinstance(data, dict) else ()
    for key in list(keys) if parts[0] == "*" else [parts[0]]:
        yield from _expand(
            data.get(key) if isinstance(data, dict) else None, parts[1:], (*path, key)
        )


def _merge(
    target: Source, data: Mapping[str, Any], places: Mapping[KeyPath, SourceLine], path: KeyPath
) -> None:
    """Merge `data` into the section at `path`: sections key by key, other values as a whole.

    If `data` selects another variant of a union, the settings of the old variant are dropped where
    a file wrote them. Those of another override of the same command line stay, so that the conflict
    of the two is an error.
    """
    section: Any = target.data
    for part in path:
        section = section[part]
    for key in schema.overruled(target.data, path, data):
        if target.place((*path, key)).line is not None:
            _forget(target, section.pop(key), (*path, key))
    for raw_key, value in data.items():
        key = str(raw_key)
        here = (*path, key)
        is_section = isinstance(value, Mapping)
        if not (is_section and isinstance(section.get(key), dict)):
            _forget(target, section.get(key), here)
            section[key] = {} if is_section else value
        if is_section:
            if here in places:
                target.places[here] = places[here]
            _merge(target, value, places, here)
        else:
            target.places.update({at: places[at] for at in _paths(value, here) if at in places})


def _forget(target: Source, value: Any, path: KeyPath) -> None:
    """Remove the places of the key at `path` and of everything in its `value`."""
    for at in _paths(value, path):
        target.places.pop(at, None)
