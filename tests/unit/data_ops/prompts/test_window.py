import json
import os
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from data_ops.prompts import window
from data_ops.prompts.window import DataWindow, WindowPrompts, instant, read
from storage.errors import ConfigError, EmptyWindowError
from storage.machine import temporary_folders
from storage.store import source_files

DAY_S = 86_400.0
NIGHT = 1_793_491_200.0
"""2026-11-01T00:00Z."""


def row(question: str, **more: Any) -> dict[str, Any]:
    return {"question": question, "answer": "2", **more}


def write(path: Path, rows: Sequence[dict[str, Any]], modified_s: float = NIGHT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    os.utime(path, (modified_s, modified_s))


def of(
    folder: Path,
    *patterns: str,
    limit: int | None = None,
    answer_after: str | None = None,
    **more: Any,
) -> WindowPrompts:
    files = [f"{folder}/{pattern}" for pattern in patterns or ("*.jsonl",)]
    settings = {"files": files, **more}
    return WindowPrompts(
        window=DataWindow.model_validate(settings), limit=limit, answer_after=answer_after
    )


def questions(source: WindowPrompts) -> list[str]:
    return [prompt.fields["question"] for prompt in read(source).prompts]


def test_a_file_at_the_lower_bound_is_in_the_window_and_one_at_the_upper_bound_is_not(
    tmp_path: Path,
) -> None:
    for day in range(4):
        write(tmp_path / f"{day}.jsonl", [row(f"{day}")], NIGHT + day * DAY_S)
    first = of(tmp_path, since="2026-11-02", until="2026-11-03T00:00Z")
    assert questions(first) == ["1"]
    assert questions(of(tmp_path, since="2026-11-03")) == ["2", "3"]
    assert questions(of(tmp_path, until="2026-11-03")) == ["0", "1"]
    assert questions(of(tmp_path)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("column", [None, "at"])
def test_consecutive_windows_have_each_row_once(tmp_path: Path, column: str | None) -> None:
    bounds = [NIGHT + day * DAY_S for day in range(4)]
    times = [bound + step for bound in bounds for step in (-0.25, 0.0, 0.25)]
    for number, time_s in enumerate(times):
        write(tmp_path / f"{number}.jsonl", [row(f"{number}", at=time_s)], time_s)
    days = [None, *(datetime.fromtimestamp(bound, UTC) for bound in bounds), None]
    seen = [
        question
        for since, until in pairwise(days)
        for question in questions(of(tmp_path, since=since, until=until, date_column=column))
    ]
    assert sorted(seen, key=int) == [str(number) for number in range(len(times))]


def test_rows_are_chosen_by_their_column_whatever_the_time_of_the_file(tmp_path: Path) -> None:
    dates = [
        "2026-11-01",
        "2026-11-02T00:30:00+01:00",
        1_793_577_600,
        1_793_577_599.5,
        "20261102T05Z",
    ]
    write(tmp_path / "a.jsonl", [row(str(at), at=at) for at in dates], modified_s=1.0)
    night = {"since": "2026-11-01T00:00", "until": "2026-11-02", "date_column": "at"}
    found = read(of(tmp_path, **night))
    assert [prompt.fields["at"] for prompt in found.prompts] == [dates[0], dates[1], dates[3]]
    assert [prompt.id for prompt in found.prompts] == [f"{tmp_path}/a.jsonl/{n}" for n in (0, 1, 3)]


def test_dates_of_a_parquet_column_are_read_as_times(tmp_path: Path) -> None:
    berlin = timezone(timedelta(hours=1))
    rows = [
        row("before", at=datetime(2026, 11, 1, 0, 59, 59, 999_999, tzinfo=berlin)),
        row("first", at=datetime(2026, 11, 1, 1, tzinfo=berlin)),
        row("last", at=datetime(2026, 11, 2, 0, 59, tzinfo=berlin)),
        row("after", at=datetime(2026, 11, 2, 1, tzinfo=berlin)),
    ]
    night = {"since": "2026-11-01", "until": "2026-11-02", "date_column": "at"}
    for name, kind in (("zone", pa.timestamp("us", "Europe/Berlin")), ("utc", pa.timestamp("ns"))):
        values = [each["at"].astimezone(UTC) for each in rows]
        table = pa.Table.from_pylist([{**each, "at": None} for each in rows])
        if kind.tz is None:
            values = [value.replace(tzinfo=None) for value in values]
        table = table.set_column(2, "at", pa.array(values, kind))
        pq.write_table(table, tmp_path / f"{name}.parquet")
        found = read(of(tmp_path, f"{name}.parquet", **night)).prompts
        assert [prompt.fields["question"] for prompt in found] == ["first", "last"]
        assert found[0].fields["at"].startswith("2026-11-01 00:00:00.000000")
    days = pa.array([date(2026, 10, 31), date(2026, 11, 1), date(2026, 11, 1), date(2026, 11, 2)])
    table = pa.Table.from_pylist(rows).set_column(2, "at", days)
    pq.write_table(table, tmp_path / "days.parquet")
    found = read(of(tmp_path, "days.parquet", **night))
    assert [prompt.fields for prompt in found.prompts] == [
        row("first", at="2026-11-01"),
        row("last", at="2026-11-01"),
    ]


def test_times_in_other_parquet_columns_are_left_out_and_missing_dates_are_broken(
    tmp_path: Path,
) -> None:
    at = datetime(2026, 11, 1)
    rows = [row("1", at=at, other=at), row("2", at=None, other=at)]
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "a.parquet")
    (prompt,) = read(of(tmp_path, "*.parquet", date_column="at")).prompts
    assert prompt.fields == row("1", at="2026-11-01 00:00:00.000000")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"a\.parquet: 1 of 2 rows .*\n.*row 2: column 'at' .*None"
    ):
        read(of(tmp_path, "*.parquet", date_column="at"))


