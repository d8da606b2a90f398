"""Unions of configuration models: selection of a variant, and the fields of the other variants."""

from typing import Annotated, Literal, TypeAlias

import pytest
from pydantic import BaseModel, Discriminator, Tag, TypeAdapter, ValidationError

from storage.config_model import ABSENT, Frozen, OnlyWith
from storage.config_union import ByKey, ByName, ByPath, choice_of, variants


class Red(Frozen):
    name: Literal["red"] = "red"
    shade: int = 1
    weight: int = 1


class Blue(Frozen):
    name: Literal["blue"] = "blue"
    depth: int = 1
    weight: int = 1


class Own(Frozen):
    name: str
    args: dict[str, int] = {}


class Here(Frozen):
    path: str


class There(Frozen):
    url: str
    port: int = 1


Colour: TypeAlias = Annotated[
    Annotated[Red, Tag("red")] | Annotated[Blue, Tag("blue")], Discriminator(ByName(default="blue"))
]
Named: TypeAlias = Annotated[
    Annotated[Red, Tag("red")] | Annotated[Own, Tag("custom")], Discriminator(ByPath())
]
Place: TypeAlias = Annotated[
    Annotated[Here, Tag("path")] | Annotated[There, Tag("url")],
    Discriminator(ByKey(("path", "url"))),
]


class Section(Frozen):
    colour: Colour = Red()
    places: list[Place] = []


def kinds(union: object, *values: object) -> list[type[BaseModel] | str]:
    """The model that results from each value, or the kind of error."""
    adapter: TypeAdapter[BaseModel] = TypeAdapter(union)
    result: list[type[BaseModel] | str] = []
    for value in values:
        try:
            result.append(type(adapter.validate_python(value)))
        except ValidationError as error:
            result.append(error.errors()[0]["type"])
    return result


def test_a_name_selects_a_variant_and_its_absence_the_default() -> None:
    assert kinds(Colour, {}, {"name": "red"}, {"name": "blue"}, {"name": None}) == [
        Blue,
        Red,
        Blue,
        "literal_error",
    ]
    assert kinds(Colour, {"name": "green"}, "red", 3) == [
        "union_tag_invalid",
        "union_tag_not_found",
        "union_tag_not_found",
    ]
    assert kinds(Colour, Red(), Blue()) == [Red, Blue]
    assert kinds(Colour, {"name": "red", "depth": 1}, {"shade": 1}) == [
        "extra_forbidden",
        "extra_forbidden",
    ]


def test_an_import_path_selects_the_custom_variant() -> None:
    assert kinds(
        Named, {"name": "red"}, {"name": "a.b:C", "args": {"x": 1}}, Own(name="a:B"), Red()
    ) == [Red, Own, Own, Red]
    assert kinds(Named, {"name": "pink"}, "pink", {}, 3)[:2] == [
        "union_tag_invalid",
        "union_tag_invalid",
    ]
    assert kinds(Named, {}, 3) == ["union_tag_not_found", "union_tag_not_found"]


def test_the_only_key_that_is_set_selects_the_variant() -> None:
    assert kinds(Place, {"path": ""}, {"url": "x", "port": 2}, Here(path="a"), There(url="b")) == [
        Here,
        There,
        Here,
        There,
    ]
    assert (
        kinds(Place, {}, {"path": None}, {"path": "a", "url": "b"}, [])
        == ["union_tag_not_found"] * 4
    )
    assert kinds(Place, {"path": "a", "port": 2}) == ["extra_forbidden"]


def test_a_dumped_model_is_read_as_the_same_model() -> None:
    section = Section(colour=Blue(depth=3), places=[Here(path="a"), There(url="b")])
    assert Section.model_validate(section.model_dump(mode="json")) == section


