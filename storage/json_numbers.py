"""Floats in JSON objects: what JSON cannot write as a number stands there as a word."""

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _of_word(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value


Number: TypeAlias = Annotated[float, BeforeValidator(_of_word)]
"""A float of a record that is stored as JSON, where it may also be "NaN", "Infinity" or "-Infinity"."""
