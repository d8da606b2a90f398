"""Tables as Arrow IPC files: the versioned, verified format of shards, batches and evaluations.

    schema metadata   astraflow.format  "1"            astraflow.kind    "shard"
                      astraflow.header  a JSON object  astraflow.digest  32 hex digits

The digest is xxh3_128 over the whole file, with the first and the last occurrence of its own digits
replaced by zeros: the schema is in the file twice, at the front and in the footer. Arrow itself
does not detect a flipped bit. Bodies are lz4-compressed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from storage.errors import CorruptError
from storage.formats import arrow_sizes
from storage.formats.json_objects import dump
from storage.plain_names import new_write_id
from storage.records.types import Json

Table: TypeAlias = Any
"""A pyarrow.RecordBatch; pyarrow has no type stubs."""
Schema: TypeAlias = Any
Column: TypeAlias = Any

Compression: TypeAlias = Literal["lz4"] | None
"""None for bytes that stay on one machine, for a moment."""

FORMAT = "1"
_FORMAT, _KIND, _HEADER, _DIGEST = (
    b"astraflow.format",
    b"astraflow.kind",
    b"astraflow.header",
    b"astraflow.digest",
)
_ZEROS = b"0" * 32
_EXTENSION = b"ARROW:extension:name"
"""Key of the metadata of a column with which a file names an extension type."""
NAME_SHOWN_MAX = 60
_NO_OFFSETS = np.zeros(1, dtype=np.int32)

DICTIONARY = pa.dictionary(pa.int32(), pa.string())
"""Type of repeated strings: each is stored once and indexed by int32."""


def list_of(value: Any) -> Any:
    """Return the type of a list column without nulls."""
    return pa.list_(pa.field("item", value, nullable=False))


def schema_of(columns: Mapping[str, Any]) -> Schema:
    """Return a schema whose columns have no nulls."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def list_column(arrays: Sequence[NDArray[Any]], kind: Any, num_empty: int = 0) -> Column:
    """Return a column with one list for each array, and `num_empty` empty lists after them.

    Raises OverflowError for 2³¹ values or more.
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


def encode(
    schema: Schema,
    columns: Mapping[str, Any],
    kind: str,
    header: Json,
    compression: Compression = "lz4",
) -> bytes:
    """Encode a table.

    Args:
        columns: arrays or sequences by name.
        header: data that is not in a column.
        compression: of the columns; files of a store have lz4.

    Raises:
        ConfigError: the table is larger than readers accept.
    """
    # In the place of the digest until the file is complete. It occurs nowhere else in the file.
    placeholder = new_write_id().encode()
    metadata = {
        _FORMAT: FORMAT.encode(),
        _KIND: kind.encode(),
        _HEADER: dump(header),
        _DIGEST: placeholder,
    }
    schema = schema.with_metadata(metadata)
    batch = pa.RecordBatch.from_arrays(
        [_array(columns[field.name], field.type) for field in schema], schema=schema
    )
    arrow_sizes.check_table(batch.num_rows, batch.nbytes, kind)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(
        sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    arrow_sizes.check_written(body, kind)
    return _file_digest(body, placeholder).join(_split_around(body, placeholder))


def decode(body: bytes, schema: Schema, kind: str) -> tuple[Table, bytes]:
    """Decode and verify a table: returns it and the header as JSON.

    Raises CorruptError, which names what is invalid.
    """
    try:
        _check_no_extension(body)
        arrow_sizes.check_schema(body)
        reader = pa.ipc.open_file(pa.py_buffer(body))  # reads the schema alone
        metadata = reader.schema.metadata or {}
        _check_metadata(body, metadata, kind)
        if not reader.schema.equals(schema):
            raise CorruptError(
                f"a {kind} file has the columns {_brief(reader.schema)}; expected {_brief(schema)}"
            )
        arrow_sizes.check_file(body)
        table = reader.get_batch(0)
        table.validate(full=True)
        _check_no_nulls(table, kind)
    except (pa.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        raise CorruptError(
            f"a {kind} file of {len(body)} bytes is no readable Arrow file: {error}"
        ) from error
    return table, metadata[_HEADER]


def numbers(table: Table, name: str) -> NDArray[Any]:
    """Return a column of numbers."""
    values: NDArray[Any] = table.column(name).to_numpy(zero_copy_only=False)
    return values


def strings(table: Table, name: str, characters_max: int | None = None) -> list[str]:
    """Return a dictionary column as strings; equal strings are one object.

    Longer ones than `characters_max` are cut, once for all of their rows.
    """
    column = table.column(name)
    words = column.dictionary
    if characters_max is not None:
        words = pc.utf8_slice_codeunits(words, 0, characters_max)
    first: dict[str, str] = {}  # comparing equal objects takes no time, whatever their length
    distinct = [first.setdefault(word, word) for word in words.to_pylist()]
    return [distinct[index] for index in column.indices.to_numpy()]


def lists(table: Table, name: str) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return a list column as the flat values of its lists, which are read-only, and not copied if
    they are numbers, and offsets [rows + 1] from 0.

    A file may have any number of values in no list; a bit of them would become a byte.
    """
    column = table.column(name)
    if len(column) == 0:
        return column.values.slice(0, 0).to_numpy(zero_copy_only=False), _NO_OFFSETS
    offsets = column.offsets.to_numpy()
    first, end = int(offsets[0]), int(offsets[-1])
    listed = column.values.slice(first, end - first)
    values = listed.to_numpy(zero_copy_only=False)
    values.setflags(write=False)  # also booleans, which are copied
    return values, offsets - offsets[0]


