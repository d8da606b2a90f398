"""Limits on the memory for reading an Arrow IPC file, from its metadata, before it is decompressed.

    dictionaries | record batch | footer | i32 size of the footer | "ARROW1"
    footer         → blocks: offset of each dictionary and record batch (offsets may repeat)
    record batch   → number of rows, offset and size of each buffer
    buffer         → if it is compressed: i64 claimed size, then the compressed bytes

Arrow's own reader allocates the claimed sizes. The metadata are FlatBuffers: a table begins with
the distance back to its vtable, which has the offset of every field.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from storage.errors import ConfigError, CorruptError

MEMORY_MIN, MEMORY_RATIO = 2**24, 256
"""A file may need the larger of this many bytes and this multiple of its size. lz4, with which
files are written here, compresses by a factor of 255 at most.
"""
MEMORY_MAX = 2**32
"""Most bytes that any file may need."""
ROWS_MIN, ROWS_MAX, ROWS_RATIO = 2**14, 2**20, 8
"""Rows that any file may have, and the most of any file; between them, a file may have this many
rows for each of its bytes. A row becomes some kilobytes of Python objects. The entries of a ledger
are nearly equal and take less than one byte each; lz4 allows at most 4 rows of a batch per byte.
"""
SEQUENCES_MIN, BYTES_PER_SEQUENCE = 2**14, 8
"""A file may have this many rows with tokens, and one for each so many of its bytes. Such a row has
five offsets of four bytes, which lz4 does not compress, and becomes one or two kilobytes of Python
objects.
"""
DICTIONARIES_MAX = 16
"""More than any table has columns with one. The parts of a dictionary count too."""
FIELDS_MAX = 64
"""Columns and their children, each time that the schema refers to one: FlatBuffers may refer to one
table or string from many places, and Arrow copies it for each. No table has half as many.
"""
METADATA_MAX = 16
"""Entries of the schema's metadata, of which a file has four."""
_MAGIC = b"ARROW1"
_CONTINUATION = 0xFFFFFFFF
_METADATA_V5 = 4
"""Older metadata describe compression in another way."""
_DICTIONARY, _RECORDS = 2, 3
"""Kinds of messages."""
_I64 = struct.Struct("<q")
_REFERENCE = struct.Struct("<I")
_BLOCK, _BUFFER = struct.Struct("<qi4xq"), struct.Struct("<qq")


def check_file(body: bytes) -> None:
    """Raise CorruptError when a file needs more memory, or has more rows, than its size allows."""
    try:
        rows, memory = _claimed(memoryview(body))
    except (struct.error, ValueError, IndexError) as error:
        raise CorruptError(
            f"the metadata of an Arrow file of {len(body)} bytes cannot be read: {error}"
        ) from error
    if memory > min(MEMORY_MAX, max(MEMORY_MIN, MEMORY_RATIO * len(body))):
        raise CorruptError(
            f"an Arrow file of {len(body)} bytes claims to hold {memory} bytes of columns; that is "
            "too many"
        )
    if rows > min(ROWS_MAX, max(ROWS_MIN, ROWS_RATIO * len(body))):
        raise CorruptError(
            f"an Arrow file of {len(body)} bytes claims to hold {rows} rows; that is too many"
        )


def check_schema(body: bytes) -> None:
    """Raise ValueError for a schema that is much larger than the bytes that describe it.

    Called before Arrow opens the file, which reads the schema in the footer.
    """
    try:
        footer = _footer(memoryview(body))
        schema = footer.table(1)
        if footer.count(4):
            raise ValueError("a footer with metadata")
        if schema.number(0, 2):
            raise ValueError("numbers of big-endian order")
        if schema.count(2) > METADATA_MAX:
            raise ValueError(f"more than {METADATA_MAX} entries of metadata")
        pending, num_fields = [*schema.tables(1)], 0
        while pending:
            field = pending.pop()
            num_fields += 1
            if num_fields + len(pending) > FIELDS_MAX:
                raise ValueError(f"more than {FIELDS_MAX} columns")
            if field.count(6):
                raise ValueError("a column with metadata")
            pending += field.tables(5)
    except struct.error as error:
        raise ValueError(str(error)) from error


