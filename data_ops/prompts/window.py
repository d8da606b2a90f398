"""Prompts of a data window: the rows of several files whose date is in a range.

    files ──find──▶ in the window by their time ──fetch, digest──▶ rows ──by their date──▶ prompts

A run reads them once, when it is created, and keeps them (`storage/run/prompt_windows.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from data_ops.prompts.path import SUFFIXES, TEMPORARY_PREFIX, numbered_rows, suffix
from data_ops.prompts.rows import BrokenRowError, RowsFile, select
from data_ops.prompts.source import Columns
from data_ops.prompts.stream import PromptStream
from storage.config_model import Bytes, Frozen
from storage.errors import ConfigError, EmptyWindowError
from storage.machine.temporary_folders import temporary_folder
from storage.records.numbers import TIME_MAX_S
from storage.records.rollouts import Prompt
from storage.records.types import Json
from storage.records.windows import WindowFile
from storage.store import source_files
from storage.store.source_files import SourceFile

PATTERNS_MAX = 100
FILES_MAX = 10_000
"""Files that one window reads; `run.json` lists them."""
VALUE_SHOWN = 80
"""Characters of a date in a message."""


def instant(text: str) -> datetime:
    """Return the time of a date or date and time in ISO 8601; without an offset, in UTC.

    Raises ValueError for anything else, and for a time before 1970.
    """
    time = datetime.fromisoformat(text.strip())
    time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    if not 0 <= time.timestamp() <= TIME_MAX_S:
        raise ValueError("is before 1970")
    return time


def _bound(value: Any) -> Any:
    if isinstance(value, datetime):
        value = value.isoformat()
    try:
        return instant(value)
    except (TypeError, AttributeError, ValueError, OverflowError):
        raise ValueError(
            f"must be a date or a time from 1970 on, such as 2026-11-01 or 2026-11-01T06:00Z, not "
            f"{str(value)[:VALUE_SHOWN]!r}"
        ) from None


def _check_pattern(pattern: str) -> str:
    if wrong := source_files.fault(pattern):
        raise ValueError(wrong)
    if suffix(pattern) not in SUFFIXES:
        raise ValueError("must end with .jsonl or .parquet, which are the formats that are read")
    return pattern


Instant: TypeAlias = Annotated[datetime, BeforeValidator(_bound)]
"""A time in UTC."""
FilePattern: TypeAlias = Annotated[str, AfterValidator(_check_pattern)]
"""Files of one format, by `*`, `**`, `[…]`, and, except on S3, `?`."""


class DataWindow(Frozen):
    """Files, and the range of dates: since ≤ date < until."""

    files: Annotated[list[FilePattern], Field(min_length=1, max_length=PATTERNS_MAX)]
    """Local paths and `s3://bucket/key`, as patterns; JSONL and Parquet."""
    since: Instant | None = None
    """The first date of the window. Without an offset: UTC."""
    until: Instant | None = None
    """The first date after the window."""
    date_column: str | None = Field(default=None, min_length=1)
    """Column with the date of each row: ISO 8601, or seconds since 1970. Where it is not set, the
    modification time of a file is the date of all of its rows.
    """
    bytes_max: Bytes = 2**30
    """Of all files that are read together."""

    @model_validator(mode="after")
    def _not_reversed(self) -> "DataWindow":
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError(
                f"since {_shown(self.since)} is not before until {_shown(self.until)}; exchange or "
                "correct them"
            )
        return self

    @property
    def since_s(self) -> float | None:
        """Unix time of the lower bound."""
        return None if self.since is None else self.since.timestamp()

    @property
    def until_s(self) -> float | None:
        """Unix time of the upper bound."""
        return None if self.until is None else self.until.timestamp()

    def contains(self, date_s: float) -> bool:
        """Return whether a date, as Unix time, is in the window."""
        since_s, until_s = self.since_s, self.until_s
        return (since_s is None or since_s <= date_s) and (until_s is None or date_s < until_s)

    def __str__(self) -> str:
        since = f"since {_shown(self.since)}" if self.since else "from the beginning"
        return f"{since} until {_shown(self.until)}" if self.until else f"{since}, without an end"


class WindowPrompts(Columns):
    """`prompts: {window: {files: ["s3://bucket/feedback/*.jsonl"], since: 2026-11-01}}`."""

    window: DataWindow
    """Which files, and which of their rows."""

    def stream(self) -> PromptStream:
        """Read the window as it is now. Runs read the rows that were frozen at their creation
        (`frozen.py`).
        """
        return PromptStream.of(read(self).prompts, self.seed)


@dataclass(frozen=True)
class WindowRows:
    """What a window has now."""

    prompts: Sequence[Prompt]
    """With the ids `{file name}/{line or row, from 0}`, in the order of the names."""
    files: tuple[WindowFile, ...]
    """The files that were read, sorted by name; after `limit` prompts no further one is."""


def read(source: WindowPrompts) -> WindowRows:
    """Read the rows of a window.

    Raises:
        EmptyWindowError: there is none.
        ConfigError: a file cannot be read, has lines that cannot be used, or there are too many
            files or bytes.
        TransientError: the server of the files does not answer.
    """
    window = source.window
    found = source_files.find(window.files)
    chosen = [file for file in found if window.date_column or window.contains(file.modified_s)]
    _check_size(window, chosen)
    prompts: list[Prompt] = []
    files: list[WindowFile] = []
    with temporary_folder(TEMPORARY_PREFIX) as folder:
        for file in chosen:
            left = None if source.limit is None else source.limit - len(prompts)
            if left == 0:
                break
            copy = folder / f"{len(files)}"
            digest = source_files.fetch(file, copy)
            rows = _rows(source.model_copy(update={"limit": left}), file, copy)
            copy.unlink()
            prompts += rows
            files.append(
                WindowFile(
                    name=file.name,
                    num_bytes=file.num_bytes,
                    modified_s=file.modified_s,
                    digest=digest,
                    rows=len(rows),
                )
            )
    if not prompts:
        raise EmptyWindowError(_empty(window, found))
    return WindowRows(prompts, tuple(files))


def _check_size(window: DataWindow, files: Sequence[SourceFile]) -> None:
    if len(files) > FILES_MAX:
        raise ConfigError(
            f"{len(files):,} files are in the window {window}, and at most {FILES_MAX:,} are read; "
            "set a shorter window, or write fewer and larger files"
        )
    num_bytes = sum(file.num_bytes for file in files)
    if num_bytes > window.bytes_max:
        raise ConfigError(
            f"the {len(files):,} files of the window {window} have {num_bytes:,} bytes, more than "
            f"bytes_max {window.bytes_max:,}; set a shorter window, or raise bytes_max"
        )


def _rows(source: WindowPrompts, file: SourceFile, copy: Path) -> list[Prompt]:
    """Return the prompts of a fetched file. Those after `limit` are not read."""
    column = source.window.date_column

    def is_wanted(columns: Json) -> bool:
        return column is None or source.window.contains(_date_s(columns, column))

    rows, unit = numbered_rows(RowsFile(copy, file.name), () if column is None else (column,))
    return select(source, file.name, file.name, rows, unit, is_wanted)


def _date_s(columns: Json, name: str) -> float:
    """Return the date of a row as Unix time. Raises BrokenRowError for none."""
    value = columns.get(name)
    shown = f"column {name!r} (window.date_column) holds {str(value)[:VALUE_SHOWN]!r}"
    if name not in columns:
        raise BrokenRowError(f"no column {name!r} (window.date_column)")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BrokenRowError(f"{shown}; write ISO 8601, or seconds since 1970")
    if isinstance(value, str):
        try:
            return instant(value).timestamp()
        except (ValueError, OverflowError):
            raise BrokenRowError(
                f"{shown}, which is no date in ISO 8601 from 1970 on, such as 2026-11-01T06:00Z"
            ) from None
    if not 0 <= value <= TIME_MAX_S:
        raise BrokenRowError(
            f"{shown}, which is not in seconds since 1970 up to the year 9999; divide milliseconds "
            "by 1000"
        )
    return float(value)


def _empty(window: DataWindow, found: Sequence[SourceFile]) -> str:
    patterns = ", ".join(window.files)
    if not found:
        return f"no file matches {patterns}; correct window.files, or wait for files"
    newest = max(found, key=lambda file: file.modified_s)
    time = _shown(datetime.fromtimestamp(newest.modified_s, UTC))
    by = f"by column {window.date_column!r}" if window.date_column else "by the time of its file"
    return (
        f"no row is in the window {window} ({by}): {len(found):,} files match {patterns}, the "
        f"newest is {newest.name}, modified {time}; wait for more rows, or correct since and until"
    )


def _shown(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
