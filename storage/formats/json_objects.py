"""JSON objects of a run: how a record becomes bytes and comes back, checked field by field.

    created once   {"format":1,"write_id":"…","checksum":"…",…}   seal   ──▶ bytes ──▶ unseal
    overwritten    {"format":1,"write_id":"…",…}                  encode ──▶ bytes ──▶ decode

The checksum is xxh3_128 over the object's bytes with its own 32 digits replaced by zeros: JSON
itself would not notice a changed digit. What is overwritten (leases, heartbeats) decides nothing
and has none. Numbers that JSON cannot write are words (`json_numbers.py`). This module knows the
form, not what any record means.

A checksum proves that an object is as it was written, not that its writer meant well: integers,
nesting (by the parser) and the number of values are bounded before anything is built of them.
"""

import re
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import xxhash
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from storage.errors import ConfigError, CorruptError
from storage.plain_names import new_write_id
from storage.records.numbers import INTEGER_BITS
from storage.records.types import Json

FORMAT = 1
"""Raised when an older reader could misread the objects; readers refuse what they do not know."""
VALUES_MAX = 2**21
"""Values of one object: a manifest of 100,000 tensors has half as many. Each takes some 300 bytes
of memory when it is read.
"""
DESCRIBED_FAULTS_MAX = 1000
"""With more wrong fields than this none is described: the descriptions would take more memory than
the object.
"""
MESSAGE_CHARACTERS_MAX = 500
_DIGITS = re.compile("[0-9a-f]{32}")
_LONG_NUMBER = re.compile(rb"\d{19}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')
_ZEROS = b"0" * 32
_PLACE = b'"checksum":"' + _ZEROS

R = TypeVar("R")


def dump(value: Any) -> bytes:
    """`value` (records, mappings, lists, NumPy scalars) as compact JSON; ValueError for anything
    else, ConfigError for integers that nobody would read.
    """
    text = to_json(value, inf_nan_mode="strings", fallback=_plain)
    try:
        _refuse_large_integers(text, "what shall be stored")
    except CorruptError as error:
        raise ConfigError(f"{error}; use a smaller one, or text") from error
    return text


def seal(record: Any) -> bytes:
    """The bytes of a dataclass as a created-once object, with a checksum; a fresh write id unless
    it has its own.
    """
    before, place, after = dump(_headed(record, checksum=_ZEROS.decode())).partition(_PLACE)
    return before + place.replace(_ZEROS, _checksum(before + place + after)) + after


def unseal(record: type[R], body: bytes, what: str) -> R:
    """The dataclass `record` that a created-once object holds; CorruptError names `what` and what
    is wrong.
    """
    fields = _load(body, what)
    for name in ("write_id", "checksum"):
        found = fields.get(name)
        if not isinstance(found, str) or not _DIGITS.fullmatch(found):
            raise CorruptError(
                f"{what} has the {name} {_brief(repr(found))}, which is not 32 hex digits"
            )
    digits = fields["checksum"].encode()
    if _checksum(body.replace(digits, _ZEROS, 1)) != digits:
        raise CorruptError(
            f"{what} does not have the checksum it carries: it was changed after it was written"
        )
    return build(record, body, what)


def encode(record: Any) -> bytes:
    """The bytes of a dataclass as an object that is overwritten; a fresh write id unless the record
    has its own.
    """
    return dump(_headed(record))


def decode(record: type[R], body: bytes, what: str) -> R:
    """The dataclass `record` that an overwritten object holds; CorruptError names `what` and the
    fields that are wrong.
    """
    _load(body, what)
    return build(record, body, what)


def build(record: type[R], text: bytes, what: str) -> R:
    """The dataclass `record` from JSON of no format of its own, such as a header within a file of
    another form.

    No value is taken for one of another type. Keys it does not know are ignored, so that fields can
    be added.
    """
    _refuse_too_many_values(text, what)
    _refuse_large_integers(text, what)
    try:
        return cast(R, _adapter(cast(Hashable, record)).validate_json(text, strict=True))
    except ValidationError as error:
        if error.error_count() > DESCRIBED_FAULTS_MAX:
            raise CorruptError(
                f"{what} is not a {record.__name__}: {error.error_count()} fields are wrong"
            ) from None
        faults = error.errors(include_url=False, include_context=False, include_input=False)[:3]
        if faults[0]["type"] == "json_invalid":
            raise CorruptError(f"{what} is not JSON: {faults[0]['msg']}") from error
        told = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {_words(fault)}" for fault in faults)
        raise CorruptError(f"{what} is not a {record.__name__}: {_brief(told)}") from error


def _words(fault: Mapping[str, Any]) -> str:
    """What is wrong, without pydantic's own word for errors that a type of ours raised."""
    return str(fault["msg"]).removeprefix("Value error, ")


def _headed(record: Any, **head: str) -> Json:
    """The record's fields behind those that every object begins with."""
    fields: Json = from_json(dump(record))
    write_id = fields.pop("write_id", "") or new_write_id()
    return {"format": FORMAT, "write_id": write_id, **head, **fields}


def parse(body: bytes, what: str) -> Json:
    """The JSON object in `body`, which others wrote, bounded in nesting and in the number of its
    values; CorruptError names `what` when it is none.
    """
    _refuse_too_many_values(body, what)
    try:
        fields = from_json(body)
    except ValueError as error:
        raise CorruptError(f"{what} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptError(f"{what} holds a JSON {type(fields).__name__} where an object belongs")
    return fields


def _load(body: bytes, what: str) -> Json:
    """The JSON object in `body`; CorruptError names `what` when it is not one, or of another
    format.
    """
    fields = parse(body, what)
    found = fields.get("format")
    if type(found) is not int or found != FORMAT:  # True and 1.0 equal 1, and are no format
        raise CorruptError(
            f"{what} has format {_brief(repr(found))}; this release reads format {FORMAT}"
        )
    return fields


def _refuse_too_many_values(text: bytes, what: str) -> None:
    """CorruptError when more than VALUES_MAX values would be built of `text`, of which each may be
    only two bytes there.
    """
    if (
        _most_values(text) > VALUES_MAX
        and (found := _most_values(_STRING.sub(b'""', text))) > VALUES_MAX
    ):
        raise CorruptError(
            f"{what} has {found} JSON values in {len(text)} bytes; at most {VALUES_MAX} are read"
        )


def _most_values(text: bytes) -> int:
    """At least as many as there are values; more when strings hold such characters."""
    return 1 + sum(map(text.count, (b",", b"[", b"{")))


def _refuse_large_integers(text: bytes, what: str) -> None:
    """CorruptError when an integer anywhere in `text` needs more than INTEGER_BITS."""
    if not _LONG_NUMBER.search(text):
        return
    try:
        values = [from_json(text)]
    except ValueError as error:
        raise CorruptError(f"{what} is not JSON: {error}") from error
    while values:
        value = values.pop()
        if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
            raise CorruptError(
                f"{what} has an integer of {value.bit_length()} bits; at most {INTEGER_BITS} are "
                "read"
            )
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value


def _brief(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARACTERS_MAX else f"{text[:MESSAGE_CHARACTERS_MAX]}…"


def _checksum(body: bytes) -> bytes:
    return bytes(xxhash.xxh3_128_hexdigest(body).encode())


@cache
def _adapter(record: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(type[Any], record))


def _plain(value: Any) -> Any:
    """What the serializer does not know by itself: NumPy scalars and arrays, and mappings other
    than dict.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "items"):
        return dict(value.items())
    raise TypeError(f"a {type(value).__name__} cannot be stored as JSON: {value!r}")