def test_a_broken_line_is_named_by_file_and_line_also_outside_of_the_window(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [row("1", at="2026-11-01")])
    (tmp_path / "b.jsonl").write_text(
        '{"question": "1", "answer": "2", "at": "2020-01-01"}\n\noops\n'
    )
    with pytest.raises(ConfigError) as caught:
        read(of(tmp_path, since="2026-11-01", date_column="at"))
    assert str(caught.value).startswith(f"{tmp_path}/b.jsonl: 1 of 2 lines cannot be used")
    assert "line 3: not JSON" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("yesterday", "holds 'yesterday', which is no date in ISO 8601"),
        ("1969-12-31T23:59Z", "no date in ISO 8601 from 1970 on"),
        (-1, "holds '-1', which is not in seconds since 1970"),
        (1_793_491_200_000, "divide milliseconds by 1000"),
        (True, "holds 'True'; write ISO 8601"),
        (None, "holds 'None'; write ISO 8601"),
        (["2026-11-01"], "write ISO 8601"),
    ],
)
def test_a_row_without_a_valid_date_is_named(tmp_path: Path, value: Any, reason: str) -> None:
    write(tmp_path / "a.jsonl", [row("1", at=value)])
    with pytest.raises(ConfigError, match=r"line 1: column 'at' \(window.date_column\)") as caught:
        read(of(tmp_path, date_column="at"))
    assert reason in str(caught.value)
    with pytest.raises(ConfigError, match=r"line 1: no column 'when' \(window.date_column\)"):
        read(of(tmp_path, date_column="when"))


def test_a_row_outside_of_the_window_needs_no_question(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"at": "2026-10-01"}, row("1", at="2026-11-01")])
    assert questions(of(tmp_path, since="2026-11-01", date_column="at")) == ["1"]


def test_files_of_one_name_in_two_folders_have_prompts_with_different_ids(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.jsonl", [row("1")])
    write(tmp_path / "b" / "x.jsonl", [row("2")])
    write(tmp_path / "b" / "x.parquet", [row("3")])
    found = read(of(tmp_path, "**/*.jsonl", "b/*.parquet"))
    assert [prompt.id for prompt in found.prompts] == [
        f"{tmp_path}/a/x.jsonl/0",
        f"{tmp_path}/b/x.jsonl/0",
        f"{tmp_path}/b/x.parquet/0",
    ]


def test_the_files_that_were_read_are_listed_with_their_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [row("1", at="2026-11-01"), row("2", at="2026-10-01")])
    write(tmp_path / "b.jsonl", [row("3", at="2026-10-01")], NIGHT + 0.5)
    found = read(of(tmp_path, since="2026-11-01", date_column="at"))
    assert [(file.name, file.rows) for file in found.files] == [
        (f"{tmp_path}/a.jsonl", 1),
        (f"{tmp_path}/b.jsonl", 0),
    ]
    assert [file.modified_s for file in found.files] == [NIGHT, NIGHT + 0.5]
    sizes = [(tmp_path / name).stat().st_size for name in ("a.jsonl", "b.jsonl")]
    assert [file.num_bytes for file in found.files] == sizes
    assert found.files[0].digest != found.files[1].digest


def test_a_limit_counts_over_all_files_and_ends_the_reading(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [row("1"), row("2")])
    write(tmp_path / "b.jsonl", [row("3"), row("4")])
    (tmp_path / "c.jsonl").write_text("oops\n")
    assert questions(of(tmp_path, limit=3)) == ["1", "2", "3"]
    found = read(of(tmp_path, limit=2))
    assert [file.name for file in found.files] == [f"{tmp_path}/a.jsonl"]


def test_settings_of_columns_apply(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [row("1") | {"answer": "because #### 7"}])
    (prompt,) = read(of(tmp_path, answer_after="####")).prompts
    assert prompt.fields["answer"] == "7"


