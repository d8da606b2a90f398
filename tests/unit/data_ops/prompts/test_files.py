import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from data_ops.prompts import FilePrompts, HubPrompts, parquet
from data_ops.prompts import path as files
from data_ops.prompts.hub import read_hub
from data_ops.prompts.path import read_file
from storage.errors import ConfigError, TransientError
from storage.records.rollouts import Group, Order
from storage.run import orders, shards
from storage.store.object_store import ObjectStore
from tests.conftest import BUCKET
from tests.support.runs import builders
from tests.support.stores.ordinary_user import as_ordinary_user


def write_lines(path: Path, *lines: str) -> FilePrompts:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return FilePrompts(path=str(path))


def test_a_jsonl_row_keeps_its_other_columns_and_gets_an_id_from_its_line(tmp_path: Path) -> None:
    good = json.dumps({"question": "1+1=?", "answer": 2, "level": "easy"})
    prompts = read_file(write_lines(tmp_path / "sums.jsonl", good, "", good))
    assert [prompt.id for prompt in prompts] == ["sums/0", "sums/2"]
    assert prompts[0].fields == {"question": "1+1=?", "answer": "2", "level": "easy"}


def test_named_columns_become_question_and_answer(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", '{"problem": "1+1", "solution": "first 3 #### no, #### 2 "}')
    source = FilePrompts(
        path=str(tmp_path / "a.jsonl"), question="problem", answer="solution", answer_after="####"
    )
    fields = read_file(source)[0].fields
    assert (fields["question"], fields["answer"]) == ("1+1", "2")


def test_every_kind_of_broken_line_is_named_with_its_number(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "broken.jsonl",
        '{"question": "1+1", "answer": "2"}',
        '{"question": "1+1", "answer"',
        '{"problem": "1+1", "answer": "2"}',
        '{"question": "  ", "answer": "2"}',
        '["1+1", "2"]',
        '{"question": "1+1", "answer": null}',
        '{"question": ["1+1"], "answer": "2"}',
        r'{"\u001b[2J\nline 9: good": "1"}',
    )
    with pytest.raises(ConfigError) as caught:
        read_file(source)
    message = str(caught.value)
    assert f"{source.path}: 7 of 8 lines cannot be used" in message
    assert "line 2: not JSON (Expecting ':' delimiter" in message
    assert "line 3: no column 'question'; found 'problem', 'answer'" in message
    assert r"line 8: no column 'question'; found '\x1b[2J\nline 9: good'" in message
    assert "line 4: column 'question' is empty" in message
    assert "line 5: a JSON list instead of an object" in message
    assert "line 6: column 'answer' holds nothing instead of text" in message
    assert "line 7: column 'question' holds list instead of text" in message


def test_only_the_first_ten_broken_lines_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(write_lines(tmp_path / "broken.jsonl", *["oops"] * 25))
    assert "25 of 25 lines" in str(caught.value)
    assert "line 10: " in str(caught.value)
    assert "line 11: " not in str(caught.value)
    assert "and 15 more" in str(caught.value)


def test_bytes_that_are_not_text_are_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b'{"question": "1+1", "answer": "2"}\n\xff\xfe\x00\n')
    with pytest.raises(ConfigError, match="1 of 2 lines cannot be used"):
        read_file(FilePrompts(path=str(tmp_path / "bytes.jsonl")))


def test_lines_in_utf_16_get_the_advice_to_save_them_as_utf_8(tmp_path: Path) -> None:
    line = '{"question": "1+1", "answer": "2"}\n'
    (tmp_path / "a.jsonl").write_bytes((line * 2).encode("utf-16"))
    with pytest.raises(
        ConfigError, match=r"line 3: not JSON \(.*; it has NUL .*: save it as UTF-8"
    ):
        read_file(FilePrompts(path=str(tmp_path / "a.jsonl")))


def test_a_missing_mark_before_the_answer_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", '{"question": "1+1", "answer": "2"}')
    with pytest.raises(
        ConfigError, match=r"line 1: column 'answer' has no '####' \(prompts.answer_after\)"
    ):
        read_file(source.model_copy(update={"answer_after": "####"}))


