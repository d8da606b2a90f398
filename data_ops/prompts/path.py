"""Prompts of a local file: JSON lines or Parquet."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from data_ops.prompts.parquet import read_rows
from data_ops.prompts.rows import collect
from data_ops.prompts.source import Columns
from data_ops.prompts.stream import PromptStream
from storage.errors import ConfigError
from storage.records.rollouts import Prompt

LINE_BYTES_MAX = 2**24
"""Of a JSONL file: a file that is one large JSON value is refused before the memory is full."""


class FilePrompts(Columns):
    """`prompts: {path: train.jsonl, question: problem, answer: solution}`."""

    path: str
    """A JSONL or Parquet file."""

    def stream(self) -> PromptStream:
        """Read the file. Raises ConfigError that names the file, the lines and what to do."""
        if self.path.endswith(".jsonl"):
            prompts = read_jsonl(self)
        elif self.path.endswith(".parquet"):
            prompts = read_parquet(self)
        else:
            raise ConfigError(
                f"prompts.path {self.path} is neither .jsonl nor .parquet; convert the file to one "
                "of the two"
            )
        return PromptStream.of(prompts[: self.limit], self.seed)


def read_jsonl(source: FilePrompts) -> list[Prompt]:
    """Read one JSON object a line, skipping blank ones; line n becomes the prompt
    `{file stem}/{n - 1}`. Raises ConfigError for a line that is longer than LINE_BYTES_MAX.
    """
    path = _existing(source)
    with path.open("rb") as file:
        rows = (
            (number, line)
            for number, line in enumerate(_lines(file, path), start=1)
            if line.strip()
        )
        return collect(source, str(path), path.stem, rows, "line")


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    for number, line in enumerate(iter(partial(file.readline, LINE_BYTES_MAX + 1), b""), start=1):
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(
                f"prompts.path {path}, line {number}: has more than {LINE_BYTES_MAX:,} bytes; "
                "write one JSON object a line"
            )
        yield line


def read_parquet(source: FilePrompts) -> list[Prompt]:
    """Read one prompt a row; row n (from 1) becomes the prompt `{file stem}/{n - 1}`."""
    path = _existing(source)
    return collect(source, str(path), path.stem, read_rows(path), "row")


def _existing(source: FilePrompts) -> Path:
    path = Path(source.path).expanduser()
    if not os.path.isfile(path):  # False also for what can be no path
        raise ConfigError(
            f"prompts.path {path} is not a file (looked in {Path.cwd()}); correct the path"
        )
    return path
