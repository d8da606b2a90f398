"""Discriminated unions of configuration models: one model for each variant.

    LossConfig: TypeAlias = Annotated[
        Annotated[PpoClip, Tag("ppo_clip")] | Annotated[M2po, Tag("m2po")],
        Discriminator(ByName(default="m2po")),
    ]

A section of a recipe selects one variant and may have only the fields of this variant. The selector
defines how a section selects it: by the value of its key `name`, by a name or an import path, or by
which one of several keys it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag


@dataclass(frozen=True)
class ByName:
    """Selects by the value of the key `name`: `loss: {name: ppo_clip, clip_low: 0.1}`."""

    default: str | None = None
    """The variant of a section without the key."""

    __name__ = "name"  # pydantic's messages show it

    def __call__(self, value: Any) -> str | None:
        """Return the tag of a section or of a model; None where it selects none."""
        if isinstance(value, BaseModel):
            return self.explicit_tag({"name": getattr(value, "name", None)})
        return (self.explicit_tag(value) or self.default) if isinstance(value, Mapping) else None

    def explicit_tag(self, section: Mapping[str, Any]) -> str | None:
        """Return the tag that the section itself selects, without the default."""
        return None if section.get("name") is None else str(section["name"])

    def setting_for(self, tag: str) -> str:
        """Return the setting that selects a variant."""
        return f"name: {tag}"

    def setting_in(self, section: Mapping[str, Any]) -> str:
        """Return the setting by which a section selects its variant."""
        return f"name: {self(section)}"


@dataclass(frozen=True)
class ByPath(ByName):
    """Selects by a name, or the variant `custom` by an import path.

    A section may be the name alone. Example: `[edf, "my_package.my_module:Name"]`.
    """

    def __call__(self, value: Any) -> str | None:
        """Return the tag of a name, of a section or of a model; None where it selects none."""
        return super().__call__({"name": value} if isinstance(value, str) else value)

    def explicit_tag(self, section: Mapping[str, Any]) -> str | None:
        """Return the tag that the section itself selects."""
        name = super().explicit_tag(section)
        return "custom" if name is not None and ":" in name else name

    def setting_for(self, tag: str) -> str:
        """Return the setting that selects a variant."""
        return super().setting_for("package.module:Name" if tag == "custom" else tag)

    def setting_in(self, section: Mapping[str, Any]) -> str:
        """Return the setting by which a section selects its variant."""
        return f"name: {section['name']}"


@dataclass(frozen=True)
class ByKey:
    """Selects by which one of several keys is set and not null: `prompts: {path: train.jsonl}`."""

    keys: tuple[str, ...]

    @property
    def __name__(self) -> str:  # pydantic's messages show it
        return " or ".join(self.keys)

    def __call__(self, value: Any) -> str | None:
        """Return the tag of a section or of a model; None where it selects none, or several."""
        if isinstance(value, BaseModel):
            return next((key for key in self.keys if key in type(value).model_fields), None)
        return self.explicit_tag(value) if isinstance(value, Mapping) else None

    def explicit_tag(self, section: Mapping[str, Any]) -> str | None:
        """Return the tag that the section selects; None where it selects none, or several."""
        keys = self.keys_in(section)
        return keys[0] if len(keys) == 1 else None

    def keys_in(self, section: Mapping[str, Any]) -> list[str]:
        """Return the selecting keys of a section; a section must have exactly one."""
        return [key for key in self.keys if section.get(key) is not None]

    def setting_for(self, tag: str) -> str:
        """Return the setting that selects a variant."""
        return tag

    def setting_in(self, section: Mapping[str, Any]) -> str:
        """Return the setting by which a section selects its variant."""
        return " and ".join(f"{key}: {section[key]}" for key in self.keys_in(section))


Selector: TypeAlias = ByName | ByKey


@dataclass(frozen=True)
class Choice:
    """A discriminated union: its variants and its selector."""

    variants: Mapping[str, type[BaseModel]]
    """Tag → configuration model."""
    selector: Selector

    def foreign_fields(self, tag: str) -> dict[str, list[str]]:
        """Return the fields that only other variants have: field → tags of those variants."""
        fields: dict[str, list[str]] = {}
        for other, model in self.variants.items():
            for name in model.model_fields.keys() - self.variants[tag].model_fields.keys():
                fields.setdefault(name, []).append(other)
        return fields


def choice_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Choice | None:
    """Return the discriminated union of a type; None for any other type.

    Args:
        metadata: `FieldInfo.metadata` of a field, where pydantic stores the discriminator.
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
