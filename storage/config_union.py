"""Discriminated unions of configuration models: one model per variant, one visible table per kind.

    LossConfig: TypeAlias = Annotated[
        Annotated[PpoClip, Tag("ppo_clip")] | Annotated[M2po, Tag("m2po")],
        Discriminator(ByName(default="m2po")),
    ]

A section of a recipe selects one variant, and only the fields of this variant may be in it. A
selector states how a section selects: by the value of its key `name`, by a name or an import path,
or by which one of several keys it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag


@dataclass(frozen=True)
class ByName:
    """Select by the value of the key `name`: `loss: {name: ppo_clip, clip_low: 0.1}`."""

    default: str | None = None
    """The variant of a section without the key."""

    __name__ = "name"  # pydantic's messages show it

    def __call__(self, value: Any) -> str | None:
        """Return the tag of a section or of a model; None where it selects none."""
        if isinstance(value, BaseModel):
            return self.written({"name": getattr(value, "name", None)})
        return (self.written(value) or self.default) if isinstance(value, Mapping) else None

    def written(self, section: Mapping[str, Any]) -> str | None:
        """Return the tag that the section itself selects, without the default."""
        return None if section.get("name") is None else str(section["name"])

    def words(self, tag: str) -> str:
        """What to write in a recipe to select the variant."""
        return f"name: {tag}"

    def selected(self, section: Mapping[str, Any]) -> str:
        """What selects the variant of a section, with its value."""
        return f"name: {self(section)}"


@dataclass(frozen=True)
class ByPath(ByName):
    """Select by a name, or the variant `custom` by an import path:
    `[edf, "my_package.my_module:Name"]`.

    An entry may be the name alone.
    """

    def __call__(self, value: Any) -> str | None:
        """Return the tag of a name, a section or a model; None where it selects none."""
        return super().__call__({"name": value} if isinstance(value, str) else value)

    def written(self, section: Mapping[str, Any]) -> str | None:
        """Return the tag that the section itself selects."""
        name = super().written(section)
        return "custom" if name is not None and ":" in name else name

    def words(self, tag: str) -> str:
        """What to write in a recipe to select the variant."""
        return super().words("package.module:Name" if tag == "custom" else tag)

    def selected(self, section: Mapping[str, Any]) -> str:
        """What selects the variant of a section, with its value."""
        return f"name: {section['name']}"


@dataclass(frozen=True)
class ByKey:
    """Select by which one of several keys is there: `prompts: {path: train.jsonl}`. Null is no
    value.
    """

    keys: tuple[str, ...]

    @property
    def __name__(self) -> str:  # pydantic's messages show it
        return " or ".join(self.keys)

    def __call__(self, value: Any) -> str | None:
        """Return the tag of a section or of a model; None where it selects none, or several."""
        if isinstance(value, BaseModel):
            return next((key for key in self.keys if key in type(value).model_fields), None)
        return self.written(value) if isinstance(value, Mapping) else None

    def written(self, section: Mapping[str, Any]) -> str | None:
        """Return the tag that the section selects; None where it selects none, or several."""
        keys = self.keys_in(section)
        return keys[0] if len(keys) == 1 else None

    def keys_in(self, section: Mapping[str, Any]) -> list[str]:
        """Return the selecting keys of a section; a section must have exactly one."""
        return [key for key in self.keys if section.get(key) is not None]

    def words(self, tag: str) -> str:
        """What to write in a recipe to select the variant."""
        return tag

    def selected(self, section: Mapping[str, Any]) -> str:
        """What selects the variant of a section, with its value."""
        return " and ".join(f"{key}: {section[key]}" for key in self.keys_in(section))


Selector: TypeAlias = ByName | ByKey


@dataclass(frozen=True)
class Choice:
    """A discriminated union, as the code that reads recipes needs it."""

    variants: Mapping[str, type[BaseModel]]
    """Tag → configuration model."""
    selector: Selector

    def foreign(self, tag: str) -> dict[str, list[str]]:
        """Return the fields that the variant `tag` lacks: field → tags of the variants that have
        it.
        """
        fields: dict[str, list[str]] = {}
        for other, model in self.variants.items():
            for name in model.model_fields.keys() - self.variants[tag].model_fields.keys():
                fields.setdefault(name, []).append(other)
        return fields


def choice_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Choice | None:
    """Return the union that a type describes; None for any other type.

    `metadata` is that of a field (`FieldInfo.metadata`), where pydantic keeps the discriminator.
    """
    if hasattr(annotation, "__metadata__"):
        return choice_of(get_args(annotation)[0], (*annotation.__metadata__, *metadata))
    for data in metadata:
        if isinstance(data, Discriminator) and isinstance(data.discriminator, ByName | ByKey):
            return Choice(_by_tag(annotation), data.discriminator)
    return None


def variants(union: Any) -> dict[str, type[BaseModel]]:
    """Return the table of a union: tag → configuration model."""
    choice = choice_of(union)
    assert choice is not None, "the type must be a union with a selector"
    return dict(choice.variants)


def _by_tag(union: Any) -> dict[str, type[BaseModel]]:
    members = [member for member in get_args(union) if get_origin(member) is not type(None)]
    return {_tag(member): get_args(member)[0] for member in members}


def _tag(member: Any) -> str:
    return next(data.tag for data in member.__metadata__ if isinstance(data, Tag))
