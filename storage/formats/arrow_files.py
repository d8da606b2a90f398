"""Tables as Arrow IPC files: one versioned form for shards, batches and evaluations, checked before
it is believed.

    schema metadata   astraflow.format  "1"            astraflow.kind    "shard"
                      astraflow.header  a JSON object  astraflow.digest  32 hex digits

The digest is xxh3_128 over the whole file with its own digits replaced by zeros where they stand
first and last (the schema stands twice: at the front and in the footer). Arrow itself would not
notice a flipped bit. Bodies are lz4-compressed. This module knows the form, not what the columns
mean.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from storage.errors import CorruptError
from storage.formats import arrow_sizes
from storage.formats.json_objects import dump
from storage.plain_names import new_write_id
from storage.records.types import Json

Table: TypeAlias = Any
"""A pyarrow.Table; pyarrow has no type stubs."""
Schema: TypeAlias = Any
Column: TypeAlias = Any

FORMAT = "1"
_FORMAT, _KIND, _HEADER, _DIGEST = (
    b"astraflow.format",
    b"astraflow.kind",
    b"astraflow.header",
    b"astraflow.digest",
)
_ZEROS = b"0" * 32
_NO_OFFSETS = np.zeros(1, dtype=np.int32)

DICTIONARY = pa.dictionary(pa.int32(), pa.string())
"""Strings that repeat: stored once, indexed by int32."""


def list_of(value: Any) -> Any:
    """The type of a list column without nulls."""
    return pa.list_(pa.field("item", value, nullable=False))


def schema_of(columns: Mapping[str, Any]) -> Schema:
    """A schema whose columns hold no nulls."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def list_column(arrays: Sequence[NDArray[Any]], kind: Any, num_empty: int = 0) -> Column:
    """One list per array, built from one concatenation, and `num_empty` empty lists after them;
    OverflowError beyond 2³¹ values.
    """
    lengths = np.zeros(len(arrays) + num_empty, dtype=np.int64)
    lengths[: len(arrays)] = [len(array) for array in arrays]
    offsets = np.concatenate([_NO_OFFSETS, np.cumsum(lengths)])
    if offsets[-1] >= 2**31:
        raise OverflowError(
            f"{offsets[-1]} values do not fit one Arrow list column; make orders or batches smaller"
        )
    values = np.concatenate(arrays) if arrays else np.empty(0)
    flat = pa.array(values, type=kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), flat, type=kind)


def encode(schema: Schema, columns: Mapping[str, Any], kind: str, header: Json) -> bytes:
    """The file of one table. `columns` holds arrays or plain sequences by name; `header` is
    whatever is no column. ConfigError for more than readers take.
    """
    place = (
        new_write_id().encode()
    )  # stands where the digest will: no such bytes occur anywhere else in the file
    metadata = {
        _FORMAT: FORMAT.encode(),
        _KIND: kind.encode(),
        _HEADER: dump(header),
        _DIGEST: place,
    }
    schema = schema.with_metadata(metadata)
    batch = pa.RecordBatch.from_arrays(
        [_array(columns[field.name], field.type) for field in schema], schema=schema
    )
    arrow_sizes.check_table(batch.num_rows, batch.nbytes, kind)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return _file_digest(body, place).join(_around(body, place))


def decode(body: bytes, schema: Schema, kind: str) -> tuple[Table, bytes]:
    """The table, one chunk per column, and the header's JSON; CorruptError says what of the file
    cannot be believed.
    """
    try:
        reader = pa.ipc.open_file(pa.py_buffer(body))  # reads the schema alone
        metadata = reader.schema.metadata or {}
        _check_metadata(body, metadata, kind)
        if not reader.schema.equals(schema):
            raise CorruptError(
                f"a {kind} file has the columns {_brief(reader.schema)}; expected {_brief(schema)}"
            )
        arrow_sizes.check_file(body)
        table = reader.read_all()
        table.validate(full=True)
        _refuse_nulls(table, kind)
        table = table.unify_dictionaries().combine_chunks()
    except (pa.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        raise CorruptError(
            f"a {kind} file of {len(body)} bytes is no readable Arrow file: {error}"
        ) from error
    return table, metadata[_HEADER]


def numbers(table: Table, name: str) -> NDArray[Any]:
    """A column of numbers."""
    return _chunk(table, name).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]  # pyarrow has no stubs


def strings(table: Table, name: str) -> list[str]:
    """A dictionary column as strings; equal ones share one object."""
    chunk = _chunk(table, name)
    words = chunk.dictionary.to_pylist()
    return [words[index] for index in chunk.indices.to_numpy()]


def lists(table: Table, name: str) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """A list column as flat values and offsets [rows + 1] into them; numbers come without a
    copy.
    """
    chunk = _chunk(table, name)
    if len(chunk) == 0:
        return chunk.values.to_numpy(zero_copy_only=False)[:0], _NO_OFFSETS
    return chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()


def _chunk(table: Table, name: str) -> Column:
    chunks = table.column(name)
    return chunks.chunk(0) if chunks.num_chunks else pa.array([], type=chunks.type)


def _array(values: Any, kind: Any) -> Column:
    """What a record batch can be made of, which itself makes arrays of plain numbers; this way of
    making a dictionary is many times as fast as its own.
    """
    return (
        pa.array(values, type=kind.value_type).dictionary_encode().cast(kind)
        if pa.types.is_dictionary(kind)
        else values
    )


def _check_metadata(body: bytes, metadata: Mapping[bytes, bytes], kind: str) -> None:
    if metadata.get(_FORMAT) != FORMAT.encode() or metadata.get(_KIND) != kind.encode():
        found = f"{metadata.get(_KIND, b'?').decode('utf-8', 'replace')!r} of format {metadata.get(_FORMAT, b'?')!r}"
        raise CorruptError(f"a {kind} file of format {FORMAT} was expected; found {found}")
    digest = metadata.get(_DIGEST, b"")
    if len(digest) != len(_ZEROS) or _HEADER not in metadata:
        raise CorruptError(f"a {kind} file carries no digest or no header")
    if _file_digest(body, digest) != digest:
        raise CorruptError(
            f"a {kind} file's bytes do not have the digest it carries: it was changed after it was "
            "written"
        )


def _refuse_nulls(table: Table, kind: str) -> None:
    """CorruptError for a null anywhere: as a value, within a list, or as a word of a dictionary."""
    for name in table.column_names:
        for chunk in table.column(name).chunks:
            if chunk.null_count or _inner(chunk).null_count:
                raise CorruptError(f"the column {name} of a {kind} file holds nulls")


def _inner(chunk: Column) -> Column:
    """What a column's own null count does not look into: a list's values, a dictionary's words."""
    if pa.types.is_list(chunk.type):
        return chunk.values
    return chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk


def _file_digest(body: bytes, digits: bytes) -> bytes:
    """The digest that belongs into `body` where `digits` stand first and last."""
    state = xxhash.xxh3_128()
    for number, part in enumerate(_around(body, digits)):
        state.update(_ZEROS if number else b"")
        state.update(part)
    return bytes(state.hexdigest().encode())


def _around(body: bytes, digits: bytes) -> list[memoryview]:
    """What stands before, between and after the first and the last `digits`; nothing is copied."""
    first, last = body.find(digits), body.rfind(digits)
    if first == last:
        raise CorruptError(
            "an Arrow file does not carry its digest both at its front and in its footer"
        )
    view, size = memoryview(body), len(digits)
    return [view[:first], view[first + size : last], view[last + size :]]


def _brief(schema: Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