def test_an_empty_file_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no prompt at all"):
        read_file(write_lines(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ConfigError, match=r"absent\.jsonl is not a file"):
        read_file(FilePrompts(path=str(tmp_path / "absent.jsonl")))


@pytest.mark.parametrize("path", ["~nobody-of-this-name/a.jsonl", "~a\0b/a.jsonl", "~\udcff.jsonl"])
def test_a_home_that_no_user_has_is_no_file(path: str) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        read_file(FilePrompts(path=path))


def test_a_name_that_begins_with_a_tilde_is_a_file_and_the_home_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_lines(tmp_path / "~train.jsonl", '{"question": "1+1", "answer": "2"}')
    for path in ("~train.jsonl", "~/~train.jsonl"):
        (prompt,) = read_file(FilePrompts(path=path))
        assert prompt.fields == {"question": "1+1", "answer": "2"}


def test_a_file_with_a_read_error_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.symlink_to("/proc/self/mem")  # opens, and reading it is an input/output error
    with pytest.raises(
        TransientError, match=r"sums\.jsonl cannot be read \(Input/output error\); "
    ):
        read_file(FilePrompts(path=str(file)))


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "sums.jsonl", '{"question": "1+1", "answer": "2"}')
    (tmp_path / "sums.jsonl").chmod(0)

    def read() -> None:
        with pytest.raises(ConfigError, match=r"sums\.jsonl cannot be read \(Permission denied\)"):
            read_file(source)

    as_ordinary_user(tmp_path, read)


