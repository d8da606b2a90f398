"""Lookup of a recipe's paths in the configuration models: fields, unions and variants.

    kind       at a place                                   example
    model      a section with fields                        `rollout.workflow`
    Choice     a section that selects one of several models `policies.solver.train.loss`
    Items      a section of names, or a list                `policies`, `data.filter`
    None       a value                                      `steps`

A path has the keys of a recipe, without the tags that pydantic adds to the locations of errors.
"""

import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from storage.config_model import OnlyWith, no_effect
from storage.config_union import Choice, choice_of
from tasks.promotion import gate_checks
from tasks.recipes.run_config import RunConfig
from tasks.recipes.yaml_file import KeyPath


class Items(NamedTuple):
    """A dict or a list: the next part of a path is a name or an index."""

    inner: "Kind"


Kind: TypeAlias = type[BaseModel] | Choice | Items | None

_IN_ORDER = {"seed": (OnlyWith("builtin"),)}
"""Held-out prompts are played in the order of their source: a seed only generates them."""
MARKS_OF_PLACES: Mapping[KeyPath, Mapping[str, tuple[OnlyWith, ...]]] = {
    ("evaluation", "prompts"): _IN_ORDER,
    ("gate", "datasets", "NAME"): _IN_ORDER,
}
"""Place → field → marks that it has there only; its model is used in other places, too."""


class Foreign(NamedTuple):
    """A setting of variants that its section does not select."""

    path: KeyPath
    section: dict[str, Any]
    key: str
    why: str
    """Example: `has no effect with name: m2po; leave it out, or set name: ppo_clip`."""

    def remove(self) -> None:
        """Remove the setting from its section."""
        del self.section[self.key]


def foreign(data: Mapping[str, Any]) -> list[Foreign]:
    """Return the settings of a configuration that belong to variants which it does not select.

    Example: `clip_low` of `loss: {name: m2po, clip_low: 0.2}`.
    """
    return [
        Foreign((*path, key), section, key, no_effect(f"with {selected}", f"set {remedy}"))
        for path, kind, section in _sections(data, RunConfig, ())
        if isinstance(kind, Choice) and (tag := kind.selector(section)) in kind.variants
        for key, tags in kind.foreign_fields(str(tag)).items()
        if key in section
        for selected in [kind.selector.setting_in(section)]
        for remedy in [" or ".join(map(kind.selector.setting_for, tags))]
    ]


def without_effect(data: Mapping[str, Any], config: RunConfig) -> dict[KeyPath, str]:
    """Return settings that others leave without an effect (`OnlyWith`): path → reason.

    `config` is `data`, validated, with the defaults.
    """
    problems: dict[KeyPath, str] = {}
    for path, kind, section in _sections(data, RunConfig, ()):
        read = partial(_value_in, config, path)
        for model in _models(kind, section)[:1]:
            for key, mark in _marks(model, path):
                value = section.get(key)
                if value is not None and value != mark.then and not mark.is_met(read):
                    problems.setdefault((*path, key), mark.why(read))
    of_gate = gate_checks.without_effect(config)
    return problems | {path: why for path, why in of_gate if path[-1] in _at(data, path[:-1])}


def overruled(data: Mapping[str, Any], path: KeyPath, above: Mapping[str, Any]) -> set[str]:
    """Return the keys of the section at `path` that have no effect once `above` is merged into it.

    `above` selects another variant of the union, or another value of a key that `OnlyWith` names.
    Example: `{path: a.jsonl}` merged into `prompts: {builtin: chained_addition, split: test}` makes
    `builtin` and `split` ineffective.
    """
    kind, below = kind_at(path, data), _at(data, path)
    keys: set[str] = set()
    if isinstance(kind, Choice):
        tag = kind.selector.explicit_tag(above)
        if tag is not None and tag in kind.variants:
            keys |= kind.foreign_fields(tag).keys()
    merged = _merged({key: value for key, value in below.items() if key not in keys}, above)
    for model in _models(kind, merged)[:1]:
        read = partial(_written, model, merged)
        for key, mark in _marks(model, path):
            changes = any(_has(above, other) or other in keys for other in mark.keys)
            if changes and not mark.is_met(read):
                keys.add(key)
    return keys & below.keys()


def without_tags(place: tuple[Any, ...]) -> KeyPath:
    """Return the path of a pydantic error without the tags of the variants in it."""
    kind: Kind = RunConfig
    path: list[str] = []
    for part in map(str, place):
        if isinstance(kind, Choice) and part in kind.variants:
            kind = kind.variants[part]
        else:
            path.append(part)
            kind = _inside(kind, part, {})
    return tuple(path)


def kind_at(path: KeyPath, data: Mapping[str, Any]) -> Kind:
    """Return the kind of the value at `path`; `data` selects the variants on the path."""
    kind: Kind = RunConfig
    section: Any = data
    for part in path:
        kind = _inside(kind, part, section if isinstance(section, Mapping) else {})
        section = _item(section, part)
    return kind


