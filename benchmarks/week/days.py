"""The data of a week: one file of problems a day, such as a product's feedback would give."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from data_ops.prompts.chained_addition import problem
from tasks.recurring.due_time import night_id

MONDAY = datetime(2026, 1, 5, 2, 0, tzinfo=UTC)
"""When the first night is due."""


@dataclass(frozen=True, kw_only=True)
class Day:
    """What happens on one day and in the night that follows its data."""

    name: str
    rows: int
    """Problems that the night may train on; 0: the night has no data."""
    is_poisoned: bool = False
    """The reference answers are wrong."""
    is_killed: bool = False
    """The night's process is killed in the middle, and the night is started again."""
    rolls_back: bool = False
    """A person rolls the champion back in the morning."""
    event: str = ""
    """For the table."""


def week(rows: int) -> tuple[Day, ...]:
    """Return the days of the benchmark."""
    return (
        Day(name="Monday", rows=rows, event="the first night; compared with the base model"),
        Day(name="Tuesday", rows=rows),
        Day(name="Wednesday", rows=rows, is_poisoned=True, event="all answers are wrong"),
        Day(name="Thursday", rows=rows, is_killed=True, event="SIGKILL, then started again"),
        Day(name="Friday", rows=rows, rolls_back=True, event="rolled back in the morning"),
        Day(name="Saturday", rows=0, event="no data"),
        Day(name="Sunday", rows=rows, event="begins with the champion of the rollback"),
    )


def night_of(index: int) -> str:
    """Return the id of the night of a day, counted from 0."""
    return night_id(MONDAY + timedelta(days=index))


def write(folder: Path, index: int, day: Day) -> None:
    """Write the problems of a day, dated to the noon before its night."""
    if not day.rows:
        return
    date = (MONDAY + timedelta(days=index) - timedelta(hours=14)).isoformat()
    lines = []
    for number in range(index * day.rows, (index + 1) * day.rows):
        fields = dict(problem(number, "train", 0).fields)
        if day.is_poisoned:
            fields["answer"] = str(int(fields["answer"]) + 1)
        lines.append(json.dumps({**fields, "date": date}))
    (folder / f"{index + 1}-{day.name.lower()}.jsonl").write_text("\n".join(lines) + "\n")