def test_a_limit_stops_reading_before_a_later_broken_line(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", '{"question": "1+1", "answer": "2"}', "oops")
    assert len(read_file(source.model_copy(update={"limit": 1}))) == 1


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    rows = [
        {"question": "1+1", "answer": "2", "tags": ["a"]},
        {"question": "2+2", "answer": "4", "tags": []},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sums.parquet")
    source = write_lines(tmp_path / "sums.jsonl", *(json.dumps(row) for row in rows))
    assert read_file(FilePrompts(path=str(tmp_path / "sums.parquet"))) == read_file(source)


def test_parquet_columns_that_json_cannot_hold_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "1+1", "answer": "2", "image": b"\x00", "boxes": [{"pixels": b"\x00"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_file(FilePrompts(path=str(tmp_path / "a.parquet")))[0].fields == {
        "question": "1+1",
        "answer": "2",
    }
    assert "columns 'image', 'boxes' are left out" in caplog.text


def test_a_broken_parquet_row_is_named(tmp_path: Path) -> None:
    rows = [{"question": "1+1", "answer": "2"}, {"question": None, "answer": "2"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="row 2: column 'question' holds nothing"):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))


def test_a_file_in_another_format_than_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read as Parquet"):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))


def test_without_the_package_datasets_the_message_has_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes `import datasets` an ImportError
    with pytest.raises(ConfigError, match=r"needs the package `datasets`: pip install datasets"):
        read_hub(HubPrompts(hub="openai/gsm8k"))


class FakeDatasets(ModuleType):
    """The used part of the package `datasets`: one data set, or an error of the hub."""

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__("datasets")
        self.fault = fault
        self.rows: list[dict[str, Any]] = [{"question": "1+1", "answer": "so #### 2"}]

    def load_dataset(
        self, name: str, configuration: str | None, split: str
    ) -> Iterator[dict[str, Any]]:
        if self.fault is not None:
            raise self.fault
        # a name alone would mean a folder of the working directory, if there is one
        assert (name, configuration, split) == ("hf://datasets/openai/gsm8k", "main", "test")
        return iter(self.rows)


def test_a_hub_data_set_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets())
    source = HubPrompts(hub="openai/gsm8k", hub_config="main", split="test", answer_after="####")
    prompt = read_hub(source)[0]
    assert (prompt.id, prompt.fields["answer"]) == ("openai/gsm8k/test/0", "2")


@pytest.mark.parametrize(
    "fault",
    [
        ConnectionError("no route to the hub"),
        RuntimeError("Dataset scripts are no longer supported, but found gsm8k.py"),
        TypeError("argument of type 'int' is not iterable"),
    ],
)
def test_an_error_of_the_hub_has_a_remedy(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(fault))
    with pytest.raises(ConfigError, match=rf"{fault}\); check the names and the network"):
        read_hub(HubPrompts(hub="openai/gsm8k"))


def test_a_row_of_the_hub_that_cannot_be_decoded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(list[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield self[0]
            raise ImportError("To support decoding audio data, please install 'torchcodec'.")

    fake = FakeDatasets()
    fake.rows = Rows(fake.rows)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    source = HubPrompts(hub="openai/gsm8k", hub_config="main", split="test")
    with pytest.raises(ConfigError, match=r"gsm8k, row 2: cannot be read \(ImportError: To supp"):
        read_hub(source)


def test_a_prompt_that_is_too_large_for_an_order_is_refused_with_its_row(tmp_path: Path) -> None:
    def write(num_characters: int) -> FilePrompts:
        rows = {"problem": ["\0" * num_characters], "answer": ["2"]}
        pq.write_table(pa.table(rows), tmp_path / "a.parquet")
        return FilePrompts(path=str(tmp_path / "a.parquet"), question="problem")

    with pytest.raises(
        ConfigError, match=r"row 1: 33,600,0\d\d bytes as JSON, more than the limit"
    ):
        read_file(write(2_800_000))
    assert len(read_file(write(2_700_000))) == 1


UNSTORABLE = {
    "a lone surrogate": (
        r'{"question": "1+1 \ud800", "answer": "2"}',
        "column 'question' has the lone surrogate U+D800 as",
    ),
    "a surrogate in a key": (
        r'{"question": "1", "answer": "2", "\udfff": 1}',
        "has a key that has the lone surrogate U+DFFF",
    ),
    "an answer that is not a number": (
        '{"question": "1", "answer": NaN}',
        "column 'answer' is nan",
    ),
    "a number that is too large": (
        '{"question": "1", "answer": "2", "meta": {"w": [1, 1e999]}}',
        "column 'meta.w.1' is inf",
    ),
    "minus infinity": ('{"question": "1", "answer": "2", "w": -Infinity}', "column 'w' is -inf"),
    "5,000 digits": (
        f'{{"question": "1", "answer": {"9" * 5000}}}',
        "column 'answer' is a whole number of more than 128 bits",
    ),
    "a decimal of 1,101 characters": (
        f'{{"question": "1", "answer": "2", "w": 0.{"1" * 1099}}}',
        f"the number 0.{'1' * 18}… has more than 1,100 characters",
    ),
    "400 levels": (
        f'{{"question": "1", "answer": "2", "x": {"[" * 400}{"]" * 400}}}',
        "is nested deeper than 32 levels",
    ),
    "600,000 values": (
        f'{{"question": "1", "answer": "2", "x": [{"1," * 599_999}1]}}',
        "column 'x' exceeds the limit of 500,000 values",
    ),
    "100,000 levels": ("[" * 100_000, "nested deeper than 32 levels"),
}


@pytest.mark.parametrize(("line", "words"), UNSTORABLE.values(), ids=UNSTORABLE.keys())
def test_a_row_that_cannot_be_stored_in_an_order_is_named_with_its_line_and_column(
    tmp_path: Path, line: str, words: str
) -> None:
    source = write_lines(tmp_path / "a.jsonl", '{"question": "1+1", "answer": "2"}', line)
    with pytest.raises(ConfigError) as caught:
        read_file(source)
    assert "1 of 2 lines cannot be used" in str(caught.value)
    assert f"line 2: {words}" in str(caught.value) or words in str(caught.value).splitlines()[1]


def test_a_surrogate_in_the_bytes_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "1+1", "answer": "\xed\xa0\x80"}\n')
    with pytest.raises(ConfigError, match="line 1: column 'answer' has the lone surrogate U"):
        read_file(FilePrompts(path=str(tmp_path / "a.jsonl")))


def test_a_decimal_of_1_100_characters_is_rounded_as_json_does(tmp_path: Path) -> None:
    line = f'{{"question": "1", "answer": "2", "w": 0.{"1" * 1098}}}'
    assert read_file(write_lines(tmp_path / "a.jsonl", line))[0].fields["w"] == 1 / 9


def test_whole_numbers_of_128_bits_are_kept(tmp_path: Path) -> None:
    largest = 2**128 - 1
    line = f'{{"question": "1", "answer": "2", "w": [{largest}, {-largest}]}}'
    assert read_file(write_lines(tmp_path / "a.jsonl", line))[0].fields["w"] == [largest, -largest]
    line = f'{{"question": "1", "answer": "2", "w": {-largest - 1}}}'
    with pytest.raises(ConfigError, match="column 'w' is a whole number of more than 128 bits"):
        read_file(write_lines(tmp_path / "a.jsonl", line))


def test_a_row_of_the_maximum_depth_can_be_stored_in_an_order_and_in_a_shard(
    tmp_path: Path, memory_store: ObjectStore
) -> None:
    deep = json.dumps(
        {
            "question": "1",
            "answer": "2",
            "n": 2**128 - 1,
            "x": json.loads("[" * 31 + '"end"' + "]" * 31),
        }
    )
    prompt = read_file(write_lines(tmp_path / "a.jsonl", deep))[0]
    order = Order(number=0, prompts=(prompt,), samples_per_prompt=2, seed=0, seen=(), cursor={})
    orders.create(memory_store, order)
    assert orders.read(memory_store, 0) == order
    group = Group(prompt, (builders.episode(),))
    shards.create(memory_store, builders.shard(group))
    assert shards.read(memory_store, 0).groups[0].prompt == prompt
    with pytest.raises(ConfigError, match="deeper than 32 levels"):
        read_file(write_lines(tmp_path / "a.jsonl", deep.replace('"end"', '["end"]')))


def test_a_parquet_row_that_cannot_be_stored_in_an_order_is_named(tmp_path: Path) -> None:
    rows = [{"question": "1+1", "answer": "2", "w": weight} for weight in (0.5, float("nan"), 1.0)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"1 of 3 rows cannot be used.*\n.*row 2: column 'w' is nan"
    ):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))


def test_a_parquet_row_with_invalid_text_is_named(tmp_path: Path) -> None:
    text = (
        pa.array([b"1+1", b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False).view(pa.string())
    )
    pq.write_table(
        pa.table({"question": text, "answer": pa.array(["2", "2"])}), tmp_path / "a.parquet"
    )
    with pytest.raises(ConfigError, match=r"1 of 2 rows cannot be used.*\n.*row 2: not readable"):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))