def test_an_empty_window_names_files_bounds_and_the_newest_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [row("1")], NIGHT)
    write(tmp_path / "b.jsonl", [row("1")], NIGHT - 1)
    with pytest.raises(EmptyWindowError) as caught:
        read(of(tmp_path, since="2026-11-02", until="2026-11-03"))
    assert str(caught.value) == (
        "no row is in the window since 2026-11-02T00:00:00Z until 2026-11-03T00:00:00Z (by the time "
        f"of its file): 2 files match {tmp_path}/*.jsonl, the newest is {tmp_path}/a.jsonl, modified "
        "2026-11-01T00:00:00Z; wait for more rows, or correct since and until"
    )
    write(tmp_path / "b.jsonl", [row("1", at="2026-11-01")])
    write(tmp_path / "a.jsonl", [])
    with pytest.raises(EmptyWindowError, match=r"the beginning until 2026-10-01.*by column 'at'"):
        read(of(tmp_path, until="2026-10-01", date_column="at"))
    with pytest.raises(EmptyWindowError, match=r"no file matches .*/\*\.parquet; correct"):
        read(of(tmp_path, "*.parquet"))


def test_too_many_bytes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [row("1")])
    (tmp_path / "b.jsonl").write_text("oops\n")
    size = (tmp_path / "a.jsonl").stat().st_size + 5
    with pytest.raises(ConfigError, match=f"the 2 files .* have {size} bytes, more than bytes_max"):
        read(of(tmp_path, bytes_max=size - 1))
    with pytest.raises(ConfigError, match="not JSON"):
        read(of(tmp_path, bytes_max=size))


def test_files_outside_of_the_window_are_neither_counted_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in range(3):
        write(tmp_path / f"{day}.jsonl", [row(f"{day}")], NIGHT + day * DAY_S)
    monkeypatch.setattr(window, "FILES_MAX", 1)
    size = (tmp_path / "0.jsonl").stat().st_size
    assert questions(of(tmp_path, since="2026-11-03", bytes_max=size)) == ["2"]
    with pytest.raises(ConfigError, match=r"2 files are in the window .*at most 1 are read"):
        read(of(tmp_path, since="2026-11-02"))


def test_copies_of_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(temporary_folders.tempfile, "gettempdir", lambda: str(temporary))
    write(tmp_path / "a.jsonl", [row("1")])
    assert questions(of(tmp_path)) == ["1"]
    (tmp_path / "b.jsonl").write_text("oops\n")
    with pytest.raises(ConfigError):
        read(of(tmp_path))
    assert list(temporary.iterdir()) == []


def test_one_copy_is_on_the_disk_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", [row(name)])
    others: list[int] = []
    fetch = source_files.fetch

    def watched(file: source_files.SourceFile, copy: Path) -> str:
        others.append(len(list(copy.parent.iterdir())))
        return fetch(file, copy)

    monkeypatch.setattr(source_files, "fetch", watched)
    assert questions(of(tmp_path)) == ["a", "b", "c"]
    assert others == [0, 0, 0]


def test_files_in_memory_and_local_files_are_read_together(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [row("local")])
    folder = f"memory://{uuid4().hex}"
    fsspec.filesystem("memory").pipe_file(f"{folder}/b.jsonl", json.dumps(row("memory")).encode())
    source = WindowPrompts(window=DataWindow(files=[f"{folder}/*.jsonl", f"{tmp_path}/*.jsonl"]))
    found = read(source)
    assert [prompt.id for prompt in found.prompts] == [
        f"{tmp_path}/a.jsonl/0",
        f"{folder}/b.jsonl/0",
    ]
    assert [prompt.fields["question"] for prompt in source.stream().all()] == ["local", "memory"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-01", datetime(2026, 11, 1, tzinfo=UTC)),
        ("2026-11-01T06:00", datetime(2026, 11, 1, 6, tzinfo=UTC)),
        (" 2026-11-01T06:00+02:00 ", datetime(2026, 11, 1, 4, tzinfo=UTC)),
        ("1970-01-01", datetime(1970, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_time_without_an_offset_is_in_utc(text: str, expected: datetime) -> None:
    assert instant(text) == expected
    settings = DataWindow.model_validate({"files": ["a.jsonl"], "since": text})
    assert settings.since == expected
    assert DataWindow.model_validate(settings.model_dump(mode="json")) == settings
    assert DataWindow.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize(
    "value", ["tomorrow", "1969-12-31", 1_793_491_200, "0001-01-01T00:00+14:00", True]
)
def test_a_bound_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="must be a date or a time from 1970 on"):
        DataWindow.model_validate({"files": ["a.jsonl"], "until": value})


def test_bounds_in_the_wrong_order_are_refused() -> None:
    for until in ("2026-11-01", "2026-10-31"):
        with pytest.raises(ValidationError, match="since 2026-11-01T00:00:00Z is not before until"):
            DataWindow.model_validate({"files": ["a.jsonl"], "since": "2026-11-01", "until": until})


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "at least 1 item"),
        (["a.csv"], "must end with .jsonl or .parquet"),
        (["s3://bucket/a.jsonl?profile=eu", "s3://bucket/a?profile=b.jsonl"], "must end with"),
        (["s3://key:secret@bucket/a.jsonl"], "contains a credential"),
        (["a.jsonl"] * 101, "at most 100 items"),
    ],
)
def test_patterns_that_cannot_be_used_are_refused(files: list[str], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        DataWindow(files=files)