def _array(values: Any, kind: Any) -> Column:
    """Encode the values of a dictionary column; others are converted by the record batch.

    A record batch would encode a dictionary too, but many times slower. Arrow's own encoder copies
    the text of each row first: thousands of rows may share one of megabytes.
    """
    if not pa.types.is_dictionary(kind):
        return values
    index_of: dict[str, int] = {}
    indices = [index_of.setdefault(value, len(index_of)) for value in values]
    return pa.DictionaryArray.from_arrays(
        pa.array(indices, kind.index_type), pa.array([*index_of], kind.value_type)
    )


def _check_no_extension(body: bytes) -> None:
    """Raise CorruptError for a file that names an extension type. Arrow calls the type's code when
    it reads the schema, if some package of this process registered it: pandas' fails with any
    error, and others unpickle.
    """
    # As it is in a FlatBuffer. A text in the header or in a compressed column has no such length.
    if len(_EXTENSION).to_bytes(4, "little") + _EXTENSION + b"\0" in body:
        raise CorruptError("an Arrow file names an extension type; none is read")


def _check_metadata(body: bytes, metadata: Mapping[bytes, bytes], kind: str) -> None:
    if metadata.get(_FORMAT) != FORMAT.encode() or metadata.get(_KIND) != kind.encode():
        actual_kind = metadata.get(_KIND, b"?").decode("utf-8", "replace")
        raise CorruptError(
            f"a {kind} file of format {FORMAT} was expected; "
            f"found {actual_kind!r} of format {metadata.get(_FORMAT, b'?')!r}"
        )
    digest = metadata.get(_DIGEST, b"")
    if len(digest) != len(_ZEROS) or _HEADER not in metadata:
        raise CorruptError(f"a {kind} file has no digest or no header")
    if _file_digest(body, digest) != digest:
        raise CorruptError(
            f"a {kind} file's bytes do not have the digest it carries: it was changed after it was "
            "written"
        )


def _check_no_nulls(table: Table, kind: str) -> None:
    """Raise CorruptError for a null as a value, in a list, or in a dictionary."""
    for name in table.schema.names:
        column = table.column(name)
        if column.null_count or _inner(column).null_count:
            raise CorruptError(f"the column {name} of a {kind} file has nulls")


def _inner(column: Column) -> Column:
    """Return the values of a list or of a dictionary, which a column's null count omits."""
    if pa.types.is_list(column.type):
        return column.values
    return column.dictionary if pa.types.is_dictionary(column.type) else column


def _file_digest(body: bytes, digits: bytes) -> bytes:
    """Return the digest of `body`, in which `digits` are in the place of the digest."""
    state = xxhash.xxh3_128()
    for index, part in enumerate(_split_around(body, digits)):
        state.update(_ZEROS if index else b"")
        state.update(part)
    return bytes(state.hexdigest().encode())


def _split_around(body: bytes, digits: bytes) -> list[memoryview]:
    """Split `body` at the first and the last `digits`, without a copy."""
    first, last = body.find(digits), body.rfind(digits)
    if first == last:
        raise CorruptError(
            "an Arrow file does not have its digest both at its front and in its footer"
        )
    view, size = memoryview(body), len(digits)
    return [view[:first], view[first + size : last], view[last + size :]]


def _brief(schema: Schema) -> str:
    columns = (f"{field.name[:NAME_SHOWN_MAX]} {field.type}" for field in schema)
    return ", ".join(column[: 2 * NAME_SHOWN_MAX] for column in columns)
