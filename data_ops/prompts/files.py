"""Rows of a file or of a Hugging Face data set as prompts; and errors that say which rows cannot be used, and why.

A row's named columns become `fields["question"]` and `fields["answer"]`, the rest of the row is kept beside them. All of it
is stored with the orders, as JSON: a row that JSON cannot give back as it was is refused here, where its line is known.
This module knows nothing of orders, epochs or training.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from data_ops.config import PromptSource
from storage.errors import ConfigError
from storage.formats import json_values
from storage.records.rollouts import Prompt
from storage.records.types import Json

BROKEN_LINES_SHOWN = 10
COLUMNS_SHOWN = 200
"""Characters of the columns' names in a message."""
ROWS_PER_BATCH = 1_000
LINE_BYTES_MAX = 2**24
"""Of a JSONL file. A file that is one large JSON value is told from prompts before memory is full."""

log = logging.getLogger(__name__)


class BrokenRowError(Exception):
    """One row that cannot be a prompt; the message says what is wrong with it."""


class Unreadable(str):
    """In place of a row: why its bytes are none."""


def read_jsonl(source: PromptSource) -> list[Prompt]:
    """One JSON object a line, blank lines skipped; line n becomes the prompt `{file stem}/{n - 1}`. ConfigError for a line that
    is longer than LINE_BYTES_MAX."""
    path = _existing(source)
    with path.open("rb") as file:
        rows = ((number, line) for number, line in enumerate(_lines(file, path), start=1) if line.strip())
        return _collect(source, str(path), path.stem, rows, "line")


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    for number, line in enumerate(iter(partial(file.readline, LINE_BYTES_MAX + 1), b""), start=1):
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(
                f"prompts.path {path}, line {number}: has more than {LINE_BYTES_MAX:,} bytes; write one JSON object a line"
            )
        yield line


