"""JSON objects of a run: how a record becomes bytes and comes back, checked field by field.

Every object is one JSON object whose first keys are `format` and `write_id`. Numbers that JSON cannot write are the
strings "NaN", "Infinity" and "-Infinity"; where a record's field is a float they come back as floats. This module knows
the form, not what any record means.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from storage.errors import CorruptError
from storage.records import Json

FORMAT = 1
"""Raised when an older reader could misread the objects; readers refuse what they do not know."""

R = TypeVar("R")


def new_write_id() -> str:
    """32 hex digits that make the body of a created-once object unlike any rival's."""
    return uuid4().hex


def dump(value: Any) -> bytes:
    """`value` (records, mappings, lists, NumPy scalars) as compact JSON; ValueError for anything else."""
    return to_json(value, inf_nan_mode="strings", fallback=_plain)


def encode(record: Any, **extra: Any) -> bytes:
    """The bytes of a dataclass or mapping as an object, with a fresh write id unless the record has its own."""
    fields: Json = from_json(dump(record))
    write_id = fields.pop("write_id", "") or new_write_id()
    return dump({"format": FORMAT, "write_id": write_id, **fields, **extra})


def load(body: bytes, what: str) -> Json:
    """The JSON object in `body`; CorruptError names `what` when it is not one, or of another format."""
    fields = parse(body, what)
    if fields.get("format") != FORMAT:
        raise CorruptError(f"{what} has format {fields.get('format')!r}; this release reads format {FORMAT}")
    return fields


def parse(body: bytes, what: str) -> Json:
    """The JSON object in `body`, of no format of its own: a header within a file of another form."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise CorruptError(f"{what} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptError(f"{what} holds a JSON {type(fields).__name__} where an object belongs")
    return fields


def decode(record: type[R], body: bytes, what: str) -> R:
    """The dataclass `record` that `body` holds; CorruptError names `what` and the fields that are wrong."""
    return build(record, load(body, what), what)


def build(record: type[R], fields: Json, what: str) -> R:
    """The dataclass `record` from parsed fields; keys it does not know are ignored, so that fields can be added."""
    try:
        return cast(R, _adapter(cast(Hashable, record)).validate_python(fields))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:3])
        raise CorruptError(f"{what} is not a {record.__name__}: {faults}") from error


@cache
def _adapter(record: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(type[Any], record))


def _plain(value: Any) -> Any:
    """What the serializer does not know by itself: NumPy scalars and arrays, and mappings other than dict."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "items"):
        return dict(value.items())
    raise TypeError(f"a {type(value).__name__} cannot be stored as JSON: {value!r}")
