"""Encoding of records as the JSON objects of a run, and validation of every field when one is read.

    created once   {"format":1,"write_id":"…","checksum":"…",…}   seal   ──▶ bytes ──▶ unseal
    overwritten    {"format":1,"write_id":"…",…}                  encode ──▶ bytes ──▶ decode

The checksum is xxh3_128 over the bytes of the object with its own 32 digits replaced by zeros. JSON
itself does not detect a changed digit. Overwritten objects (leases, heartbeats) are hints and have
none. Numbers that JSON cannot represent are strings (`storage/records/numbers.py`).

A checksum does not protect against a malicious writer: integers, nesting (by the parser) and the
number of values are limited before a record is built.
"""

import re
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import xxhash
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator, from_json, to_json

from storage.errors import ConfigError, CorruptError
from storage.plain_names import new_write_id
from storage.records.numbers import INTEGER_BITS
from storage.records.types import Json

FORMAT = 1
"""Increased when an older reader could misread the objects; readers reject other formats."""
VALUES_MAX = 2**21
"""Values of one object: a manifest of 100,000 tensors has half as many. Each takes about 300 bytes
of memory.
"""
MESSAGE_CHARACTERS_MAX = 500
_DIGITS = re.compile("[0-9a-f]{32}")
_LONG_NUMBER = re.compile(rb"\d{19}")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string, also one that does not end: otherwise each quote in it would be tried as the start of
another one, up to the end of the object.
"""
_PART = re.compile(rb'(?:[^"]{1,1024}+|"[^"\\]*+(?:\\.[^"\\]*+)*+"?){1,1024}+', re.DOTALL)
"""Up to 1,024 strings and what is between them: the next part begins outside of a string."""
_ZEROS = b"0" * 32
_EMPTY_CHECKSUM = b'"checksum":"' + _ZEROS

R = TypeVar("R")


def dump(value: Any) -> bytes:
    """Encode records, mappings, lists and NumPy scalars as compact JSON.

    Raises ValueError for other types, ConfigError for integers that are too large to be read, and
    for more values than are read.
    """
    text = to_json(value, inf_nan_mode="strings", fallback=_to_plain)
    try:
        _check_num_values(text, "the value to store")
    except CorruptError as error:
        raise ConfigError(f"{error}; store fewer of them in one object") from error
    try:
        _check_integers(text, "the value to store")
    except CorruptError as error:
        raise ConfigError(f"{error}; use a smaller one, or text") from error
    return text


def seal(record: Any) -> bytes:
    """Encode a dataclass as a created-once object, with a write id if it has none."""
    body = dump(_with_header(record, checksum=_ZEROS.decode()))
    return body.replace(_EMPTY_CHECKSUM, _EMPTY_CHECKSUM.replace(_ZEROS, _checksum(body)), 1)


def unseal(record: type[R], body: bytes, label: str) -> R:
    """Decode a created-once object as the dataclass `record`, and verify its checksum.

    Raises CorruptError, which names the object by `label` and what is wrong with it.
    """
    fields = _load(body, label)
    for name in ("write_id", "checksum"):
        value = fields.get(name)
        if not isinstance(value, str) or not _DIGITS.fullmatch(value):
            raise CorruptError(
                f"{label} has the {name} {_shortened(repr(value))}, which is not 32 hex digits"
            )
    digits = fields["checksum"].encode()
    if _checksum(body.replace(digits, _ZEROS, 1)) != digits:
        raise CorruptError(
            f"{label} does not have the checksum it carries: it was changed after it was written"
        )
    return build(record, body, label)


def encode(record: Any) -> bytes:
    """Encode a dataclass as an overwritten object, with a write id if it has none."""
    return dump(_with_header(record))


def decode(record: type[R], body: bytes, label: str) -> R:
    """Decode an overwritten object as the dataclass `record`; CorruptError if it is invalid."""
    _load(body, label)
    return build(record, body, label)


def build(record: type[R], text: bytes, label: str) -> R:
    """Build the dataclass `record` from JSON without a format field, such as the header of a file.

    Values are not converted to other types. Unknown keys are ignored, so that later releases can
    add fields.
    """
    _check_num_values(text, label)
    _check_integers(text, label)
    try:
        return cast(R, _validator(cast(Hashable, record)).validate_json(text, strict=True))
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)[:3]
        if faults[0]["type"] == "json_invalid":
            raise CorruptError(f"{label} is not JSON: {faults[0]['msg']}") from error
        described = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {_message(fault)}" for fault in faults
        )
        raise CorruptError(
            f"{label} is not a {record.__name__}: {_shortened(described)}"
        ) from error


def _message(fault: Mapping[str, Any]) -> str:
    """Return pydantic's message, without its prefix for errors of this project's types."""
    return str(fault["msg"]).removeprefix("Value error, ")


def _with_header(record: Any, **header: str) -> Json:
    """Return the fields of a record, after those with which every object begins."""
    fields: Json = from_json(dump(record))
    write_id = fields.pop("write_id", "") or new_write_id()
    return {"format": FORMAT, "write_id": write_id, **header, **fields}


def parse(body: bytes, label: str, values_max: int | None = None) -> Json:
    """Parse an untrusted JSON object, with limits on nesting, on integers and on the number of its
    values, which is VALUES_MAX where no other is given.

    Raises CorruptError, with `label`, when it is not a JSON object.
    """
    _check_num_values(body, label, values_max)
    try:
        fields = from_json(body)
    except ValueError as error:
        raise CorruptError(f"{label} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptError(f"{label} is a JSON {type(fields).__name__} where an object belongs")
    if _LONG_NUMBER.search(body):
        _check_integers_in(fields, label)
    return fields


def _load(body: bytes, label: str) -> Json:
    """Parse an object of this format; CorruptError for another one."""
    fields = parse(body, label)
    version = fields.get("format")
    if type(version) is not int or version != FORMAT:  # True and 1.0 equal 1
        raise CorruptError(
            f"{label} has format {_shortened(repr(version))}; this release reads format {FORMAT}"
        )
    return fields


def num_values(text: bytes, enough: int) -> int:
    """Return the number of JSON values; an upper bound of it where that is not above `enough`."""
    bound = _num_values_at_most(text)
    if bound <= enough:
        return bound
    # In parts: all strings of one text are a list of many times its bytes.
    view = memoryview(text)
    parts = (view[slice(*part.span())] for part in _PART.finditer(text))
    return 1 + sum(_num_separators(_STRING.sub(b'""', part)) for part in parts)


def _check_num_values(text: bytes, label: str, values_max: int | None = None) -> None:
    """Raise CorruptError for too many values, each of which may be two bytes long."""
    values_max = VALUES_MAX if values_max is None else values_max
    if (found := num_values(text, values_max)) > values_max:
        raise CorruptError(
            f"{label} has {found} JSON values in {len(text)} bytes; at most {values_max} are read"
        )


def _num_values_at_most(text: bytes) -> int:
    """Return an upper bound of the number of values, exact if no string has `,`, `[` or `{`."""
    return 1 + _num_separators(text)


def _num_separators(text: bytes) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))


def _check_integers(text: bytes, label: str) -> None:
    """Raise CorruptError for an integer of more than INTEGER_BITS."""
    if not _LONG_NUMBER.search(text):
        return
    try:
        value = from_json(text)
    except ValueError as error:
        raise CorruptError(f"{label} is not JSON: {error}") from error
    _check_integers_in(value, label)


def _check_integers_in(root: Any, label: str) -> None:
    values = [root]
    while values:
        value = values.pop()
        if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
            raise CorruptError(
                f"{label} has an integer of {value.bit_length()} bits; at most {INTEGER_BITS} are "
                "read"
            )
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value


def _shortened(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARACTERS_MAX else f"{text[:MESSAGE_CHARACTERS_MAX]}…"


def _checksum(body: bytes) -> bytes:
    return bytes(xxhash.xxh3_128_hexdigest(body).encode())


@cache
def _validator(record: Hashable) -> SchemaValidator:
    """Return pydantic's validator of a dataclass, which stops at the first wrong item of a list or
    mapping: its descriptions of all of them would need a thousand times the memory of the text.
    """
    return SchemaValidator(_stopping_early(TypeAdapter(cast(type[Any], record)).core_schema))


def _stopping_early(schema: Any) -> Any:
    """Return pydantic's schema with `fail_fast` in each list, tuple and mapping."""
    if isinstance(schema, list):
        return [_stopping_early(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    stops = {"fail_fast": True} if schema.get("type") in ("list", "tuple", "dict") else {}
    return {name: _stopping_early(part) for name, part in schema.items()} | stops


def _to_plain(value: Any) -> Any:
    """Convert NumPy scalars and arrays, and mappings other than dict, for the serializer."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "items"):
        return dict(value.items())
    raise TypeError(f"a {type(value).__name__} cannot be stored as JSON: {value!r}")