def read_parquet(source: PromptSource) -> list[Prompt]:
    """One prompt a row; row n (from 1) becomes the prompt `{file stem}/{n - 1}`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = _existing(source)
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"prompts.path {path} cannot be read as Parquet ({error}); write the file again") from error
    return _collect(source, str(path), path.stem, enumerate(_rows(_plain(table, path)), start=1), "row")


def read_hub(source: PromptSource) -> list[Prompt]:
    """A data set of the Hugging Face hub; row n (from 1) becomes the prompt `{data set}/{split}/{n - 1}`."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"prompts.hub={source.hub} needs the package `datasets`: pip install datasets, or name a JSONL or Parquet "
            "file with prompts.path"
        ) from error
    try:
        rows = datasets.load_dataset(source.hub, source.hub_config, split=source.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # The hub's own errors (no network, no such set, no such configuration) are OSError or ValueError underneath.
        raise ConfigError(
            f"prompts.hub={source.hub} (configuration {source.hub_config}, split {source.split}) cannot be loaded "
            f"({type(error).__name__}: {error}); check the names and the network, or name a file with prompts.path"
        ) from error
    what = f"data set {source.hub}"
    return _collect(source, what, f"{source.hub}/{source.split}", enumerate(_plain_rows(rows, what), start=1), "row")


def _existing(source: PromptSource) -> Path:
    path = Path(str(source.path)).expanduser()
    if not os.path.isfile(path):  # False also for what can be no path
        raise ConfigError(f"prompts.path {path} is not a file (looked in {Path.cwd()}); correct the path")
    return path


def _plain(table: Any, path: Path) -> Any:
    """The table without the columns that JSON cannot hold: an order carries its prompts as JSON."""
    import pyarrow as pa

    known = (
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
        return any(check(kind) for check in known)

    left_out = [column.name for column in table.schema if not plain(column.type)]
    if left_out:
        log.warning("%s: columns %s are left out, because JSON cannot hold their types", path, ", ".join(left_out))
    return table.drop_columns(left_out)


def _rows(table: Any) -> Iterator[Json | Unreadable]:
    """The table's rows as plain data, a thousand at a time; a row that Arrow cannot convert is the reason why."""
    for batch in table.to_batches(ROWS_PER_BATCH):
        try:
            yield from batch.to_pylist()
        except ValueError:  # text that is not UTF-8: which row it is in is found row by row
            for number in range(batch.num_rows):
                try:
                    yield from batch.slice(number, 1).to_pylist()
                except ValueError as error:
                    yield Unreadable(f"not readable ({error})")


def _plain_rows(rows: Iterable[Json], what: str) -> Iterator[Json]:
    """The rows without the columns that JSON has no type for (images, times, …); each such column is logged once."""
    left_out: set[str] = set()
    for row in rows:
        strange = {name for name, value in row.items() if not json_values.is_plain(value)}
        if strange - left_out:
            log.warning(
                "%s: columns %s are left out, because JSON cannot hold their types", what, ", ".join(sorted(strange - left_out))
            )
            left_out |= strange
        yield {name: value for name, value in row.items() if name not in strange}


def _collect(
    source: PromptSource, what: str, stem: str, rows: Iterable[tuple[int, bytes | Json | Unreadable]], unit: str
) -> list[Prompt]:
    """Prompts of the numbered rows; raises ConfigError that names the broken ones when there are any, or when there
    is none."""
    if wrong := json_values.fault(stem):
        raise ConfigError(f"{what!r} becomes part of every prompt's id, but it {wrong[1]}; rename it")
    prompts: list[Prompt] = []
    broken: list[tuple[int, str]] = []
    for number, row in rows:
        try:
            prompts.append(Prompt(f"{stem}/{number - 1}", _fields(row, source)))
        except BrokenRowError as error:
            broken.append((number, str(error)))
        if source.limit and len(prompts) >= source.limit and not broken:
            break
    if broken:
        raise ConfigError("\n  ".join(_complaint(what, unit, broken, len(prompts))))
    if not prompts:
        raise ConfigError(f"{what} holds no prompt at all; give a source with at least one {unit}")
    return prompts


def _complaint(what: str, unit: str, broken: list[tuple[int, str]], num_good: int) -> Iterator[str]:
    yield f"{what}: {len(broken)} of {len(broken) + num_good} {unit}s cannot be used; correct or remove them:"
    yield from (f"{unit} {number}: {reason}" for number, reason in broken[:BROKEN_LINES_SHOWN])
    if len(broken) > BROKEN_LINES_SHOWN:
        yield f"and {len(broken) - BROKEN_LINES_SHOWN} more"


def _fields(row: bytes | Json | Unreadable, source: PromptSource) -> Json:
    if isinstance(row, Unreadable):
        raise BrokenRowError(str(row))
    columns = _parse(row) if isinstance(row, bytes) else row
    if wrong := json_values.fault(columns):
        where, why = wrong
        raise BrokenRowError(f"column {where[:COLUMNS_SHOWN]!r} {why}" if where else why)
    question, answer = _text(columns, source.question), _text(columns, source.answer)
    if source.answer_after is not None:
        _, mark, answer = answer.rpartition(source.answer_after)
        if not mark:
            raise BrokenRowError(f"column {source.answer!r} has no {source.answer_after!r} (prompts.answer_after)")
        answer = answer.strip()
        if not answer:
            raise BrokenRowError(f"column {source.answer!r} has nothing after {source.answer_after!r} (prompts.answer_after)")
    return {**columns, "question": question, "answer": answer}


def _parse(line: bytes) -> Json:
    try:
        columns = json.loads(line, parse_int=_whole, object_pairs_hook=_object)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BrokenRowError(f"not JSON ({error})") from error
    except RecursionError:
        raise BrokenRowError(f"nested deeper than {json_values.DEPTH_MAX} levels") from None
    if not isinstance(columns, dict):
        raise BrokenRowError(f"a JSON {type(columns).__name__} instead of an object with columns")
    return columns


def _object(pairs: list[tuple[str, Any]]) -> Json:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in columns if names.count(name) > 1)
        raise BrokenRowError(f"column {twice[:COLUMNS_SHOWN]!r} is written twice; keep one")
    return columns


def _whole(digits: str) -> int:
    """The number; one with too many digits to be read becomes another that is too long, and is refused with its column."""
    return int(digits) if len(digits) <= json_values.DIGITS_MAX else 10**json_values.DIGITS_MAX


def _text(columns: Json, name: str) -> str:
    if name not in columns:
        raise BrokenRowError(f"no column {name!r}; found {', '.join(columns)[:COLUMNS_SHOWN] or 'none'}")
    value = columns[name]
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        held = "nothing" if value is None else type(value).__name__
        raise BrokenRowError(f"column {name!r} holds {held} instead of text")
    text = str(value).strip()
    if not text:
        raise BrokenRowError(f"column {name!r} is empty")
    return text
