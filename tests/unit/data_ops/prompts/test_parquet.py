from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_ops.prompts import FilePrompts, parquet
from data_ops.prompts.path import read_file
from data_ops.prompts.rows import RowsFile
from storage.errors import ConfigError


def rows_file(folder: Path) -> RowsFile:
    return RowsFile(folder / "a.parquet", "a.parquet")


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_text_in_an_encoding_without_a_dictionary_is_read(encoding: str, tmp_path: Path) -> None:
    rows = [{"question": f"problem {n}?", "answer": str(n % 3)} for n in range(2_500)]
    pq.write_table(
        pa.Table.from_pylist(rows),
        tmp_path / "a.parquet",
        use_dictionary=["answer"],
        column_encoding={"question": encoding},
    )
    prompts = read_file(FilePrompts(path=str(tmp_path / "a.parquet")))
    assert [prompt.fields for prompt in prompts] == rows


def test_text_that_a_file_has_once_is_not_repeated_in_its_batches(tmp_path: Path) -> None:
    table = pa.table({"question": ["7" * 1_000] * 1_000, "answer": ["2"] * 1_000})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    batches = [*parquet._batches(rows_file(tmp_path), metadata, 0, ["question", "answer"])]
    assert sum(batch.num_rows for batch in batches) == 1_000
    assert sum(batch.nbytes for batch in batches) < 20_000


def test_text_that_an_encoding_shares_between_rows_is_read_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"question": ["7" * 100_000] * 1_000, "answer": ["2"] * 1_000})
    pq.write_table(
        table,
        tmp_path / "a.parquet",
        use_dictionary=False,
        column_encoding={"question": "DELTA_BYTE_ARRAY", "answer": "PLAIN"},
    )
    monkeypatch.setattr(parquet, "REPEATED_BYTES", 10**6)
    metadata = pq.read_metadata(tmp_path / "a.parquet")
    assert metadata.row_group(0).column(0).total_uncompressed_size < 120_000
    sizes = [
        (batch.num_rows, batch.nbytes < 10**6)
        for batch in parquet._batches(rows_file(tmp_path), metadata, 0, ["question", "answer"])
    ]
    assert sum(num_rows for num_rows, _ in sizes) == 1_000
    assert all(small for _, small in sizes)


def test_rows_of_all_kinds_of_columns_are_those_that_arrow_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {
            "question": f"{n}?",
            "answer": None if n % 7 == 0 else str(n % 5),
            "chat": [{"role": "user", "content": f"{n % 9}"}, None][: n % 3] if n % 11 else None,
            "more": {"a.b": [[f"{n % 4}", None], []], "w": n / 4} if n % 13 else None,
            "level": n % 10 == 0,
        }
        for n in range(2_500)
    ]
    level = pa.array([f"level {n % 3}" for n in range(2_500)]).dictionary_encode()
    table = pa.Table.from_pylist(rows).append_column("name", level)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2_200)
    expected = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row for _, row in parquet.read_rows(rows_file(tmp_path))] == expected
    monkeypatch.setattr(parquet, "READ_BYTES", 2**14)
    assert [row for _, row in parquet.read_rows(rows_file(tmp_path))] == expected


@pytest.mark.parametrize("error", [pa.ArrowNotImplementedError, pa.ArrowCapacityError])
def test_a_row_group_that_arrow_cannot_read_with_dictionaries_is_read_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    class NoDictionaryAfterTheFirstRows(pq.ParquetFile):  # type: ignore[misc]  # pyarrow is untyped
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.dictionaries = settings.get("read_dictionary")

        def iter_batches(self, *args: Any, **settings: Any) -> Iterator[Any]:
            for batch in super().iter_batches(*args, **settings):
                yield batch
                if self.dictionaries:
                    raise error("no dictionary")

    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=30)
    monkeypatch.setattr(pq, "ParquetFile", NoDictionaryAfterTheFirstRows)
    monkeypatch.setattr(parquet, "READ_BYTES", 8 * 2 * 7)
    prompts = read_file(FilePrompts(path=str(tmp_path / "a.parquet")))
    assert [prompt.fields for prompt in prompts] == rows


