"""How much memory an Arrow IPC file asks for, read from its footer and its messages before anything
is decompressed.

    … record batches … | footer | i32 bytes of the footer | "ARROW1"
    footer         → blocks: where each dictionary and each record batch lies (several blocks may name one place)
    record batch   → rows, and of every buffer where it lies; a compressed one begins with the i64 size it claims to have

Arrow's own reader allocates what a file claims. The metadata are FlatBuffers: a table begins with
the distance back to its vtable, which holds the place of every field. Knows nothing of columns.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from storage.errors import ConfigError, CorruptError

MEMORY_MIN, MEMORY_RATIO = 2**24, 256
"""A file may ask for the larger of this many bytes, and this many times its own. No lz4 frame,
which is what is written here, shrinks its content to less than a 255th.
"""
MEMORY_MAX = 2**32
"""No file may ask for more, however large it is."""
ROWS_MIN, ROWS_MAX = 2**14, 2**20
"""Rows that any file may have, and that no file may exceed; between them each needs a byte of the
file. A row is some kilobytes of Python objects.
"""
BLOCKS_MAX = 4096
"""Record batches and dictionary batches of one file."""
_MAGIC = b"ARROW1"
_CONTINUATION = 0xFFFFFFFF
_METADATA_V5 = 4
"""Older metadata could compress in a way of its own."""
_DICTIONARY, _RECORDS = 2, 3
"""Kinds of a message."""
_I64 = struct.Struct("<q")
_BLOCK, _BUFFER = struct.Struct("<qi4xq"), struct.Struct("<qq")


def check_file(body: bytes) -> None:
    """CorruptError when reading the file would take more memory, or more rows, than its size
    allows, or cannot be foretold.
    """
    try:
        rows, memory = _asked(memoryview(body))
    except (struct.error, ValueError, IndexError) as error:
        raise CorruptError(
            f"the metadata of an Arrow file of {len(body)} bytes cannot be read: {error}"
        ) from error
    if memory > min(MEMORY_MAX, max(MEMORY_MIN, MEMORY_RATIO * len(body))):
        raise CorruptError(
            f"an Arrow file of {len(body)} bytes claims to hold {memory} bytes of columns; that is "
            "too many"
        )
    if rows > min(ROWS_MAX, max(ROWS_MIN, len(body))):
        raise CorruptError(
            f"an Arrow file of {len(body)} bytes claims to hold {rows} rows; that is too many"
        )


def check_table(rows: int, memory: int, kind: str) -> None:
    """ConfigError for a table that nobody would read."""
    if rows > ROWS_MAX or memory > MEMORY_MAX:
        raise ConfigError(
            f"a {kind} of {rows:,} rows and {memory:,} bytes cannot be stored: at most "
            f"{ROWS_MAX:,} rows and {MEMORY_MAX:,} "
            "bytes are read; make orders or batches smaller"
        )


def _asked(body: memoryview) -> tuple[int, int]:
    """Rows, and bytes of all buffers once they are decompressed."""
    end = len(body) - len(_MAGIC) - 4
    size = _unsigned(body, end, 4)
    if bytes(body[-len(_MAGIC) :]) != _MAGIC or size > end:
        raise ValueError("the footer does not end the file")
    footer = _root(body[end - size : end])
    blocks = [*footer.structs(2, _BLOCK), *footer.structs(3, _BLOCK)]
    if len(blocks) > BLOCKS_MAX:
        raise ValueError(f"{len(blocks)} batches; at most {BLOCKS_MAX} are read")
    rows = memory = 0
    for offset, metadata_size, _ in blocks:
        found, content = _batch(body, offset, metadata_size)
        rows += found
        memory += sum(content)
    return rows, memory


def _batch(body: memoryview, offset: int, metadata_size: int) -> tuple[int, list[int]]:
    """Rows of the record batch or dictionary at `offset`, and the bytes of each of its buffers."""
    if offset < 0 or metadata_size < 0 or offset + metadata_size > len(body):
        raise ValueError(f"a batch at {offset} of {len(body)} bytes")
    metadata, content = body[offset : offset + metadata_size], body[offset + metadata_size :]
    message = _root(metadata[8:] if _unsigned(metadata, 0, 4) == _CONTINUATION else metadata[4:])
    version, kind = message.number(0, 2), message.number(1, 1)
    if version != _METADATA_V5:
        raise ValueError(f"a message of metadata version {version + 1}; version 5 is read")
    if kind not in (_DICTIONARY, _RECORDS):
        raise ValueError(f"a message of kind {kind} where a batch belongs")
    batch = message.table(2)
    if kind == _DICTIONARY:
        batch = batch.table(1)
    is_compressed = batch.has(3)
    sizes = [
        _size(content, start, size, is_compressed) for start, size in batch.structs(2, _BUFFER)
    ]
    rows = batch.number(0, 8)
    if kind == _DICTIONARY:
        sizes.append(rows)  # its words are held one by one, the empty ones too
        rows = 0
    return rows, sizes


def _size(content: memoryview, start: int, size: int, is_compressed: bool) -> int:
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
    place: int

    def has(self, field: int) -> bool:
        return bool(self._at(field))

    def number(self, field: int, size: int) -> int:
        """An integer that is not negative; 0 where the field is absent."""
        at = self._at(field)
        return _unsigned(self.body, at, size) if at else 0

    def table(self, field: int) -> "_Table":
        at = self._at(field)
        if not at:
            raise ValueError(f"field {field} is absent")
        return _Table(self.body, at + _unsigned(self.body, at, 4))

    def structs(self, field: int, kind: struct.Struct) -> Iterator[tuple[int, ...]]:
        at = self._at(field)
        if not at:
            return iter(())
        start = at + _unsigned(self.body, at, 4)
        count = _unsigned(self.body, start, 4)
        part = self.body[start + 4 : start + 4 + count * kind.size]
        if len(part) != count * kind.size:
            raise ValueError(f"{count} entries do not fit the metadata")
        return kind.iter_unpack(part)

    def _at(self, field: int) -> int:
        """Where the field lies; 0 when it is absent."""
        if self.place > len(self.body) - 4:
            raise ValueError(f"a table at {self.place} of {len(self.body)} bytes")
        (back,) = struct.unpack_from("<i", self.body, self.place)
        vtable = self.place - back
        if 4 + 2 * field >= _unsigned(self.body, vtable, 2):
            return 0
        offset = _unsigned(self.body, vtable + 4 + 2 * field, 2)
        return self.place + offset if offset else 0


def _root(body: memoryview) -> _Table:
    return _Table(body, _unsigned(body, 0, 4))


def _unsigned(body: memoryview, at: int, size: int) -> int:
    if not 0 <= at <= len(body) - size:
        raise ValueError(f"a number at {at} of {len(body)} bytes")
    return int.from_bytes(body[at : at + size], "little")
