"""Prompts of a file: JSON lines or Parquet, local or on S3."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from data_ops.prompts import parquet
from data_ops.prompts.rows import RowsFile, Unreadable, collect
from data_ops.prompts.source import Columns
from data_ops.prompts.stream import PromptStream
from storage.errors import ConfigError, TransientError
from storage.machine.temporary_folders import temporary_folder
from storage.records.rollouts import Prompt
from storage.records.types import Json
from storage.store import source_files

LINE_BYTES_MAX = 2**24
"""Of a JSONL file: a file that is one large JSON value is refused before the memory is full."""
PERMANENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Faults of a file that no second attempt changes."""
FETCHED_BYTES_MAX = 2**34
"""Of a file that is fetched: its copy is on the machine's disk while it is read."""
TEMPORARY_PREFIX = "astraflow-prompts-"
SUFFIXES = (".jsonl", ".parquet")

NumberedRows: TypeAlias = Iterator[tuple[int, bytes | Json | Unreadable]]


def _check_path(path: str) -> str:
    if source_files.is_remote(path) and (wrong := source_files.fault(path)):
        raise ValueError(wrong)
    return path


class FilePrompts(Columns):
    """`prompts: {path: train.jsonl, question: problem, answer: solution}`."""

    path: Annotated[str, AfterValidator(_check_path)]
    """A JSONL or Parquet file: a local path, or `s3://bucket/key`."""

    def stream(self) -> PromptStream:
        """Read the file. Raises ConfigError that names the file, the lines and what to do."""
        return PromptStream.of(read_file(self)[: self.limit], self.seed)


def read_file(source: FilePrompts) -> list[Prompt]:
    """Return the prompts of the file: line or row n (from 1) becomes `{file stem}/{n - 1}`.

    Raises:
        ConfigError: names the file, and the lines or rows that cannot be used.
        TransientError: its drive or server does not answer.
    """
    if suffix(source.path) not in SUFFIXES:
        raise ConfigError(
            f"prompts.path {source.path} is neither .jsonl nor .parquet; convert the file to one "
            "of the two"
        )
    with _opened(source.path) as file:
        rows, unit = numbered_rows(file)
        return collect(source, str(file), PurePosixPath(file.name).stem, rows, unit)


def suffix(path: str) -> str:
    """Return the suffix of a path, or of an address without its query."""
    path = path.partition("?")[0] if source_files.is_remote(path) else path
    return PurePosixPath(path).suffix


def numbered_rows(file: RowsFile, dates: Collection[str] = ()) -> tuple[NumberedRows, str]:
    """Return the rows of a file with their numbers (from 1), and what a row is called.

    Lines of JSONL are not parsed yet; blank ones are skipped. Rows are read as they are taken, and
    then ConfigError is raised for a file that is not Parquet, or a line longer than LINE_BYTES_MAX,
    and TransientError for a drive that does not answer.

    Args:
        dates: columns of Parquet whose times become text.
    """
    if suffix(file.name) == ".parquet":
        return parquet.read_rows(file, dates), "row"
    return _lines(file), "line"


def _lines(file: RowsFile) -> NumberedRows:
    number = 0
    try:
        with file.path.open("rb") as opened:
            lines = iter(partial(opened.readline, LINE_BYTES_MAX + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(
                        f"{file}, line {number}: has more than {LINE_BYTES_MAX:,} bytes; write one "
                        "JSON object a line"
                    )
                if line.strip():
                    yield number, line
    except OSError as error:  # the system's error of a bad sector or a network drive has no name
        read = f" after line {number}" if number else ""
        kind = ConfigError if isinstance(error, PERMANENT) else TransientError
        raise kind(
            f"{file} cannot be read{read} ({error.strerror or error}); name a copy that can be read"
        ) from error


@contextmanager
def _opened(path: str) -> Iterator[RowsFile]:
    """Yield a local file, or a temporary copy of another one."""
    if not source_files.is_remote(path):
        local = Path(source_files.expanded(path))
        if not os.path.isfile(local):  # False also for what can be no path
            raise ConfigError(
                f"prompts.path {local} is not a file (looked in {Path.cwd()}); correct the path"
            )
        yield RowsFile(local, str(local))
        return
    found = source_files.find([path])
    if len(found) != 1:
        raise ConfigError(
            f"prompts.path {path} names {len(found) or 'no'} files; name one, or write a pattern "
            "in prompts.window.files"
        )
    if found[0].num_bytes > FETCHED_BYTES_MAX:
        raise ConfigError(
            f"prompts.path {path} has {found[0].num_bytes:,} bytes; at most "
            f"{FETCHED_BYTES_MAX:,} are fetched: split it, or copy it to this machine"
        )
    with temporary_folder(TEMPORARY_PREFIX) as folder:
        copy = folder / "rows"
        source_files.fetch(found[0], copy)
        yield RowsFile(copy, found[0].name)
