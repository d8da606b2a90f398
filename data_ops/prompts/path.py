"""Prompts of a local file: JSON lines or Parquet."""

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from data_ops.prompts.rows import Unreadable, collect
from data_ops.prompts.source import Columns
from data_ops.prompts.stream import PromptStream
from storage.errors import ConfigError
from storage.records.rollouts import Prompt
from storage.records.types import Json

ROWS_PER_BATCH = 1_000
LINE_BYTES_MAX = 2**24
"""Of a JSONL file: a file that is one large JSON value is refused before the memory is full."""

log = logging.getLogger(__name__)


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
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = _existing(source)
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"prompts.path {path} cannot be read as Parquet ({error}); write the file again"
        ) from error
    return collect(
        source, str(path), path.stem, enumerate(_rows(_plain(table, path)), start=1), "row"
    )


def _existing(source: FilePrompts) -> Path:
    path = Path(source.path).expanduser()
    if not os.path.isfile(path):  # False also for what can be no path
        raise ConfigError(
            f"prompts.path {path} is not a file (looked in {Path.cwd()}); correct the path"
        )
    return path


def _plain(table: Any, path: Path) -> Any:
    """Return the table without the columns whose types JSON lacks: orders store prompts as JSON."""
    import pyarrow as pa

    scalars = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
    )
    nested = (pa.types.is_list, pa.types.is_large_list, pa.types.is_struct, pa.types.is_null)

    def plain(kind: Any) -> bool:
        if pa.types.is_dictionary(kind):
            return plain(kind.value_type)
        if any(check(kind) for check in nested):
            return all(plain(kind.field(i).type) for i in range(kind.num_fields))
        return any(check(kind) for check in scalars)

    dropped = [column.name for column in table.schema if not plain(column.type)]
    if dropped:
        log.warning(
            "%s: columns %s are left out, because JSON cannot hold their types",
            path,
            ", ".join(dropped),
        )
    return table.drop_columns(dropped)


def _rows(table: Any) -> Iterator[Json | Unreadable]:
    """Yield the table's rows as plain data; in place of a row that Arrow cannot convert, why."""
    for batch in table.to_batches(ROWS_PER_BATCH):
        try:
            yield from batch.to_pylist()
        except ValueError:  # text that is not UTF-8: convert row by row to find it
            for number in range(batch.num_rows):
                try:
                    yield from batch.slice(number, 1).to_pylist()
                except ValueError as error:
                    yield Unreadable(f"not readable ({error})")
