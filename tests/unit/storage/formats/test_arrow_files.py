import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from storage.errors import ConfigError, CorruptError
from storage.formats import arrow_files, arrow_sizes
from storage.formats.arrow_files import DICTIONARY, list_of, schema_of
from tests.support.stores.resealed import arrow_file

SCHEMA = schema_of(
    {
        "n": pa.int32(),
        "word": DICTIONARY,
        "tokens": list_of(pa.int32()),
        "mask": list_of(pa.bool_()),
    }
)


def body(rows: int = 3, header: dict[str, object] | None = None) -> bytes:
    lists = [np.arange(row, dtype=np.int32) for row in range(rows)]
    columns = {
        "n": list(range(rows)),
        "word": ["odd" if row % 2 else "even" for row in range(rows)],
        "tokens": arrow_files.list_column(lists, list_of(pa.int32())),
        "mask": arrow_files.list_column([values % 2 == 0 for values in lists], list_of(pa.bool_())),
    }
    return arrow_files.encode(SCHEMA, columns, "test", header or {"a": 1})


def test_columns_and_header_are_read_back() -> None:
    table, header = arrow_files.decode(body(), SCHEMA, "test")
    assert header == b'{"a":1}'
    assert arrow_files.numbers(table, "n").tolist() == [0, 1, 2]
    assert arrow_files.strings(table, "word") == ["even", "odd", "even"]
    values, offsets = arrow_files.lists(table, "tokens")
    assert (values.tolist(), offsets.tolist()) == ([0, 0, 1], [0, 0, 1, 3])
    assert arrow_files.lists(table, "mask")[0].tolist() == [True, True, False]


def test_a_long_text_is_cut_once_for_all_of_its_rows() -> None:
    """One copy takes up to a kilobyte, and a small file may have a million rows."""
    table, _ = arrow_files.decode(body(6), SCHEMA, "test")
    words = arrow_files.strings(table, "word", 2)
    assert words == ["ev", "od", "ev", "od", "ev", "od"]
    assert len(set(map(id, words))) == 2
    assert arrow_files.strings(table, "word", 4) == ["even", "odd"] * 3


def test_a_table_without_rows_is_read_back() -> None:
    table, _ = arrow_files.decode(body(0), SCHEMA, "test")
    assert arrow_files.numbers(table, "n").tolist() == []
    assert arrow_files.strings(table, "word") == []
    for name, kind in (("mask", np.bool_), ("tokens", np.int32)):
        values, offsets = arrow_files.lists(table, name)
        assert (values.tolist(), offsets.tolist()) == ([], [0])
        assert (values.dtype, offsets.dtype) == (kind, np.int32)


def test_values_without_a_row_are_not_read_back() -> None:
    unnamed = pa.ListArray.from_arrays(pa.array([2], pa.int32()), pa.array([5, 6, 7], pa.int32()))
    values, offsets = arrow_files.lists(pa.record_batch({"tokens": unnamed}), "tokens")
    assert (values.tolist(), offsets.tolist()) == ([], [0])


@pytest.mark.parametrize(("first", "end"), [(0, 2), (5, 7), (3, 3)])
def test_values_in_no_list_are_not_converted(first: int, end: int) -> None:
    bits = pa.Array.from_buffers(pa.bool_(), 2**24, [None, pa.py_buffer(b"\x66" * 2**21)])
    masks = pa.ListArray.from_arrays(pa.array([first, end], pa.int32()), bits)
    tracemalloc.start()
    values, offsets = arrow_files.lists(pa.record_batch({"mask": masks}), "mask")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values.tolist() == ([False, True, True, False] * 2)[first:end]
    assert offsets.tolist() == [0, end - first]
    assert peak_bytes < 2**20


def test_a_number_that_does_not_fit_its_column_is_an_error() -> None:
    with pytest.raises(pa.ArrowInvalid):
        arrow_files.encode(schema_of({"n": pa.int32()}), {"n": [2**31]}, "test", {})


def test_any_arrow_reader_can_open_the_file_and_read_the_metadata() -> None:
    reader = pa.ipc.open_file(body())
    assert reader.read_all().column("tokens").to_pylist() == [[], [0], [0, 1]]
    metadata = reader.schema.metadata
    assert metadata[b"astraflow.format"] == b"1"
    assert metadata[b"astraflow.kind"] == b"test"


