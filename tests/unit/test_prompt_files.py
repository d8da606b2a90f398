import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_ops.config import PromptSource
from data_ops.prompt_files import read_hub, read_jsonl, read_parquet
from storage.errors import ConfigError


def write_lines(path: Path, *lines: str) -> PromptSource:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return PromptSource(path=str(path))


def test_a_jsonl_row_keeps_its_other_columns_and_gets_an_id_from_its_line(tmp_path: Path) -> None:
    good = json.dumps({"question": "1+1=?", "answer": 2, "level": "easy"})
    prompts = read_jsonl(write_lines(tmp_path / "sums.jsonl", good, "", good))
    assert [prompt.id for prompt in prompts] == ["sums/0", "sums/2"]
    assert prompts[0].fields == {"question": "1+1=?", "answer": "2", "level": "easy"}


def test_named_columns_become_question_and_answer(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", '{"problem": "1+1", "solution": "first 3 #### no, #### 2 "}')
    source = PromptSource(path=str(tmp_path / "a.jsonl"), question="problem", answer="solution", answer_after="####")
    fields = read_jsonl(source)[0].fields
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
    )
    with pytest.raises(ConfigError) as caught:
        read_jsonl(source)
    message = str(caught.value)
    assert f"{source.path}: 6 of 7 lines cannot be used" in message
    assert "line 2: not JSON (Expecting ':' delimiter" in message
    assert "line 3: no column 'question'; found problem, answer" in message
    assert "line 4: column 'question' is empty" in message
    assert "line 5: a JSON list instead of an object" in message
    assert "line 6: column 'answer' holds nothing instead of text" in message
    assert "line 7: column 'question' holds list instead of text" in message


def test_only_the_first_ten_broken_lines_are_shown_and_the_rest_is_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_jsonl(write_lines(tmp_path / "broken.jsonl", *["oops"] * 25))
    assert "25 of 25 lines" in str(caught.value)
    assert "line 10: " in str(caught.value)
    assert "line 11: " not in str(caught.value)
    assert "and 15 more" in str(caught.value)


def test_bytes_that_are_not_text_are_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b'{"question": "1+1", "answer": "2"}\n\xff\xfe\x00\n')
    with pytest.raises(ConfigError, match="1 of 2 lines cannot be used"):
        read_jsonl(PromptSource(path=str(tmp_path / "bytes.jsonl")))


def test_a_missing_mark_before_the_answer_is_named(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", '{"question": "1+1", "answer": "2"}')
    with pytest.raises(ConfigError, match=r"line 1: column 'answer' has no '####' \(prompts.answer_after\)"):
        read_jsonl(source.model_copy(update={"answer_after": "####"}))


def test_an_empty_file_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no prompt at all"):
        read_jsonl(write_lines(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ConfigError, match=r"absent\.jsonl is not a file"):
        read_jsonl(PromptSource(path=str(tmp_path / "absent.jsonl")))


def test_a_limit_stops_reading_before_a_broken_line_behind_it(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", '{"question": "1+1", "answer": "2"}', "oops")
    assert len(read_jsonl(source.model_copy(update={"limit": 1}))) == 1


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    rows = [{"question": "1+1", "answer": "2", "tags": ["a"]}, {"question": "2+2", "answer": "4", "tags": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sums.parquet")
    source = write_lines(tmp_path / "sums.jsonl", *(json.dumps(row) for row in rows))
    assert read_parquet(PromptSource(path=str(tmp_path / "sums.parquet"))) == read_jsonl(source)


def test_parquet_columns_that_json_cannot_hold_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "1+1", "answer": "2", "image": b"\x00", "boxes": [{"pixels": b"\x00"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_parquet(PromptSource(path=str(tmp_path / "a.parquet")))[0].fields == {"question": "1+1", "answer": "2"}
    assert "columns image, boxes are left out" in caplog.text


def test_a_broken_parquet_row_is_named(tmp_path: Path) -> None:
    rows = [{"question": "1+1", "answer": "2"}, {"question": None, "answer": "2"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="row 2: column 'question' holds nothing"):
        read_parquet(PromptSource(path=str(tmp_path / "a.parquet")))


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read as Parquet"):
        read_parquet(PromptSource(path=str(tmp_path / "a.parquet")))


def test_without_the_package_datasets_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes `import datasets` an ImportError
    with pytest.raises(ConfigError, match=r"needs the package `datasets`: pip install datasets"):
        read_hub(PromptSource(hub="openai/gsm8k"))


class FakeDatasets(ModuleType):
    """As much of the package `datasets` as is used: one data set, or a hub that cannot be reached."""

    def __init__(self, reachable: bool) -> None:
        super().__init__("datasets")
        self.exceptions = ModuleType("datasets.exceptions")
        self.exceptions.DatasetsError = type("DatasetsError", (Exception,), {})  # type: ignore[attr-defined]  # as there
        self.reachable = reachable

    def load_dataset(self, name: str, configuration: str | None, split: str) -> Iterator[dict[str, str]]:
        if not self.reachable:
            raise ConnectionError("no route to the hub")
        assert (name, configuration, split) == ("openai/gsm8k", "main", "test")
        return iter([{"question": "1+1", "answer": "so #### 2"}])


def test_a_hub_data_set_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(reachable=True))
    source = PromptSource(hub="openai/gsm8k", hub_config="main", split="test", answer_after="####")
    prompt = read_hub(source)[0]
    assert (prompt.id, prompt.fields["answer"]) == ("openai/gsm8k/test/0", "2")


def test_an_unreachable_hub_is_a_sentence_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(reachable=False))
    with pytest.raises(ConfigError, match=r"no route to the hub\); check the names and the network"):
        read_hub(PromptSource(hub="openai/gsm8k"))
