"""Bitwise equality of records: NaN equals the same NaN, and 0.0 does not equal −0.0."""

import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def same_bits(left: Any, right: Any) -> bool:
    """Compare dataclasses, mappings, tuples, arrays (with dtype) and numbers recursively.

    Of floats that went through JSON, one bit pattern stands for every NaN.
    """
    if is_dataclass(left):
        return type(left) is type(right) and all(
            same_bits(getattr(left, field.name), getattr(right, field.name))
            for field in fields(left)
        )
    if isinstance(left, np.ndarray):
        return bool(
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(map(same_bits, left, right))
        )
    if isinstance(left, float):
        both_nan = bool(np.isnan(left) and np.isnan(right))
        return isinstance(right, float) and bool(
            both_nan or struct.pack("d", left) == struct.pack("d", right)
        )
    return type(left) is type(right) and bool(left == right)