def test_the_digest_is_over_the_file_with_zeros_in_place_of_the_digest() -> None:
    file = body()
    digest = pa.ipc.open_file(file).schema.metadata[b"astraflow.digest"]
    assert file.count(digest) == 2
    assert xxhash.xxh3_128_hexdigest(file.replace(digest, b"0" * 32)).encode() == digest


def test_zeros_in_the_data_do_not_affect_the_digest() -> None:
    _, header = arrow_files.decode(body(header={"question": "0" * 500}), SCHEMA, "test")
    assert header == b'{"question":"' + b"0" * 500 + b'"}'


def test_token_values_are_views_into_the_file() -> None:
    values, _ = arrow_files.lists(arrow_files.decode(body(), SCHEMA, "test")[0], "tokens")
    assert not values.flags.owndata
    assert not values.flags.writeable


def test_every_flipped_bit_is_detected() -> None:
    file = body()
    for place in range(len(file)):
        damaged = file[:place] + bytes([file[place] ^ 4]) + file[place + 1 :]
        with pytest.raises(CorruptError):
            arrow_files.decode(damaged, SCHEMA, "test")


def test_files_of_another_kind_or_with_other_columns_are_refused() -> None:
    with pytest.raises(CorruptError, match="a batch file of format 1 was expected; found 'test'"):
        arrow_files.decode(body(), SCHEMA, "batch")
    with pytest.raises(CorruptError, match=r"has the columns n int32, .*; expected n int64"):
        arrow_files.decode(body(), schema_of({"n": pa.int64()}), "test")


def test_an_arrow_file_without_metadata_is_corrupt() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(SCHEMA.empty_table())
    with pytest.raises(CorruptError, match="was expected; found"):
        arrow_files.decode(sink.getvalue().to_pybytes(), SCHEMA, "test")


@pytest.mark.parametrize(
    "garbage", [b"", b"ARROW1", b"\0" * 1000, b"ARROW1\0\0" + b"\xff" * 100 + b"ARROW1"]
)
def test_garbage_is_corrupt(garbage: bytes) -> None:
    with pytest.raises(CorruptError, match="is no readable Arrow file"):
        arrow_files.decode(garbage, SCHEMA, "test")


def crafted(columns: dict[str, pa.Array], old: bytes = b"", new: bytes = b"") -> bytes:
    """A file of `SCHEMA`'s types with a correct digest but arbitrary `columns`, and `old` bytes
    replaced by `new`.
    """
    place = b"f" * 31 + b"e"
    metadata = {
        "astraflow.format": "1",
        "astraflow.kind": "test",
        "astraflow.header": "{}",
        "astraflow.digest": place,
    }
    schema = SCHEMA.with_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(
            pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)
        )
    file: bytes = sink.getvalue().to_pybytes()
    file = file.replace(old, new) if old else file
    return file.replace(place, xxhash.xxh3_128_hexdigest(file.replace(place, b"0" * 32)).encode())


def columns(**changes: pa.Array) -> dict[str, pa.Array]:
    flat = pa.array([1, 2], type=pa.int32())
    mask = pa.array([True, False])
    return {
        "n": pa.array([1], type=pa.int32()),
        "word": pa.array(["x"]).dictionary_encode(),
        "tokens": pa.ListArray.from_arrays(
            pa.array([0, 2], pa.int32()), flat, type=list_of(pa.int32())
        ),
        "mask": pa.ListArray.from_arrays(
            pa.array([0, 2], pa.int32()), mask, type=list_of(pa.bool_())
        ),
        **changes,
    }


def test_a_file_of_another_writer_with_a_correct_digest_is_read() -> None:
    table, _ = arrow_files.decode(crafted(columns()), SCHEMA, "test")
    assert arrow_files.lists(table, "tokens")[0].tolist() == [1, 2]


