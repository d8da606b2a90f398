"""Types of the numbers in JSON objects: strings for NaN and infinity, and bounds for the others.

`Number` is any float, for measurements that may be infinite. The other types are for numbers that
are added up, compared with a clock or shown: an object with another value is invalid.
"""

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

_STRINGS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
INTEGER_BITS = 128
"""Limit of any integer in a stored object: states of random generators have 128 bits."""
QUANTITY_MAX = 2**53
"""Up to here a float represents every integer."""
COUNT_MAX = 2**63 - 1
"""Largest count: of a signed 64-bit integer."""
TIME_MAX_S = 253_402_214_400.0
"""The last day of the year 9999 begins: the last that `datetime` has in every time zone."""


def _from_string(value: Any) -> Any:
    return _STRINGS.get(value, value) if isinstance(value, str) else value


Number: TypeAlias = Annotated[float, BeforeValidator(_from_string)]
"""A float, which in JSON may be the string "NaN", "Infinity" or "-Infinity"."""
Count: TypeAlias = Annotated[int, Field(ge=0, le=COUNT_MAX)]
"""A number of things, or an index; fits a signed 64-bit integer."""
Quantity: TypeAlias = Annotated[float, Field(ge=0, le=QUANTITY_MAX, allow_inf_nan=False)]
"""A finite float from 0 to 2^53: a counter, a rate, a duration."""
SignedQuantity: TypeAlias = Annotated[
    float, Field(ge=-QUANTITY_MAX, le=QUANTITY_MAX, allow_inf_nan=False)
]
"""A finite float from -2^53 to 2^53: a mean of rewards."""
UnixTime: TypeAlias = Annotated[float, Field(ge=0, le=TIME_MAX_S, allow_inf_nan=False)]
"""Seconds since 1970, up to the year 9999."""
