"""Loading of recipes: YAML and overrides become a `RunConfig`, or one error with all mistakes.

    recipes/base.yaml ◀─extends─ recipes/mine.yaml ◀─overrides─ --set key=value   ──▶  RunConfig

The error names the line and the correction of each mistake. `source.py` records where each key was
written, `schema.py` looks up the fields of each section, and `checks.py` checks conditions between
several fields.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from storage.config_union import ByKey, ByPath, Choice
from storage.errors import ConfigError
from storage.formats import json_values
from storage.store.source_files import expanded, is_remote
from tasks.recipes import schema
from tasks.recipes.checks import Problem, problems
from tasks.recipes.run_config import RunConfig
from tasks.recipes.source import KeyPath, Source, brief, dump, find, is_path, override, read_source

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PROBLEMS_SHOWN = 50
"""Each hint takes a search of all settings: a file that is no recipe has thousands of mistakes."""
MESSAGES = {
    "missing": "is missing; add it",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "dict_type": "must be a section of `key: value` lines",
    "model_type": "must be a section of `key: value` lines",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
}
"""pydantic's type of error → message; other types keep pydantic's message."""


def load(recipe: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Load the configuration that a recipe describes.

    Paths of prompts and models become absolute, since the services of a run may start in other
    folders.

    Args:
        recipe: a name in `recipes/` (`multi_policy_tiny`), a path (`./mine.yaml`), or YAML text.
        overrides: dotted keys, such as `{"policies.solver.train.lr": 1e-4}`; `*` means every key of
            its section.

    Raises:
        ConfigError: with one line for each mistake, up to PROBLEMS_SHOWN.
    """
    source = read_source(recipe, _folders())
    override(source, overrides or {})
    _make_absolute(source.data)
    for setting in schema.foreign(source.data):
        if setting.section[setting.key] is None:  # null is no setting
            setting.remove()
    try:
        config = RunConfig.model_validate(source.data)
    except ValidationError as error:
        errors = error.errors()
        foreign = {setting.path: setting.why for setting in schema.foreign(source.data)}
        invalid = [_problem(source.data, dict(each), foreign) for each in errors[:PROBLEMS_SHOWN]]
        raise _config_error(source, invalid, len(errors)) from None
    if fault := json_values.fault(source.data):
        path, why = fault
        raise _config_error(source, [Problem(tuple(path.split(".")) if path else (), why)])
    if wrong := problems(config, source.data):
        raise _config_error(source, wrong)
    return config


def portable(recipe: str, elsewhere: bool) -> str:
    """Return a text that a process in another folder loads as the same recipe.

    It is the name of a recipe that is part of AstraFlow, else the path of the file. If the process
    runs on another machine (`elsewhere`), the path is replaced by the recipe's whole text.
    """
    file = find(recipe, _folders())
    if file is not None and not is_path(recipe) and file.resolve().parent == RECIPES:
        return recipe
    return str(file.resolve()) if file and not elsewhere else dump(read_source(recipe, _folders()))


def absolute_paths(config: RunConfig) -> dict[str, Any]:
    """Absolute paths of the recipe's files, by dotted key; overrides for a process elsewhere.

    The value of a list of paths is the whole list.

    Example: `{"data.prompts.path": "/home/me/train.jsonl"}`.
    """
    data = config.model_dump(mode="json")
    _make_absolute(data)
    return {".".join(key): _section(data, *key[:-1])[key[-1]] for key in _paths_of(data)}


def known_recipes() -> list[str]:
    """Names that `load` finds without a path."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.yaml")})


def _folders() -> tuple[Path, ...]:
    """AstraFlow's own recipes come first: no file of the working directory replaces one of them."""
    return RECIPES, Path.cwd() / "recipes"


def _config_error(
    source: Source, mistakes: Sequence[Problem], num_all: int | None = None
) -> ConfigError:
    num_all = num_all or len(mistakes)
    ordered = sorted(
        mistakes, key=lambda problem: (source.place(problem.path).line or 0, problem.path)
    )
    lines = [f"{_where(source, p.path)}: {p.message}" for p in ordered[:PROBLEMS_SHOWN]]
    if num_all == 1:
        return ConfigError(lines[0])
    if num_all > len(lines):
        lines.append(f"and {num_all - len(lines)} more")
    return ConfigError(
        "\n".join([f"{source.name}: {num_all} problems", *(f"  {line}" for line in lines)])
    )