def batch() -> pa.RecordBatch:
    parts = columns()
    return pa.RecordBatch.from_arrays([parts[name] for name in SCHEMA.names], schema=SCHEMA)


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_a_file_is_read_with_any_compression(compression: str | None) -> None:
    body = arrow_file(SCHEMA, [batch()], "test", {}, compression)
    table, _ = arrow_files.decode(body, SCHEMA, "test")
    values, offsets = arrow_files.lists(table, "tokens")
    assert (values.tolist(), offsets.tolist()) == ([1, 2], [0, 2])
    assert arrow_files.strings(table, "word") == ["x"]


@pytest.mark.parametrize(
    ("num_batches", "reason"), [(0, "out of range"), (2, "2 record batches; one is read")]
)
def test_a_file_without_its_one_record_batch_is_refused(num_batches: int, reason: str) -> None:
    body = arrow_file(SCHEMA, [batch()] * num_batches, "test", {})
    with pytest.raises(CorruptError, match=reason):
        arrow_files.decode(body, SCHEMA, "test")


def test_a_long_text_that_many_rows_share_is_stored_once() -> None:
    num_rows, text = 600, "x" * 2**22  # 2.5 GB together
    columns = {
        "n": [0] * num_rows,
        "word": [text] * num_rows,
        "tokens": arrow_files.list_column([], list_of(pa.int32()), num_rows),
        "mask": arrow_files.list_column([], list_of(pa.bool_()), num_rows),
    }
    stored = arrow_files.encode(SCHEMA, columns, "test", {})
    table, _ = arrow_files.decode(stored, SCHEMA, "test")
    assert arrow_files.strings(table, "word") == columns["word"]


def test_equal_strings_of_a_dictionary_are_one_object() -> None:
    """Else each comparison of two rows compares megabytes."""
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array(["ab", "ab"]))
    first, second = arrow_files.strings(pa.RecordBatch.from_arrays([column], ["word"]), "word")
    assert first is second


def test_a_file_of_this_release_is_read_at_any_compression_ratio() -> None:
    zeros = np.zeros(3_000_000, dtype=np.int32)
    item = {"n": [7], "word": ["x"], "tokens": arrow_files.list_column([zeros], list_of(pa.int32())),
           "mask": arrow_files.list_column([zeros == 0], list_of(pa.bool_()))}  # fmt: skip
    file = arrow_files.encode(SCHEMA, item, "test", {})
    assert len(file) < 100_000
    assert (
        len(arrow_files.lists(arrow_files.decode(file, SCHEMA, "test")[0], "tokens")[0])
        == 3_000_000
    )


def test_metadata_of_an_older_version_is_rejected() -> None:
    place = b"f" * 31 + b"e"
    metadata = {
        "astraflow.format": "1",
        "astraflow.kind": "test",
        "astraflow.header": "{}",
        "astraflow.digest": place,
    }
    schema, sink = SCHEMA.with_metadata(metadata), pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_batch(
            pa.RecordBatch.from_arrays([columns()[name] for name in SCHEMA.names], schema=schema)
        )
    file = sink.getvalue().to_pybytes()
    file = file.replace(place, xxhash.xxh3_128_hexdigest(file.replace(place, b"0" * 32)).encode())
    with pytest.raises(
        CorruptError,
        match=r"metadata of an Arrow file .* a message of metadata version 4; version 5 is read",
    ):
        arrow_files.decode(file, SCHEMA, "test")


def test_nulls_are_refused_even_with_a_correct_digest() -> None:
    with pytest.raises(CorruptError, match="the column n of a test file has nulls"):
        arrow_files.decode(crafted(columns(n=pa.array([None], type=pa.int32()))), SCHEMA, "test")
    flat = pa.array([1, None], type=pa.int32())
    holed = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), flat, type=list_of(pa.int32()))
    with pytest.raises(CorruptError, match="the column tokens of a test file has nulls"):
        arrow_files.decode(crafted(columns(tokens=holed)), SCHEMA, "test")


@pytest.mark.parametrize("words", [[None], ["x", None]])
def test_a_null_in_a_dictionary_is_rejected(words: list[str | None]) -> None:
    indices = pa.array([len(words) - 1], type=pa.int32())
    hidden = pa.DictionaryArray.from_arrays(indices, pa.array(words, type=pa.string()))
    assert hidden.null_count == 0  # Arrow counts only the indices
    with pytest.raises(CorruptError, match="the column word of a test file has nulls"):
        arrow_files.decode(crafted(columns(word=hidden)), SCHEMA, "test")


