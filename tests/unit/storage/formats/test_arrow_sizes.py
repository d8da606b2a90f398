"""The memory for an Arrow file is computed from its metadata, which these tests build by hand."""

import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from storage.errors import CorruptError
from storage.formats import arrow_files, arrow_sizes

Table = tuple[bytes, int]
"""Bytes, and where among them the table begins."""
Field = bytes | Table | None
"""A number, a table, or none; a vector is a table that begins at 0."""
MEMORY_MIN, MEMORY_RATIO, ROWS_MIN, ROWS_RATIO, DICTIONARIES_MAX = 2**24, 256, 2**14, 8, 16
"""As docs/format.md promises them."""
SCHEMA, DICTIONARY, RECORDS, TENSOR = 1, 2, 3, 4
V5 = 4
RATIO_FROM = MEMORY_MIN // MEMORY_RATIO
"""Bytes of a file from which on its size decides how much memory it may ask for."""


def table(*fields: Field) -> Table:
    """A FlatBuffer table after its vtable; the data that its fields refer to follow it."""
    vtable_bytes = 4 + 2 * len(fields)
    offsets, inline, targets, places = [], b"", b"", []
    for field in fields:
        offsets.append(0 if field is None else 4 + len(inline))
        if isinstance(field, tuple):
            places.append((4 + len(inline), field))
            inline += b"\0" * 4
        elif field is not None:
            inline += field
    record = bytearray(struct.pack("<i", vtable_bytes) + inline)
    end = len(record)
    for place, (body, start) in places:
        record[place : place + 4] = u32(end + len(targets) + start - place)
        targets += body
    vtable = struct.pack(f"<{2 + len(fields)}H", vtable_bytes, end, *offsets)
    return vtable + record + targets, vtable_bytes


def vector(entries: Sequence[bytes], count: int | None = None) -> Table:
    return u32(len(entries) if count is None else count) + b"".join(entries), 0


def root(found: Table) -> bytes:
    body, start = found
    return u32(4 + start) + body


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def batch(rows: int, buffers: Sequence[tuple[int, int]] = (), compressed: bool = True) -> Table:
    """A record batch whose `buffers` are (start, bytes) in the body after the metadata."""
    return table(
        struct.pack("<q", rows), vector([]), vector([struct.pack("<qq", *item) for item in buffers]),
        table() if compressed else None,
    )  # fmt: skip


def message(
    header: Table,
    kind: int = RECORDS,
    version: int = V5,
    mark: bytes = b"\xff" * 4,
    content: bytes = b"",
) -> tuple[bytes, int]:
    """A message with its body, and the number of bytes of its metadata."""
    body = root(table(struct.pack("<H", version), struct.pack("<B", kind), header))
    return mark + u32(len(body)) + body + content, len(mark) + 4 + len(body)


def words(
    rows: int, buffers: Sequence[tuple[int, int]] = (), content: bytes = b""
) -> tuple[bytes, int]:
    """A message of a dictionary."""
    return message(table(struct.pack("<q", 0), batch(rows, buffers)), DICTIONARY, content=content)


def block(offset: int, metadata_bytes: int) -> bytes:
    return struct.pack("<qi4xq", offset, metadata_bytes, 0)


def ended(front: bytes, dictionaries: Sequence[bytes] = (), records: Sequence[bytes] = ()) -> bytes:
    footer = root(table(struct.pack("<H", V5), None, vector(dictionaries), vector(records)))
    return front + footer + u32(len(footer)) + b"ARROW1"


def file(
    *messages: tuple[bytes, int],
    dictionaries: Sequence[tuple[bytes, int]] = (),
    size: int = 0,
    pad: bytes = b"\0",
) -> bytes:
    """A file of these messages, padded to `size` bytes."""
    front, blocks = b"ARROW1\0\0", []
    for body, metadata_bytes in [*messages, *dictionaries]:
        blocks.append(block(len(front), metadata_bytes))
        front += body
    records, others = blocks[: len(messages)], blocks[len(messages) :]
    return ended(front + pad * (size - len(ended(front, others, records))), others, records)


def claim(num_bytes: int) -> bytes:
    """A compressed buffer whose header gives this number of bytes."""
    return struct.pack("<q", num_bytes)


def fault(body: bytes) -> str:
    with pytest.raises(CorruptError) as caught:
        arrow_sizes.check_file(body)
    return str(caught.value)


def claimed(body: bytes) -> int:
    """The memory that the columns of a refused file require."""
    result = fault(body).removeprefix(f"an Arrow file of {len(body)} bytes claims to hold ")
    return int(result.removesuffix(" bytes of columns; that is too many"))


