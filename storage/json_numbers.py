"""Numbers in JSON objects: floats that JSON cannot write as a number stand there as a word; counts are not negative."""

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _of_word(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value


Number: TypeAlias = Annotated[float, BeforeValidator(_of_word)]
"""A float of a record that is stored as JSON, where it may also be "NaN", "Infinity" or "-Infinity"."""

Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
"""An integer of a record that is stored as JSON: a number of things, or the place of one in a row. Computed with in 64 bits."""