def test_a_parquet_file_whose_columns_are_all_left_out_is_refused_with_their_types(
    tmp_path: Path,
) -> None:
    table = pa.table({"question": [b"1+1"], "answer": pa.array([2], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "a.parquet", coerce_timestamps="ms")
    with pytest.raises(ConfigError) as caught:
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))
    assert str(caught.value) == (
        f"{tmp_path / 'a.parquet'} has no column with a type that JSON has (found "
        "'question' binary, 'answer' timestamp[ms]); write its text as string"
    )


def test_a_file_with_too_many_columns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(
        pa.table({"question": ["1"], "answer": ["2"], "id": [3]}), tmp_path / "a.parquet"
    )
    monkeypatch.setattr(parquet, "COLUMNS_MAX", 2)
    with pytest.raises(ConfigError, match=r"a\.parquet has 3 columns, and at most 2 are read; "):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))


def test_a_column_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    column = pa.array([1])
    for _ in range(1_000):
        column = pa.StructArray.from_arrays([column], names=["x"])
    table = pa.table({"question": ["1"], "answer": ["2"], "x": column})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
    with pytest.raises(ConfigError, match=r"a\.parquet has a column that is nested too deep"):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))


def write_nested(path: Path, levels: int) -> None:
    """Write a file without rows, whose footer has one column of so many levels: Arrow's own writer
    ends the process for such a column.
    """
    group = b"\x35\x02\x18\x01a\x15\x02\x00"  # optional, named `a`, with one child
    leaf = b"\x15\x02\x25\x02\x18\x01x\x00"
    number, num_elements = levels + 2, b""
    while number:
        num_elements += bytes([number & 127 | (128 if number > 127 else 0)])
        number >>= 7
    schema = b"\xfc" + num_elements + group * (levels + 1) + leaf
    footer = b"\x15\x04\x19" + schema + b"\x16\x00\x19\x0c\x00"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (9_900, r"a\.parquet has a column that is nested too deep to be read"),
        (100_000, r"again, with at most 10,000 row groups and nested columns$"),
    ],
)
def test_a_column_of_thousands_of_levels_is_refused_and_does_not_end_the_process(
    levels: int, message: str, tmp_path: Path
) -> None:
    write_nested(tmp_path / "a.parquet", levels)
    with pytest.raises(ConfigError, match=message):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))


def test_a_column_is_read_if_json_has_all_of_its_types_and_nothing_is_one(tmp_path: Path) -> None:
    row = {
        "question": "1?",
        "both": {"text": "a", "pixels": b"b"},
        "deep": [{"more": [{"text": "a", "pixels": b"b"}]}],
        "nothing": None,
        "texts": {"a": ["b"], "c": None},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    ((number, read),) = parquet.read_rows(rows_file(tmp_path))
    assert (number, read) == (
        1, {"question": "1?", "nothing": None, "texts": {"a": ["b"], "c": None}}
    )  # fmt: skip


def test_a_slice_is_converted_without_the_lists_of_the_rows_behind_it() -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0, 0, 0, 0], pa.int32()), ["7" * 1_000])
    rows = pa.StructArray.from_arrays(
        [pa.ListArray.from_arrays(pa.array([0, 1, 3, 4], pa.int32()), text)], names=["a"]
    )
    batch = parquet._alone(rows[1:2])
    assert len(batch.column("a").values) == 2
    schema = pa.schema([("a", pa.list_(pa.string()))])
    assert batch.cast(schema).to_pylist() == [{"a": ["7" * 1_000] * 2}]


def sizes_of(value: Any) -> tuple[int, int]:
    """Bytes of text, and values, the containers among them."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    counts = [sizes_of(part) for part in parts]
    text = len(value.encode()) if isinstance(value, str) else 0
    return text + sum(each for each, _ in counts), 1 + sum(each for _, each in counts)


def test_the_size_of_each_row_of_nested_lists_is_its_own() -> None:
    rows = [
        {"a": [["7" * 5, None], [], ["é"]], "b": [{"c": "12", "d": 1.0}]},
        {"a": [], "b": None},
        {"a": None, "b": []},
        {"a": [["1"]], "b": [{"c": None, "d": 2.0}, {"c": "3" * 40, "d": None}]},
    ]
    text, values = parquet._row_sizes(pa.array(rows))
    assert list(zip(text.tolist(), values.tolist(), strict=True)) == [*map(sizes_of, rows)]