def test_a_hub_row_is_validated_and_columns_without_a_json_type_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    source = HubPrompts(hub="openai/gsm8k", hub_config="main", split="test")
    fake.rows = [{"question": "1+1", "answer": "2", "image": b"\x00"}] * 2
    assert [prompt.fields for prompt in read_hub(source)] == [
        {"question": "1+1", "answer": "2"}
    ] * 2
    assert caplog.text.count("columns 'image' are left out") == 1
    fake.rows = [{"question": "1+1", "answer": "\ud800"}]
    with pytest.raises(ConfigError, match="row 1: column 'answer' has the lone surrogate U"):
        read_hub(source)
    nested: list[object] = []
    for _ in range(5000):
        nested = [nested]
    fake.rows = [{"question": "1+1", "answer": "2", "at": nested}]
    with pytest.raises(ConfigError, match=r"row 1: column 'at[.0]+' is nested deeper than 32"):
        read_hub(source)


def test_a_file_name_that_is_invalid_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"sums\xff.jsonl")
    with pytest.raises(
        ConfigError, match="becomes part of every prompt's id, but it has the lone surrogate U"
    ):
        read_file(write_lines(file, '{"question": "1+1", "answer": "2"}'))


def test_a_repeated_column_is_refused_with_its_line(tmp_path: Path) -> None:
    lines = ('{"question": "q", "answer": "1"}', '{"question": "q", "answer": "1", "answer": "2"}')
    with pytest.raises(ConfigError, match=r"line 2: column 'answer' is written twice"):
        read_file(write_lines(tmp_path / "a.jsonl", *lines))


def test_a_repeated_column_among_many_is_found_in_one_pass(tmp_path: Path) -> None:
    columns = ", ".join(f'"k{number}": 1' for number in range(200_000))
    line = f'{{{columns}, "k199999": 2, "question": "q", "answer": "1"}}'
    with pytest.raises(ConfigError, match=r"line 1: column 'k199999' is written twice"):
        read_file(write_lines(tmp_path / "a.jsonl", line))


