"""JSON objects of a run: how a record becomes bytes and comes back, checked field by field.

    created once   {"format":1,"write_id":"…","checksum":"…",…}   seal   ──▶ bytes ──▶ unseal
    overwritten    {"format":1,"write_id":"…",…}                  encode ──▶ bytes ──▶ decode

The checksum is xxh3_128 over the object's bytes with its own 32 digits replaced by zeros: JSON itself would not notice a
changed digit. What is overwritten (leases, heartbeats) decides nothing and has none. Numbers that JSON cannot write are
words (`json_numbers.py`). This module knows the form, not what any record means.
"""

import re
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, cast
from uuid import uuid4

import xxhash
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from storage.errors import CorruptError
from storage.records import Json

FORMAT = 1
"""Raised when an older reader could misread the objects; readers refuse what they do not know."""
_DIGITS = re.compile("[0-9a-f]{32}")
_ZEROS = b"0" * 32
_PLACE = b'"checksum":"' + _ZEROS

R = TypeVar("R")


def new_write_id() -> str:
    """32 hex digits that make the body of a created-once object unlike any rival's."""
    return uuid4().hex


def dump(value: Any) -> bytes:
    """`value` (records, mappings, lists, NumPy scalars) as compact JSON; ValueError for anything else."""
    return to_json(value, inf_nan_mode="strings", fallback=_plain)


def seal(record: Any) -> bytes:
    """The bytes of a dataclass as a created-once object, with a checksum; a fresh write id unless it has its own."""
    before, place, after = dump(_headed(record, checksum=_ZEROS.decode())).partition(_PLACE)
    return before + place.replace(_ZEROS, _checksum(before + place + after)) + after


def unseal(record: type[R], body: bytes, what: str) -> R:
    """The dataclass `record` that a created-once object holds; CorruptError names `what` and what is wrong."""
    fields = _load(body, what)
    for name in ("write_id", "checksum"):
        if not _DIGITS.fullmatch(str(fields.get(name))):
            raise CorruptError(f"{what} has the {name} {fields.get(name)!r}, which is not 32 hex digits")
    digits = fields["checksum"].encode()
    if _checksum(body.replace(digits, _ZEROS, 1)) != digits:
        raise CorruptError(f"{what} does not have the checksum it carries: it was changed after it was written")
    return build(record, body, what)


def encode(record: Any) -> bytes:
    """The bytes of a dataclass as an object that is overwritten; a fresh write id unless the record has its own."""
    return dump(_headed(record))


def decode(record: type[R], body: bytes, what: str) -> R:
    """The dataclass `record` that an overwritten object holds; CorruptError names `what` and the fields that are wrong."""
    _load(body, what)
    return build(record, body, what)


def build(record: type[R], text: bytes, what: str) -> R:
    """The dataclass `record` from JSON of no format of its own, such as a header within a file of another form.

    No value is taken for one of another type. Keys it does not know are ignored, so that fields can be added.
    """
    try:
        return cast(R, _adapter(cast(Hashable, record)).validate_json(text, strict=True))
    except ValidationError as error:
        faults = error.errors()[:3]
        if faults[0]["type"] == "json_invalid":
            raise CorruptError(f"{what} is not JSON: {faults[0]['msg']}") from error
        told = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {_words(fault)}" for fault in faults)
        raise CorruptError(f"{what} is not a {record.__name__}: {told}") from error


def _words(fault: Mapping[str, Any]) -> str:
    """What is wrong, without pydantic's own word for errors that a type of ours raised."""
    return str(fault["msg"]).removeprefix("Value error, ")


def _headed(record: Any, **head: str) -> Json:
    """The record's fields behind those that every object begins with."""
    fields: Json = from_json(dump(record))
    write_id = fields.pop("write_id", "") or new_write_id()
    return {"format": FORMAT, "write_id": write_id, **head, **fields}


def _load(body: bytes, what: str) -> Json:
    """The JSON object in `body`; CorruptError names `what` when it is not one, or of another format."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise CorruptError(f"{what} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptError(f"{what} holds a JSON {type(fields).__name__} where an object belongs")
    found = fields.get("format")
    if type(found) is not int or found != FORMAT:  # True and 1.0 equal 1, and are no format
        raise CorruptError(f"{what} has format {found!r}; this release reads format {FORMAT}")
    return fields


def _checksum(body: bytes) -> bytes:
    return bytes(xxhash.xxh3_128_hexdigest(body).encode())


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