@pytest.mark.parametrize("size", [0, ROWS_MIN // ROWS_RATIO, ROWS_MIN])
def test_the_row_limit_of_a_file_is_a_multiple_of_its_size_with_a_minimum(
    size: int,
) -> None:
    most = max(ROWS_MIN, ROWS_RATIO * size)
    arrow_sizes.check_file(file(message(batch(most)), size=size))
    body = file(message(batch(most + 1)), size=size)
    assert len(body) == size or not size
    assert (
        fault(body)
        == f"an Arrow file of {len(body)} bytes claims to hold {most + 1} rows; that is too many"
    )


@pytest.mark.parametrize("size", [0, RATIO_FROM, RATIO_FROM + 100])
def test_the_memory_limit_of_a_file_is_a_multiple_of_its_size_with_a_minimum(
    size: int,
) -> None:
    most = max(MEMORY_MIN, MEMORY_RATIO * size)
    for num_bytes in (most, most + 1):
        body = file(message(batch(1, [(0, 8)]), content=claim(num_bytes)), size=size)
        if num_bytes > most:
            assert claimed(body) == num_bytes
        else:
            arrow_sizes.check_file(body)


def test_bytes_of_all_dictionaries_and_buffers_are_summed() -> None:
    third = MEMORY_MIN // 3
    item = message(batch(1, [(0, 8), (8, 8)]), content=claim(third) + claim(third))
    assert claimed(file(item, dictionaries=[words(5, [(0, 8)], claim(third))])) == 3 * third + 5


def test_a_dictionary_listed_twice_counts_twice() -> None:
    body, metadata_bytes = words(MEMORY_MIN // 2 + 1)
    assert claimed(ended(body, [block(0, metadata_bytes)] * 2)) == MEMORY_MIN + 2


def test_dictionary_values_count_as_bytes_and_not_as_rows() -> None:
    arrow_sizes.check_file(file(message(batch(ROWS_MIN)), dictionaries=[words(MEMORY_MIN)]))
    assert claimed(file(dictionaries=[words(MEMORY_MIN + 1)])) == MEMORY_MIN + 1


def test_the_size_of_an_uncompressed_buffer_is_its_bytes() -> None:
    big = claim(MEMORY_MIN)
    plain = claim(2**62) + b"\0" * 92
    assert (
        claimed(file(message(batch(1, [(0, 8), (8, 100)]), content=big + claim(-1) + b"\0" * 92)))
        == MEMORY_MIN + 100
    )
    arrow_sizes.check_file(file(message(batch(1, [(0, 8), (8, 0)]), content=big)))
    arrow_sizes.check_file(file(message(batch(1, [(0, 100)], compressed=False), content=plain)))
    assert claimed(file(message(batch(1, [(0, 100)]), content=plain))) == 2**62


@pytest.mark.parametrize(
    ("buffer", "content", "reason"),
    [
        ((0, 8), claim(-2), "a buffer of -2 bytes"),
        ((-1, 8), claim(1), "a buffer of 8 bytes at -1 of"),
        ((0, -1), claim(1), "a buffer of -1 bytes at 0 of"),
        ((0, 7), claim(1), "at least 8 bytes"),
    ],
)
def test_an_invalid_buffer_is_rejected(
    buffer: tuple[int, int], content: bytes, reason: str
) -> None:
    body = file(message(batch(1, [buffer]), content=content))
    assert fault(body).startswith(
        f"the metadata of an Arrow file of {len(body)} bytes cannot be read: "
    )
    assert reason in fault(body)


def test_a_buffer_can_end_at_the_end_of_the_file_and_not_after_it() -> None:
    def of(size: int) -> bytes:
        front, metadata_bytes = message(batch(1, [(0, size)], compressed=False))
        return ended(front, records=[block(0, metadata_bytes)])

    most = len(of(0)) - message(batch(1, [(0, 0)], compressed=False))[1]
    arrow_sizes.check_file(of(most))
    assert f"a buffer of {most + 1} bytes at 0 of {most}" in fault(of(most + 1))


def test_a_batch_outside_the_file_is_rejected() -> None:
    front, metadata_bytes = message(batch(1))
    arrow_sizes.check_file(ended(front, records=[block(0, metadata_bytes)]))
    whole = len(ended(front, records=[block(0, 0)]))
    arrow_sizes.check_file(ended(front, records=[block(0, whole)]))
    assert f"a batch at 0 of {whole} bytes" in fault(ended(front, records=[block(0, whole + 1)]))
    assert f"a batch at 1 of {whole} bytes" in fault(ended(front, records=[block(1, whole)]))
    assert f"a batch at -1 of {whole} bytes" in fault(
        ended(front, records=[block(-1, metadata_bytes)])
    )
    assert f"a batch at 0 of {whole} bytes" in fault(ended(front, records=[block(0, -1)]))
    assert "a number at 0 of 0 bytes" in fault(ended(front, records=[block(0, 0)]))


def test_a_message_is_read_with_and_without_the_continuation_marker() -> None:
    for mark in (b"\xff" * 4, b""):
        body, metadata_bytes = message(batch(ROWS_MIN + 1), mark=mark)
        assert "16385 rows" in fault(ended(body, records=[block(0, metadata_bytes)]))


@pytest.mark.parametrize(
    ("version", "reason"), [(3, "version 4"), (5, "version 6"), (V5 + 2**8, "version 261")]
)
def test_messages_with_another_metadata_version_are_refused(version: int, reason: str) -> None:
    assert f"a message of metadata {reason}; version 5 is read" in fault(
        file(message(batch(1), version=version))
    )


@pytest.mark.parametrize("kind", [0, SCHEMA, TENSOR])
def test_the_blocks_of_the_footer_must_be_batches(kind: int) -> None:
    assert f"a message of kind {kind} where a batch belongs" in fault(file(message(batch(1), kind)))


def test_a_dictionary_without_its_batch_and_a_message_without_content_are_refused() -> None:
    assert "field 1 is absent" in fault(
        file(dictionaries=[message(table(struct.pack("<q", 0)), DICTIONARY)])
    )
    nothing = root(table(struct.pack("<H", V5), struct.pack("<B", RECORDS)))
    assert "field 2 is absent" in fault(
        file((b"\xff" * 4 + u32(len(nothing)) + nothing, 8 + len(nothing)))
    )


def test_an_absent_field_is_0() -> None:
    arrow_sizes.check_file(file(message(table())))
    arrow_sizes.check_file(file(message(batch(ROWS_MIN))))
    rows = struct.pack("<q", ROWS_MIN + 1)
    assert "claims to hold 16385 rows" in fault(file(message(table(rows))))
    (vtable_and_rest, start) = table(rows)
    odd = (
        struct.pack("<H", start - 1) + vtable_and_rest[2:]
    )  # Arrow reads a field that crosses the end of the vtable
    assert "claims to hold 16385 rows" in fault(file(message((odd, start))))
    buffers = vector([struct.pack("<qq", 0, 8)])
    body = file(message(table(None, None, buffers, table()), content=claim(MEMORY_MIN + 1)))
    assert claimed(body) == MEMORY_MIN + 1


def test_one_record_batch_and_the_maximum_number_of_dictionaries_are_accepted_and_no_more() -> None:
    front, metadata_bytes = message(batch(1))
    records = [block(0, metadata_bytes)]
    dictionaries = records * DICTIONARIES_MAX
    arrow_sizes.check_file(ended(front, dictionaries, records))
    assert "2 record batches; one is read" in fault(ended(front, dictionaries, records * 2))
    assert f"{DICTIONARIES_MAX + 1} dictionaries; at most {DICTIONARIES_MAX} are read" in fault(
        ended(front, [*dictionaries, *records], records)
    )


def test_a_vector_with_more_entries_than_bytes_is_refused() -> None:
    buffers = struct.pack("<qq", 0, 0)
    for count in (2, 3, 2**32 - 1):
        body = file(message(table(struct.pack("<q", 1), None, vector([buffers, buffers], count))))
        if count == 2:
            arrow_sizes.check_file(body)
        else:
            assert f"{count} entries do not fit the metadata" in fault(body)


def test_the_footer_must_be_at_the_end_and_can_be_the_whole_file() -> None:
    body = ended(b"")
    arrow_sizes.check_file(body)
    assert "the footer is not at the end of the file" in fault(body[:-1] + b"2")
    assert "the footer is not at the end of the file" in fault(body[1:])
    assert "the footer is not at the end of the file" in fault(body + b"\0")


@pytest.mark.parametrize("size", [0, 5, 9, 10])
def test_a_file_that_is_too_short_for_a_footer_is_refused(size: int) -> None:
    message = fault((u32(0) + b"ARROW1")[10 - size :])
    assert message.startswith(
        f"the metadata of an Arrow file of {size} bytes cannot be read: a number at "
    )


def test_tables_and_vtables_outside_of_the_metadata_are_refused() -> None:
    def footer(body: bytes) -> bytes:
        return body + u32(len(body)) + b"ARROW1"

    empty = struct.pack("<HHi", 4, 4, 4)  # a vtable without fields, and its table
    arrow_sizes.check_file(footer(u32(8) + empty))
    arrow_sizes.check_file(footer(u32(0)))  # a table that is its own vtable, of no size
    assert "a table at 9 of 12 bytes" in fault(footer(u32(9) + empty))
    assert "a number at -1 of 12 bytes" in fault(footer(u32(8) + struct.pack("<HHi", 4, 4, 9)))
    arrow_sizes.check_file(
        footer(u32(4) + struct.pack("<iHH", -4, 4, 4))
    )  # the vtable behind its table, the last that fits
    assert "a number at 11 of 12 bytes" in fault(footer(u32(4) + struct.pack("<iHH", -7, 4, 4)))


@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
def test_the_computed_size_equals_what_arrow_allocates(compression: str | None) -> None:
    """Four columns of 8 bytes per row: just within the minimum limit, and just above it."""
    schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in "abcd"])
    for rows, is_too_large in ((MEMORY_MIN // 32, False), (MEMORY_MIN // 32 + 1, True)):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(
            sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)
        ) as writer:
            writer.write_batch(
                pa.RecordBatch.from_arrays([pa.array(np.zeros(rows, np.int64))] * 4, schema=schema)
            )
        body = sink.getvalue().to_pybytes()
        if compression is None:
            arrow_sizes.check_file(body)  # all of its bytes exist
        elif rows <= ROWS_RATIO * len(body):
            arrow_sizes.check_file(body)  # lz4: the file is above RATIO_FROM
        elif is_too_large and len(body) <= RATIO_FROM:
            assert claimed(body) == 32 * rows
        else:
            assert f"claims to hold {rows} rows" in fault(body)


def file_with(
    fields: list[pa.Field],
    metadata: dict[str, str] | None = None,
    of_batch: dict[str, str] | None = None,
) -> bytes:
    schema = pa.schema(fields, metadata=metadata)
    arrays = [pa.array([], field.type) for field in fields]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(
            pa.RecordBatch.from_arrays(arrays, schema=schema), custom_metadata=of_batch
        )
    body: bytes = sink.getvalue().to_pybytes()
    return body


def columns(number: int, kind: pa.DataType | None = None) -> list[pa.Field]:
    return [pa.field(f"column {index}", kind or pa.int32()) for index in range(number)]


def entries(number: int) -> dict[str, str]:
    return {f"key {index}": "value" for index in range(number)}


def test_a_schema_has_few_columns_with_their_children_and_few_entries_of_metadata() -> None:
    """Each is counted as often as the schema refers to it: a shared one is copied so often."""
    arrow_sizes.check_schema(file_with(columns(64), entries(16)))
    arrow_sizes.check_schema(file_with(columns(32, pa.list_(pa.int32()))))
    with pytest.raises(ValueError, match="more than 64 columns"):
        arrow_sizes.check_schema(file_with(columns(65)))
    with pytest.raises(ValueError, match="more than 64 columns"):
        arrow_sizes.check_schema(file_with(columns(33, pa.list_(pa.int32()))))
    with pytest.raises(ValueError, match="more than 16 entries of metadata"):
        arrow_sizes.check_schema(file_with(columns(1), entries(17)))
    with pytest.raises(ValueError, match="a column with metadata"):
        arrow_sizes.check_schema(file_with([pa.field("x", pa.int32(), metadata={"a": "b"})]))
    with pytest.raises(CorruptError, match="a message with metadata"):
        arrow_sizes.check_file(file_with(columns(1), of_batch=entries(1)))


def references(number: int, target: Table) -> Table:
    """A vector that refers to one table from `number` places."""
    body, start = target
    places = [u32(4 * (number - index) + start) for index in range(number)]
    return vector(places)[0] + body, 0


def file_of(fields: Table) -> bytes:
    footer = root(table(None, table(None, fields)))
    return footer + u32(len(footer)) + b"ARROW1"


def test_a_column_is_counted_as_often_as_the_schema_refers_to_it() -> None:
    column = table(None)
    arrow_sizes.check_schema(file_of(references(64, column)))
    with pytest.raises(ValueError, match="more than 64 columns"):
        arrow_sizes.check_schema(file_of(references(65, column)))
    for _ in range(40):  # 2^41 columns in two kilobytes
        column = table(None, None, None, None, None, references(2, column))
    body = file_of(references(2, column))
    assert len(body) < 2_500
    with pytest.raises(ValueError, match="more than 64 columns"):
        arrow_sizes.check_schema(body)


def test_a_schema_of_big_endian_numbers_is_refused() -> None:
    """Arrow would copy each column."""
    fields = references(1, table(None))
    little, big = (root(table(None, table(struct.pack("<h", order), fields))) for order in (0, 1))
    arrow_sizes.check_schema(little + u32(len(little)) + b"ARROW1")
    with pytest.raises(ValueError, match="numbers of big-endian order"):
        arrow_sizes.check_schema(big + u32(len(big)) + b"ARROW1")


def test_a_schema_is_checked_before_arrow_opens_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    body = file_with(columns(65))
    monkeypatch.setattr(pa.ipc, "open_file", None)
    with pytest.raises(CorruptError, match="is no readable Arrow file: more than 64 columns"):
        arrow_files.decode(body, pa.schema(columns(65)), "test")
