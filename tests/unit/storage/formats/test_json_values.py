"""Values that JSON cannot represent are reported with their path; all others pass."""

import math
from typing import Any

import pytest

from storage.formats.json_values import DEPTH_MAX, fault, strings


def nested(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [{"a": {"b": [1, 2.5, None, True, "é"]}}, {}, 2**128 - 1, -(2**128) + 1, nested(DEPTH_MAX)],
)
def test_plain_data_has_no_fault(value: Any) -> None:
    assert fault(value) is None


@pytest.mark.parametrize(
    ("value", "place", "why"),
    [
        (
            {"a": {"b\ud800": 1}},
            "a",
            "has a key that has the lone surrogate U+D800 as character 2, which is no text",
        ),
        ({"a": {1: 2}}, "a", "has a key that is a int instead of text"),
        (
            {"a": [0, "x\udfff"]},
            "a.1",
            "has the lone surrogate U+DFFF as character 2, which is no text",
        ),
        ({"a": math.nan}, "a", "is nan, which is no number in JSON"),
        ({"a": -math.inf}, "a", "is -inf, which is no number in JSON"),
        (2**128, "", "is a whole number of more than 128 bits"),
        (-(2**128), "", "is a whole number of more than 128 bits"),
        ({"a": {1.5}}, "a", "is a set, for which JSON has no type"),
        (
            nested(DEPTH_MAX + 1),
            ".".join("0" * (DEPTH_MAX + 1)),
            f"is nested deeper than {DEPTH_MAX} levels",
        ),
    ],
)
def test_values_that_json_cannot_represent_are_named_with_their_place(
    value: Any, place: str, why: str
) -> None:
    assert fault(value) == (place, why)


def test_all_strings_of_a_value_are_found_at_any_depth() -> None:
    value = {"a": "one", "b": [{"c": "two", "d": [1, None, "three"]}, ["four"]], "e": 2.5}
    assert sorted(strings(value)) == ["four", "one", "three", "two"]
    assert list(strings("text")) == ["text"]