def _where(source: Source, path: KeyPath) -> str:
    """Place and key of a mistake; the key alone once if the place is its own `--set`."""
    place, key = str(source.place(path)), ".".join(path) or "recipe"
    return brief(place) if place in (f"--set {key}", key) else f"{brief(place)}: {brief(key)}"


def _problem(
    data: Mapping[str, Any], error: Mapping[str, Any], foreign: Mapping[KeyPath, str]
) -> Problem:
    """Describe an error of pydantic; `foreign` has the reason of each `schema.foreign` setting."""
    path = schema.without_tags(error["loc"])
    kind = str(error["type"])
    if kind == "extra_forbidden":
        return Problem(path, foreign.get(path) or f"unknown key; {_suggestion(data, path)}")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _no_variant(data, path, error["input"])
    if kind == "value_error":
        return Problem(path, str(error["ctx"]["error"]))
    if kind == "finite_number":
        return Problem(
            path, f"must be a finite number, not {_brief(error['input'])}{_or_null(data, path)}"
        )
    if kind in ("int_parsing_size", "float_type") and isinstance(error["input"], int | float):
        # pydantic does not compare such a large number with the field's bounds
        return Problem(
            path,
            f"must be {_bound_at(data, path, error['input'] < 0)}, not {_brief(error['input'])}",
        )
    if kind == "literal_error":
        return Problem(
            path, f"must be one of {error['ctx']['expected']}, not {_brief(error['input'])}"
        )
    if kind == "missing":
        return Problem(path, MESSAGES[kind] + _neighbour(data, path[:-1]))
    if kind == "list_type" and isinstance(error["input"], Mapping) and "0" in error["input"]:
        return Problem(
            path, f"is a list, which is replaced as a whole; write {'.'.join(path)}=[…, …]"
        )
    message = MESSAGES.get(kind) or _pydantic_message(str(error["msg"]))
    hint = _or_null(data, path) if kind == "greater_than" else ""
    return Problem(path, f"{message}, not {_brief(error['input'])}{hint}")


def _pydantic_message(text: str) -> str:
    """Return pydantic's message as a clause that begins with "must"."""
    _, has, limit = text.partition(" should have ")
    if has:
        return f"must have {limit.partition(' after validation')[0]}"
    message = _lower(text.removeprefix("Input should be ").removeprefix("Value error, "))
    return message if message.startswith("must") else f"must be {message}"


def _no_variant(data: Mapping[str, Any], path: KeyPath, value: Any) -> Problem:
    """The mistake of a section that selects no variant, or more than one."""
    choice = schema.kind_at(path, data)
    assert isinstance(choice, Choice), "only a union has tags"
    if isinstance(choice.selector, ByPath) and isinstance(value, str | Mapping):
        name = value if isinstance(value, str) else value.get("name")
        names = ", ".join(tag for tag in choice.variants if tag != "custom")
        by_path = ", or an import path like package.module:Name" * ("custom" in choice.variants)
        fault = "name is missing" if name is None else f"{_brief(name)} is not known"
        return Problem(path, f"{fault}; use one of {names}{by_path}")
    if not isinstance(value, Mapping):
        return Problem(path, f"{MESSAGES['dict_type']}, not {_brief(value)}")
    if isinstance(choice.selector, ByKey):
        present = " and ".join(choice.selector.keys_in(value)) or "none"
        return Problem(
            path, f"needs exactly one of {_list(choice.variants, 'and')}; found {present}"
        )
    names = _list([repr(tag) for tag in choice.variants], "or")
    return Problem((*path, "name"), f"must be one of {names}, not {_brief(value.get('name'))}")


