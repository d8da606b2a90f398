"""Numbers in JSON objects: words for those that JSON cannot write, and bounds for those that a
reader computes with.

`Number` is any float, for measurements that may well be infinite. The others are for what is added
up, compared with a clock or shown: a stored object that holds anything else under such a name
cannot be read.
"""

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
INTEGER_BITS = 128
"""Of any integer in a stored object; states of random generators have so many."""
QUANTITY_MAX = 2**53
"""Up to here whole numbers and floats are the same."""
TIME_MAX_S = 253_402_300_799.0
"""The end of the year 9999, which is as far as calendars go."""


def _of_word(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value


Number: TypeAlias = Annotated[float, BeforeValidator(_of_word)]
"""A float of a record that is stored as JSON, where it may also be "NaN", "Infinity" or
"-Infinity".
"""
Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number: of things, or the place of one in a row. Computed with in 64 bits."""
Quantity: TypeAlias = Annotated[float, Field(ge=0, le=QUANTITY_MAX, allow_inf_nan=False)]
"""A finite float from 0 to 2^53: a counter, a rate, a time that was spent."""
UnixTime: TypeAlias = Annotated[float, Field(ge=0, le=TIME_MAX_S, allow_inf_nan=False)]
"""Seconds since 1970, up to the year 9999."""
