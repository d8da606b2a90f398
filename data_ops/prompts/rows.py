"""Convert rows of a file or of a data set to prompts; errors name the unusable rows, with reasons.

A row's named columns become `fields["question"]` and `fields["answer"]`; its other columns are kept
beside them. All of it is stored with the orders, as JSON: a row that JSON cannot represent exactly
is refused here, where its line number is known.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from data_ops.prompts.source import Columns
from storage.errors import ConfigError
from storage.formats import json_values
from storage.records.rollouts import Prompt
from storage.records.types import Json

BROKEN_LINES_SHOWN = 10
COLUMNS_SHOWN = 200
"""Characters of the columns' names in a message."""
DECIMAL_CHARACTERS_MAX = 1100
"""Characters of a decimal, enough for every float written out. Longer ones have no other meaning
than to be rounded.
"""
PROMPT_BYTES_MAX = 2**25
"""Of one prompt as JSON, in which a control character takes six bytes: a quarter of what an order
may have.
"""
DIGITS_SHOWN = 20
"""Characters of a long number in a message."""


class BrokenRowError(Exception):
    """One row that cannot be a prompt; the message says why."""


class Unreadable(str):
    """In place of a row: why its bytes cannot be read."""


@dataclass(frozen=True)
class RowsFile:
    """A local file of rows."""

    path: Path
    name: str
    """In messages: a copy of another file is named as that file."""

    def __str__(self) -> str:
        return self.name


def collect(
    source: Columns,
    what: str,
    stem: str,
    rows: Iterable[tuple[int, bytes | Json | Unreadable]],
    unit: str,
) -> list[Prompt]:
    """Return the prompts of the numbered rows. Raises ConfigError that names the broken rows when
    there are any, or when there is no prompt.
    """
    prompts = select(source, what, stem, rows, unit)
    if not prompts:
        raise ConfigError(f"{what} holds no prompt at all; give a source with at least one {unit}")
    return prompts


def select(
    source: Columns,
    what: str,
    stem: str,
    rows: Iterable[tuple[int, bytes | Json | Unreadable]],
    unit: str,
    is_wanted: Callable[[Json], bool] = lambda columns: True,
) -> list[Prompt]:
    """Return the prompts of the wanted rows, up to the source's limit.

    Of other rows nothing is checked but that they can be read. Raises ConfigError that names the
    broken rows when there are any.

    Args:
        is_wanted: of the columns of a row; may raise BrokenRowError.
    """
    if wrong := json_values.fault(stem):
        raise ConfigError(
            f"{what!r} becomes part of every prompt's id, but it {wrong[1]}; rename it"
        )
    prompts: list[Prompt] = []
    broken: list[tuple[int, str]] = []
    num_rows = 0
    for number, row in rows:
        num_rows += 1
        try:
            columns = _columns(row)
            if is_wanted(columns):
                prompts.append(Prompt(f"{stem}/{number - 1}", _fields(columns, source)))
        except BrokenRowError as error:
            broken.append((number, str(error)))
        if source.limit and len(prompts) >= source.limit and not broken:
            break
    if broken:
        raise ConfigError("\n  ".join(_report(what, unit, broken, num_rows)))
    return prompts


def _report(what: str, unit: str, broken: list[tuple[int, str]], num_rows: int) -> Iterator[str]:
    yield f"{what}: {len(broken)} of {num_rows} {unit}s cannot be used; correct or remove them:"
    yield from (f"{unit} {number}: {reason}" for number, reason in broken[:BROKEN_LINES_SHOWN])
    if len(broken) > BROKEN_LINES_SHOWN:
        yield f"and {len(broken) - BROKEN_LINES_SHOWN} more"


def _columns(row: bytes | Json | Unreadable) -> Json:
    if isinstance(row, Unreadable):
        raise BrokenRowError(str(row))
    columns = _parse(row) if isinstance(row, bytes) else row
    if wrong := json_values.fault(columns):
        where, why = wrong
        raise BrokenRowError(f"column {where[:COLUMNS_SHOWN]!r} {why}" if where else why)
    return columns


def _fields(columns: Json, source: Columns) -> Json:
    question, answer = _text(columns, source.question), _text(columns, source.answer)
    if source.answer_after is not None:
        _, mark, answer = answer.rpartition(source.answer_after)
        if not mark:
            raise BrokenRowError(
                f"column {source.answer!r} has no {source.answer_after!r} (prompts.answer_after)"
            )
        answer = answer.strip()
        if not answer:
            raise BrokenRowError(
                f"column {source.answer!r} has nothing after {source.answer_after!r} "
                "(prompts.answer_after)"
            )
    fields = {**columns, "question": question, "answer": answer}
    if (num_bytes := len(to_json(fields))) > PROMPT_BYTES_MAX:
        raise BrokenRowError(
            f"{num_bytes:,} bytes as JSON, more than the limit of {PROMPT_BYTES_MAX:,} of a prompt"
        )
    return fields


def _parse(line: bytes) -> Json:
    try:
        columns = json.loads(
            line, parse_int=_whole, parse_float=_decimal, object_pairs_hook=_object
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        encoding = "; it has NUL bytes, as UTF-16 has: save it as UTF-8" if b"\0" in line else ""
        raise BrokenRowError(f"not JSON ({error}{encoding})") from error
    except RecursionError:
        raise BrokenRowError(f"nested deeper than {json_values.DEPTH_MAX} levels") from None
    if not isinstance(columns, dict):
        raise BrokenRowError(f"a JSON {type(columns).__name__} instead of an object with columns")
    return columns


def _object(pairs: list[tuple[str, Any]]) -> Json:
    columns: Json = {}
    for name, value in pairs:
        if name in columns:
            raise BrokenRowError(f"column {name[:COLUMNS_SHOWN]!r} is written twice; keep one")
        columns[name] = value
    return columns


def _whole(digits: str) -> int:
    """Return the number; for one with too many digits to convert another that is too long, which is
    then refused with its column.
    """
    is_short = len(digits.lstrip("-")) <= json_values.DIGITS_MAX
    return int(digits) if is_short else 10**json_values.DIGITS_MAX


def _decimal(text: str) -> float:
    if len(text) > DECIMAL_CHARACTERS_MAX:
        raise BrokenRowError(
            f"the number {text[:DIGITS_SHOWN]}… has more than {DECIMAL_CHARACTERS_MAX:,} "
            "characters, and would be rounded; write it as text, in quotes"
        )
    return float(text)


def _text(columns: Json, name: str) -> str:
    if name not in columns:
        found = ", ".join(map(repr, columns))[:COLUMNS_SHOWN] or "none"
        raise BrokenRowError(f"no column {name!r}; found {found}")
    value = columns[name]
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        kind = "nothing" if value is None else type(value).__name__
        raise BrokenRowError(f"column {name!r} holds {kind} instead of text")
    text = str(value).strip()
    if not text:
        raise BrokenRowError(f"column {name!r} is empty")
    return text