def _list(names: Iterable[str], conjunction: str) -> str:
    *others, last = names
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def _suggestion(data: Mapping[str, Any], path: KeyPath) -> str:
    """A hint for an unknown key: a similar key of its section, or the same key elsewhere."""
    names = sorted(schema.fields_at(path[:-1], data))
    if close := difflib.get_close_matches(path[-1], names, n=1, cutoff=0.7):
        return f"did you mean {close[0]}?"
    if elsewhere := [".".join(at) for at in schema.all_paths() if at[-1] == path[-1]]:
        return f"did you mean {elsewhere[0]}?"
    return f"known keys here: {', '.join(names)}" if names else "remove it"


def _neighbour(data: Mapping[str, Any], path: KeyPath) -> str:
    """A hint for a missing key: a section with a name similar to `path`, if there is one."""
    siblings = [name for name in _section(data, *path[:-1]) if path and name != path[-1]]
    close = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.7) if siblings else []
    return f", or did you mean {close[0]} instead of {path[-1]}?" if close else ""


def _bound_at(data: Mapping[str, Any], path: KeyPath, lower: bool) -> str:
    """The lower or the upper bound of the number at `path`, as words."""
    info = schema.fields_at(path[:-1], data).get(path[-1])
    if info is None and len(path) > 1:  # a number of a `dict[str, …]`
        info = schema.fields_at(path[:-2], data).get(path[-2])
    inner = [
        constraint
        for part in get_args(info.annotation if info else None)
        for constraint in getattr(part, "__metadata__", ())
    ]
    words = (
        {"ge": "greater than or equal to", "gt": "greater than"}
        if lower
        else {"le": "less than or equal to", "lt": "less than"}
    )
    nested = [bound for constraint in inner for bound in getattr(constraint, "metadata", ())]
    for bound in (*(info.metadata if info else ()), *nested):
        for name, word in words.items():
            if (value := getattr(bound, name, None)) is not None:
                return f"{word} {value:g}" if isinstance(value, float) else f"{word} {value}"
    return "a number of at most 18 digits"


def _or_null(data: Mapping[str, Any], path: KeyPath) -> str:
    """A hint that null means no limit, if the number at `path` may be null."""
    info = schema.fields_at(path[:-1], data).get(path[-1])
    parts = get_args(info.annotation) if info is not None else ()
    kinds = {(get_args(part) or (part,))[0] for part in parts}
    return "; null means no limit" if {float, type(None)} <= kinds else ""


def _make_absolute(data: dict[str, Any]) -> None:
    for *section, key in _paths_of(data):
        values = _section(data, *section)
        written = values[key]
        values[key] = (
            [_absolute(key, each) for each in written]
            if isinstance(written, list)
            else _absolute(key, written)
        )


def _absolute(key: str, written: Any) -> Any:
    """Return the absolute path; an address, and what is no path, as it is."""
    if not isinstance(written, str) or is_remote(written):
        return written
    with suppress(OSError, RuntimeError, ValueError):
        path = Path(expanded(written))
        # An environment's interpreter is a link, by whose own place it finds its packages; a
        # pattern of files is no path yet.
        return str(path.absolute() if key in ("python", "files") else path.resolve())
    return written


def _paths_of(data: dict[str, Any]) -> Iterator[KeyPath]:
    """Keys of the paths of prompts, models, mirrors and interpreters whose values are text.

    Other values are refused by validation.
    """
    keys: list[KeyPath] = [
        (section, "prompts", *key)
        for section in ("data", "evaluation")
        for key in (("path",), ("window", "files"))
    ]
    keys += [("gate", "datasets", name, "path") for name in _section(data, "gate", "datasets")]
    keys += [("policies", name, "model", "path") for name in _section(data, "policies")]
    keys += [
        ("rollout", "regions", name, "mirror") for name in _section(data, "rollout", "regions")
    ]
    keys.append(("rollout", "engine", "sglang", "python"))
    for key in keys:
        written = _section(data, *key[:-1]).get(key[-1])
        if key[-1] == "python" and "/" not in str(written):  # a command of the search path
            continue
        is_local = isinstance(written, str) and not is_remote(written)
        if isinstance(written, list) or (is_local and (written or key[-1] == "path")):
            yield key


def _section(data: Any, *path: str) -> dict[str, Any]:
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no number of more than 4,300 digits
        return "a number of that many digits"
    return text if len(text) <= 60 else text[:57] + "…"