def test_offsets_outside_the_values_are_refused_even_with_a_correct_digest() -> None:
    offsets, wild = np.array([0, 2], np.int32).tobytes(), np.array([0, 1000], np.int32).tobytes()
    with pytest.raises(
        CorruptError,
        match="is no readable Arrow file: In column 2: Invalid: List child array",
    ):
        arrow_files.decode(crafted(columns(), offsets, wild), SCHEMA, "test")


def test_columns_are_compressed() -> None:
    """Prompts of a group repeat, and so do versions and policies: uncompressed they would be
    transferred many times.
    """
    lists = [np.full(1000, 7, dtype=np.int32)] * 50
    columns = {
        "n": [0] * 50,
        "word": ["even"] * 50,
        "tokens": arrow_files.list_column(lists, list_of(pa.int32())),
        "mask": arrow_files.list_column([values == 7 for values in lists], list_of(pa.bool_())),
    }
    assert len(arrow_files.encode(SCHEMA, columns, "test", {})) < 50 * 1000 * 4 // 20


def test_a_table_that_readers_would_refuse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_sizes, "ROWS_MIN", 99)
    monkeypatch.setattr(arrow_sizes, "ROWS_RATIO", 0)
    with pytest.raises(
        ConfigError,
        match=r"a test cannot be stored, because readers would refuse it: an Arrow file of \d+ bytes "
        r"claims to hold 100 rows; that is too many; make orders or batches smaller",
    ):
        body(100)
    assert arrow_files.decode(body(99), SCHEMA, "test")[0].num_rows == 99


def test_a_file_above_the_limits_is_neither_read_nor_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for large files: the smaller bounds, which grow with a file, do not apply here."""
    whole = body(100)
    monkeypatch.setattr(arrow_sizes, "ROWS_MAX", 99)
    with pytest.raises(CorruptError, match="claims to hold 100 rows; that is too many"):
        arrow_files.decode(whole, SCHEMA, "test")
    with pytest.raises(
        ConfigError, match=r"a test of 100 rows and [\d,]+ bytes cannot be stored: at most 99 rows"
    ):
        body(100)
    assert arrow_files.decode(body(99), SCHEMA, "test")[0].num_rows == 99
    monkeypatch.undo()
    monkeypatch.setattr(arrow_sizes, "MEMORY_MAX", 20_000)
    with pytest.raises(
        CorruptError, match=r"claims to hold 2\d{4} bytes of columns; that is too many"
    ):
        arrow_files.decode(whole, SCHEMA, "test")
    with pytest.raises(
        ConfigError,
        match=r"at most .* rows and 20,000 bytes are read; make orders or batches smaller",
    ):
        body(100)


class Registered(pa.ExtensionType):
    """A type of another package, whose code must not run."""

    def __init__(self) -> None:
        super().__init__(pa.int32(), "tests.registered")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"hostile"

    @classmethod
    def __arrow_ext_deserialize__(cls, *_: object) -> "Registered":
        raise TypeError("the code was called")


def test_a_file_with_an_extension_type_calls_no_code_of_other_packages() -> None:
    kind = Registered()
    schema = pa.schema([pa.field("n", kind, nullable=False)])
    column = pa.ExtensionArray.from_storage(kind, pa.array([1], pa.int32()))
    body = arrow_file(schema, [pa.RecordBatch.from_arrays([column], schema=schema)], "test", {})
    pa.register_extension_type(kind)
    try:
        with pytest.raises(CorruptError, match="names an extension type"):
            arrow_files.decode(body, schema_of({"n": pa.int32()}), "test")
    finally:
        pa.unregister_extension_type("tests.registered")


def test_a_text_with_the_name_of_that_metadata_is_read_back() -> None:
    schema, text = schema_of({"s": arrow_files.DICTIONARY}), "ARROW:extension:name"
    body = arrow_files.encode(schema, {"s": [text]}, "test", {"prompt": text})
    table, header = arrow_files.decode(body, schema, "test")
    assert (arrow_files.strings(table, "s"), json.loads(header)) == ([text], {"prompt": text})