def test_the_table_of_a_union_keeps_its_order() -> None:
    assert list(variants(Colour).items()) == [("red", Red), ("blue", Blue)]
    assert variants(Place) == {"path": Here, "url": There}
    field = Section.model_fields["colour"]
    choice = choice_of(field.annotation, tuple(field.metadata))
    assert choice is not None
    assert choice.variants == variants(Colour)
    assert choice.selector == ByName(default="blue")
    assert choice_of(int) is None
    assert choice_of(Annotated[Red | Blue, "no selector"]) is None


def test_fields_of_other_variants_are_found_with_their_variants() -> None:
    choice = choice_of(Colour)
    assert choice is not None
    assert choice.foreign_fields("red") == {"depth": ["blue"]}
    assert choice.foreign_fields("blue") == {"shade": ["red"]}


@pytest.mark.parametrize(
    ("selector", "section", "written", "selected"),
    [
        (ByName("blue"), {}, None, "name: blue"),
        (ByName("blue"), {"name": "red"}, "red", "name: red"),
        (ByPath(), {"name": "a:B"}, "custom", "name: a:B"),
        (ByPath(), {"name": "red"}, "red", "name: red"),
        (ByKey(("path", "url")), {"path": None, "url": "x"}, "url", "url: x"),
        (ByKey(("path", "url")), {"path": "a", "url": "x"}, None, "path: a and url: x"),
        (ByKey(("path", "url")), {}, None, ""),
    ],
)
def test_a_selector_returns_the_setting_of_a_section(
    selector: ByName | ByKey, section: dict[str, object], written: str | None, selected: str
) -> None:
    assert selector.explicit_tag(section) == written
    assert selector.setting_in(section) == selected


def test_a_selector_returns_the_setting_for_a_variant() -> None:
    assert ByName().setting_for("red") == "name: red"
    assert [ByPath().setting_for(tag) for tag in ("red", "custom")] == [
        "name: red",
        "name: package.module:Name",
    ]
    assert ByKey(("path", "url")).setting_for("url") == "url"


def test_a_marked_field_has_an_effect_with_one_any_or_no_value() -> None:
    constant, tokens = OnlyWith("aggregate", "constant"), OnlyWith("tokens")
    without = OnlyWith("tokens", ABSENT)
    assert [constant.is_met({"aggregate": value}.get) for value in ("constant", "mean", None)] == [
        True,
        False,
        False,
    ]
    for value, is_given in ((3, True), (0, False), ("", False), ((), False), (None, False)):
        assert tokens.is_met({"tokens": value}.get) is is_given
        assert without.is_met({"tokens": value}.get) is not is_given
    assert not constant.is_met({}.get)
    assert constant.why({"aggregate": "mean"}.get) == (
        "has no effect with aggregate: mean; leave it out, or set aggregate: constant"
    )
    assert tokens.why({}.get) == "has no effect without tokens; leave it out, or set tokens"
    assert without.why({"tokens": 3}.get) == (
        "has no effect with tokens; leave it out, or leave tokens out"
    )


def test_a_marked_field_may_have_an_effect_with_several_values() -> None:
    either = OnlyWith("lr_schedule", ("linear", "cosine"))
    assert [
        either.is_met({"lr_schedule": value}.get) for value in ("linear", "cosine", "constant")
    ] == [True, True, False]
    assert either.why({"lr_schedule": "constant"}.get).endswith("set lr_schedule: linear or cosine")


def test_a_mark_may_count_with_one_value_of_a_third_field_only() -> None:
    mark = OnlyWith("device", "cpu", where=OnlyWith("name", "sglang"))
    assert list(mark.keys) == ["name", "device"]
    assert mark.is_met({"name": "torch", "device": "cuda"}.get)
    assert mark.is_met({"name": "sglang", "device": "cpu"}.get)
    assert not mark.is_met({"name": "sglang", "device": "cuda"}.get)
    assert mark.why({"name": "sglang", "device": "cuda"}.get) == (
        "has no effect with device: cuda and name: sglang; leave it out, or set device: cpu"
    )