def test_an_empty_answer_after_its_mark_is_refused_with_its_line(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", '{"question": "q", "answer": "so #### "}')
    with pytest.raises(ConfigError, match=r"line 1: column 'answer' has nothing after '####'"):
        read_file(FilePrompts(path=str(tmp_path / "a.jsonl"), answer_after="####"))


def test_an_empty_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        FilePrompts(path="a.jsonl", answer_after="")


def test_an_impossible_path_is_reported_as_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        read_file(FilePrompts(path=str(tmp_path / ("x" * 300 + ".jsonl"))))


def test_a_long_column_name_is_shortened_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_file(
            write_lines(
                tmp_path / "a.jsonl", '{"question": "q", "answer": "1", "' + "k" * 5000 + '": NaN}'
            )
        )
    assert "line 1: column 'kkk" in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_dictionary_encoded_text_is_read_as_text(tmp_path: Path) -> None:
    table = pa.table({"question": ["q", "r"], "answer": pa.array(["1", "2"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet")
    prompts = read_file(FilePrompts(path=str(tmp_path / "a.parquet")))
    assert [prompt.fields["answer"] for prompt in prompts] == ["1", "2"]


def test_a_line_of_unlimited_length_is_refused_before_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = json.dumps({"question": "1+1=?", "answer": "2"})
    monkeypatch.setattr(files, "LINE_BYTES_MAX", len(good) + 1)  # the line feed is included
    assert [prompt.id for prompt in read_file(write_lines(tmp_path / "a.jsonl", good, good))] == [
        "a/0",
        "a/1",
    ]
    source = write_lines(tmp_path / "b.jsonl", good, f" {good}", good)
    with pytest.raises(
        ConfigError,
        match=rf"b\.jsonl, line 2: has more than {len(good) + 1} bytes; write one JSON object a line",
    ):
        read_file(source)


def write_repeated(path: Path, question: str, num_rows: int) -> FilePrompts:
    """Write a small file whose rows all have this question, which the file has once."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), [question])
    table = pa.table({"question": text, "answer": ["2"] * num_rows})
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=2**28)
    assert path.stat().st_size < 10_000
    return FilePrompts(path=str(path))


def test_a_limit_reads_the_first_rows_of_a_small_file_with_a_terabyte_of_text(
    tmp_path: Path,
) -> None:
    source = write_repeated(tmp_path / "a.parquet", "7" * (2**24 - 1), 65_536)
    prompts = read_file(source.model_copy(update={"limit": 2}))
    assert [prompt.id for prompt in prompts] == ["a/0", "a/1"]
    assert {prompt.fields["question"] for prompt in prompts} == {"7" * (2**24 - 1)}


def test_a_parquet_row_with_more_text_than_a_line_may_have_is_refused_by_number(
    tmp_path: Path,
) -> None:
    source = write_repeated(tmp_path / "a.parquet", "7" * 2**24 + "7", 2)
    with pytest.raises(ConfigError) as caught:
        read_file(source)
    assert str(caught.value).splitlines()[1] == (
        "  row 1: 16,777,218 bytes of text and 2 values, more than the limits of 16,777,216 bytes "
        "and 500,000 values"
    )


def test_rows_that_together_fill_the_memory_are_refused_with_a_limit_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_repeated(tmp_path / "a.parquet", "7" * 999, 10)
    monkeypatch.setattr(parquet, "MEMORY_BYTES_MAX", 3 * (1000 + 512 + 2 * 64))
    with pytest.raises(ConfigError, match=r"a\.parquet: more than 3 rows take .* at most 3, or "):
        read_file(source)
    assert len(read_file(source.model_copy(update={"limit": 3}))) == 3


def test_rows_of_a_large_batch_are_converted_one_by_one_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {
            "question": f"{n}?",
            "answer": n,
            "tags": ["a"] * n,
            "more": {"x": None, "y": [{"z": "w"}]},
        }
        for n in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = FilePrompts(path=str(tmp_path / "a.parquet"))
    at_once = read_file(source)
    assert [prompt.fields for prompt in at_once] == [
        {**row, "answer": str(row["answer"])} for row in rows
    ]
    monkeypatch.setattr(parquet, "BATCH_BYTES", 2)
    assert read_file(source) == at_once


def test_text_and_values_of_a_row_are_counted_in_lists_and_structs_as_in_json() -> None:
    rows = [
        {"a": "é", "b": ["x", None, "yz"], "c": {"d": "xyz", "e": [[1], []]}},
        {"a": None, "b": [], "c": {"d": None, "e": None}},
        {"a": "é", "b": ["yz"] * 5, "c": {"d": "", "e": [[1, 2, 3]]}},
    ]
    array = pa.array(rows)
    counts = [(8, 3 + 3 + 2 + 2 + 1), (0, 3 + 2), (12, 3 + 5 + 2 + 1 + 3)]
    for start in range(3):
        text, values = parquet._row_sizes(array.slice(start))
        assert list(zip(text, values - 1, strict=True)) == counts[start:]
    repeated = pa.array(
        [["x", "yz"], None, ["yz"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))
    )
    text, values = parquet._row_sizes(repeated)
    assert (list(text), list(values)) == ([3, 0, 2], [3, 1, 2])


def test_lists_with_more_values_than_json_may_have_are_refused_before_they_are_read(
    tmp_path: Path,
) -> None:
    zeros = pa.ListArray.from_arrays(
        pa.array([0, 500_000, 1_000_001]), pa.nulls(1_000_001, pa.int8())
    )
    table = pa.table({"question": ["q"] * 2, "answer": ["1"] * 2, "x": zeros})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="2 rows have 1,000,001 values in one column, more than"):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet"), limit=1))
    pq.write_table(table.slice(0, 1), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="row 1: 2 bytes of text and 500,003 values, more than"):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))


def test_a_parquet_file_with_a_repeated_column_is_refused(tmp_path: Path) -> None:
    columns = [pa.array(["q"]), pa.array(["1"]), pa.array(["2"])]
    table = pa.Table.from_arrays(columns, names=["question", "answer", "answer"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet has the column 'answer' twice; keep one"):
        read_file(FilePrompts(path=str(tmp_path / "a.parquet")))


def test_rows_of_several_row_groups_are_numbered_through(tmp_path: Path) -> None:
    table = pa.table({"question": [str(n) for n in range(5)], "answer": ["1"] * 5})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    prompts = read_file(FilePrompts(path=str(tmp_path / "a.parquet")))
    assert [(prompt.id, prompt.fields["question"]) for prompt in prompts] == [
        (f"a/{n}", str(n)) for n in range(5)
    ]


def test_a_file_that_does_not_fit_in_memory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(path: Path, **settings: int) -> None:
        raise pa.ArrowMemoryError("malloc of size 16777280 failed")

    source = write_repeated(tmp_path / "a.parquet", "7", 2)
    monkeypatch.setattr(pq, "ParquetFile", too_large)
    with pytest.raises(
        ConfigError, match=r"a\.parquet: the rows after row 0 do not fit in the mem"
    ):
        read_file(source)


@pytest.mark.s3
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_on_s3_gives_the_same_prompts_as_a_local_one(
    suffix: str, s3_server: str, tmp_path: Path
) -> None:
    import boto3  # type: ignore[import-untyped]  # the package has no types

    local = tmp_path / f"sums.{suffix}"
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(3)]
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), local)
    else:
        write_lines(local, *map(json.dumps, rows))
    key = f"{uuid4().hex}/sums.{suffix}"
    with closing(boto3.client("s3")) as client:
        client.put_object(Bucket=BUCKET, Key=key, Body=local.read_bytes())
    expected = FilePrompts(path=str(local)).stream().all()
    assert [prompt.id for prompt in expected] == ["sums/0", "sums/1", "sums/2"]
    for query in ("", f"?endpoint={s3_server}"):
        assert FilePrompts(path=f"s3://{BUCKET}/{key}{query}").stream().all() == expected


def remote(name: str, body: bytes) -> str:
    folder = f"memory://{uuid4().hex}"
    fsspec.filesystem("memory").pipe_file(f"{folder}/{name}", body)
    return folder


def test_a_broken_line_of_a_remote_file_is_named_by_its_address() -> None:
    folder = remote("a.jsonl", b'{"question": "1", "answer": "2"}\noops\n')
    with pytest.raises(ConfigError) as caught:
        FilePrompts(path=f"{folder}/a.jsonl").stream()
    assert str(caught.value).startswith(f"{folder}/a.jsonl: 1 of 2 lines cannot be used")
    assert "line 2: not JSON" in str(caught.value)


def test_a_remote_path_names_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = remote("a.jsonl", b'{"question": "1", "answer": "2"}')
    fsspec.filesystem("memory").pipe_file(f"{folder}/b.jsonl", b"")
    with pytest.raises(ConfigError, match=r"c\.jsonl names no files; name one"):
        FilePrompts(path=f"{folder}/c.jsonl").stream()
    with pytest.raises(ConfigError, match=r"\*\.jsonl names 2 files; .*prompts\.window\.files"):
        FilePrompts(path=f"{folder}/*.jsonl").stream()
    monkeypatch.setattr(files, "FETCHED_BYTES_MAX", 31)
    with pytest.raises(ConfigError, match=r"a\.jsonl has 32 bytes; at most 31 are fetched"):
        FilePrompts(path=f"{folder}/a.jsonl").stream()
    monkeypatch.setattr(files, "FETCHED_BYTES_MAX", 32)
    assert len(FilePrompts(path=f"{folder}/a.jsonl").stream().all()) == 1


def test_an_address_with_a_credential_or_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValidationError, match="contains a credential") as caught:
        FilePrompts(path="s3://key:secret@bucket/a.jsonl")
    assert "secret" not in str(caught.value.errors()[0]["msg"])
    with pytest.raises(ValidationError, match="unknown scheme 'http'"):
        FilePrompts(path="http://host/a.jsonl")