def fields_at(path: KeyPath, data: Mapping[str, Any]) -> dict[str, FieldInfo]:
    """Return the fields of the section at `path`; of all variants if it selects none."""
    fields: dict[str, FieldInfo] = {}
    for model in _models(kind_at(path, data), _at(data, path)):
        fields = {**model.model_fields, **fields}
    return fields


def all_paths(kind: Kind = RunConfig, path: KeyPath = ()) -> list[KeyPath]:
    """Return every possible path, the shortest first, with `NAME` for a name or an index."""
    if isinstance(kind, Items):
        return all_paths(kind.inner, (*path, "NAME"))
    paths: dict[KeyPath, None] = {}
    models = list(kind.variants.values()) if isinstance(kind, Choice) else _models(kind, {})
    for model in models:
        for name, info in model.model_fields.items():
            paths[*path, name] = None
            paths |= dict.fromkeys(all_paths(_kind_of_field(info), (*path, name)))
    return sorted(paths, key=len)


def _sections(
    data: Any, kind: Kind, path: KeyPath
) -> Iterator[tuple[KeyPath, Kind, dict[str, Any]]]:
    """Yield every section of `data` that has a model or a union, with its path."""
    if isinstance(kind, Items):
        items = (
            enumerate(data)
            if isinstance(data, list)
            else data.items()
            if isinstance(data, dict)
            else ()
        )
        for key, value in items:
            yield from _sections(value, kind.inner, (*path, str(key)))
    elif kind is not None and isinstance(data, dict):
        yield path, kind, data
        for key, value in data.items():
            yield from _sections(value, _inside(kind, str(key), data), (*path, str(key)))


def _inside(kind: Kind, part: str, section: Mapping[str, Any]) -> Kind:
    """Return the kind of the value at `part` of a section of this kind."""
    if isinstance(kind, Items):
        return kind.inner
    for model in _models(kind, section):
        if part in model.model_fields:
            return _kind_of_field(model.model_fields[part])
    return None


def _models(kind: Kind, section: Mapping[str, Any]) -> list[type[BaseModel]]:
    """Return the model of a section; all models of a union whose variant is not selected."""
    if isinstance(kind, Choice):
        tag = kind.selector(section)
        if tag is not None and tag in kind.variants:
            return [kind.variants[tag]]
        return list(kind.variants.values())
    return [kind] if isinstance(kind, type) else []


def _kind_of_field(info: FieldInfo) -> Kind:
    return _kind(info.annotation, tuple(info.metadata))


def _kind(annotation: Any, metadata: tuple[Any, ...] = ()) -> Kind:
    """Return the kind of a type: `Model`, `Model | None`, `dict[str, Model]`, `list[Union]`, …"""
    if (choice := choice_of(annotation, metadata)) is not None:
        return choice
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = get_args(annotation)
    if get_origin(annotation) in (dict, list):
        inner = _kind(parts[-1])
        return None if inner is None else Items(inner)
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return next((kind for part in parts if (kind := _kind(part)) is not None), None)
    return None


def _marks(model: type[BaseModel], path: KeyPath) -> Iterator[tuple[str, OnlyWith]]:
    """Yield the marks of the fields of a model at `path`."""
    for name, info in model.model_fields.items():
        for data in info.metadata:
            if isinstance(data, OnlyWith):
                yield name, data
    for place, marks in MARKS_OF_PLACES.items():
        if len(place) == len(path) and all(
            part in ("NAME", at) for part, at in zip(place, path, strict=True)
        ):
            yield from ((name, mark) for name, given in marks.items() for mark in given)


def _value_in(config: RunConfig, path: KeyPath, key: str) -> Any:
    """Return the value of a dotted key of the section at `path`; None where it has no such key."""
    value: Any = config
    for part in (*path, *key.split(".")):
        value = getattr(value, part, None) if isinstance(value, BaseModel) else _item(value, part)
    return value


def _written(model: type[BaseModel], section: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key of a section that is not validated, or its default."""
    first, _, rest = key.partition(".")
    info = model.model_fields.get(first)
    value = section.get(first, None if info is None else info.default)
    if not rest or info is None:
        return value
    if isinstance(value, BaseModel):
        return getattr(value, rest, None)
    inner = value if isinstance(value, Mapping) else {}
    return next(
        (_written(each, inner, rest) for each in _models(_kind_of_field(info), inner)), None
    )


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = _merged(old, value)
        merged[key] = value
    return merged


def _has(section: Any, key: str) -> bool:
    """Return whether a section has a dotted key."""
    for part in key.split("."):
        if not isinstance(section, Mapping) or part not in section:
            return False
        section = section[part]
    return True


def _at(data: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
    section: Any = data
    for part in path:
        section = _item(section, part)
    return section if isinstance(section, dict) else {}


def _item(section: Any, part: str) -> Any:
    if isinstance(section, Mapping):
        return section.get(part)
    if isinstance(section, list) and part.isdecimal() and int(part) < len(section):
        return section[int(part)]
    return None