def check_sequences(number: int, num_bytes: int, kind: str) -> None:
    """Raise CorruptError for a file with more sequences than its size allows."""
    if number > max(SEQUENCES_MIN, num_bytes // BYTES_PER_SEQUENCE):
        raise CorruptError(
            f"a {kind} of {num_bytes} bytes has {number} sequences; that is too many"
        )


def check_table(rows: int, memory: int, kind: str) -> None:
    """Raise ConfigError for a table that is larger than readers accept."""
    if rows > ROWS_MAX or memory > MEMORY_MAX:
        raise ConfigError(
            f"a {kind} of {rows:,} rows and {memory:,} bytes cannot be stored: at most "
            f"{ROWS_MAX:,} rows and {MEMORY_MAX:,} "
            "bytes are read; make orders or batches smaller"
        )


def check_written(body: bytes, kind: str) -> None:
    """Raise ConfigError for an encoded table that readers would refuse."""
    try:
        check_file(body)
    except CorruptError as error:
        raise ConfigError(
            f"a {kind} cannot be stored, because readers would refuse it: {error}; make orders or "
            "batches smaller"
        ) from error


def _claimed(body: memoryview) -> tuple[int, int]:
    """Return the number of rows, and the bytes of all decompressed buffers.

    More than one record batch is refused: for each, Arrow checks and looks up every dictionary.
    """
    footer = _footer(body)
    dictionaries, batches = [*footer.structs(2, _BLOCK)], [*footer.structs(3, _BLOCK)]
    if len(batches) > 1:
        raise ValueError(f"{len(batches)} record batches; one is read")
    if len(dictionaries) > DICTIONARIES_MAX:
        raise ValueError(f"{len(dictionaries)} dictionaries; at most {DICTIONARIES_MAX} are read")
    rows = memory = 0
    for offset, metadata_size, _ in dictionaries + batches:
        batch_rows, buffer_sizes = _batch(body, offset, metadata_size)
        rows += batch_rows
        memory += sum(buffer_sizes)
    return rows, memory


def _footer(body: memoryview) -> "_Table":
    end = len(body) - len(_MAGIC) - 4
    size = _unsigned(body, end, 4)
    if bytes(body[-len(_MAGIC) :]) != _MAGIC or size > end:
        raise ValueError("the footer is not at the end of the file")
    return _root(body[end - size : end])


def _batch(body: memoryview, offset: int, metadata_size: int) -> tuple[int, list[int]]:
    """Return the rows of the record batch or dictionary at `offset`, and its buffers' sizes."""
    if offset < 0 or metadata_size < 0 or offset + metadata_size > len(body):
        raise ValueError(f"a batch at {offset} of {len(body)} bytes")
    metadata, content = body[offset : offset + metadata_size], body[offset + metadata_size :]
    message = _root(metadata[8:] if _unsigned(metadata, 0, 4) == _CONTINUATION else metadata[4:])
    version, kind = message.number(0, 2), message.number(1, 1)
    if version != _METADATA_V5:
        raise ValueError(f"a message of metadata version {version + 1}; version 5 is read")
    if kind not in (_DICTIONARY, _RECORDS):
        raise ValueError(f"a message of kind {kind} where a batch belongs")
    if message.count(4):
        raise ValueError("a message with metadata")
    batch = message.table(2)
    if kind == _DICTIONARY:
        batch = batch.table(1)
    is_compressed = batch.has(3)
    sizes = [
        _size(content, start, size, is_compressed) for start, size in batch.structs(2, _BUFFER)
    ]
    rows = batch.number(0, 8)
    if kind == _DICTIONARY:
        sizes.append(rows)  # each string of a dictionary becomes an object, the empty ones too
        rows = 0
    return rows, sizes


def _size(content: memoryview, start: int, size: int, is_compressed: bool) -> int:
    """Return the decompressed size of a buffer; −1 as claimed size means not compressed."""
    if start < 0 or size < 0 or start + size > len(content):
        raise ValueError(f"a buffer of {size} bytes at {start} of {len(content)}")
    if not is_compressed or not size:
        return size
    (claimed,) = _I64.unpack_from(content[start : start + size])
    if claimed < -1:
        raise ValueError(f"a buffer of {claimed} bytes")
    return size if claimed == -1 else int(claimed)


@dataclass(frozen=True)
class _Table:
    """A table of a FlatBuffer. Fields are numbered in the order of Arrow's schema files."""

    body: memoryview
    offset: int

    def has(self, field: int) -> bool:
        return bool(self._offset_of(field))

    def number(self, field: int, size: int) -> int:
        """Return an unsigned integer of `size` bytes; 0 where the field is absent."""
        offset = self._offset_of(field)
        return _unsigned(self.body, offset, size) if offset else 0

    def table(self, field: int) -> "_Table":
        offset = self._offset_of(field)
        if not offset:
            raise ValueError(f"field {field} is absent")
        return _Table(self.body, offset + _unsigned(self.body, offset, 4))

    def tables(self, field: int) -> Iterator["_Table"]:
        """Return the tables of a vector, at most one more than FIELDS_MAX."""
        for index, (distance,) in enumerate(self.structs(field, _REFERENCE)):
            if index > FIELDS_MAX:
                return
            yield _Table(self.body, self._vector(field) + 4 + 4 * index + distance)

    def count(self, field: int) -> int:
        """Return the number of entries of a vector; 0 where it is absent."""
        start = self._vector(field)
        return _unsigned(self.body, start, 4) if start else 0

    def structs(self, field: int, kind: struct.Struct) -> Iterator[tuple[int, ...]]:
        start, count = self._vector(field), self.count(field)
        if not start:
            return iter(())
        part = self.body[start + 4 : start + 4 + count * kind.size]
        if len(part) != count * kind.size:
            raise ValueError(f"{count} entries do not fit the metadata")
        return kind.iter_unpack(part)

    def _vector(self, field: int) -> int:
        """Return the offset of a vector, which begins with its length; 0 when it is absent."""
        offset = self._offset_of(field)
        return offset + _unsigned(self.body, offset, 4) if offset else 0

    def _offset_of(self, field: int) -> int:
        """Return the offset of the field in `body`; 0 when it is absent."""
        if self.offset > len(self.body) - 4:
            raise ValueError(f"a table at {self.offset} of {len(self.body)} bytes")
        (distance,) = struct.unpack_from("<i", self.body, self.offset)
        vtable = self.offset - distance
        if 4 + 2 * field >= _unsigned(self.body, vtable, 2):
            return 0
        relative = _unsigned(self.body, vtable + 4 + 2 * field, 2)
        return self.offset + relative if relative else 0


def _root(body: memoryview) -> _Table:
    return _Table(body, _unsigned(body, 0, 4))


def _unsigned(body: memoryview, offset: int, size: int) -> int:
    if not 0 <= offset <= len(body) - size:
        raise ValueError(f"a number at {offset} of {len(body)} bytes")
    return int.from_bytes(body[offset : offset + size], "little")
