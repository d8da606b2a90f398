"""When a process that has ended is started again: at once, and later each time if it keeps ending.

The record `watchdog.json` in the stack's home is for `astraflow doctor`, and nothing is decided by
it: a watchdog that starts counts anew.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from deployments.paths import Home, open_private, open_regular
from storage.coordination.lifetime import backoff_s
from storage.errors import ConfigError

LIVED_S = 120.0
"""A process that ran for this time works: its next end is the first of a new series."""
FIRST_S, LONGEST_S = 2.0, 300.0
"""First and longest pause before a process that keeps ending is started again."""
SHOWN_MAX = 100
"""Entries of a record that are read: a stack has fewer processes."""


@dataclass(frozen=True)
class Restarts:
    """The ends of one process. Example: `Restarts(ends=3, in_a_row=2)`."""

    ends: int = 0
    """Since the watchdog's start."""
    in_a_row: int = 0
    """Ends of processes that did not run for LIVED_S."""


@dataclass
class RestartPolicy:
    """Counts the ends of each process, and says when it may be started again."""

    _counts: dict[str, Restarts] = field(default_factory=dict)
    _not_before_s: dict[str, float] = field(default_factory=dict)
    _pids: dict[str, int] = field(default_factory=dict)
    """The process whose end was counted last."""

    def note_end(self, name: str, pid: int, lived_s: float, now_s: float) -> float | None:
        """Count the end of a process, once for each pid; return the pause before its next start.

        None for an end that was counted before.
        """
        if self._pids.get(name) == pid:
            return None
        self._pids[name] = pid
        before = self._counts.get(name, Restarts())
        in_a_row = 1 if lived_s >= LIVED_S else before.in_a_row + 1
        self._counts[name] = Restarts(before.ends + 1, in_a_row)
        pause_s = backoff_s(in_a_row - 1, FIRST_S, LONGEST_S)
        self._not_before_s[name] = now_s + pause_s
        return pause_s

    def is_due(self, name: str, now_s: float) -> bool:
        """Return whether the process may be started now.

        No pause is longer than LONGEST_S: a longer wait shows that the clock was set back.
        """
        return not 0 < self._not_before_s.get(name, -math.inf) - now_s <= LONGEST_S

    def postpone(self, name: str, now_s: float) -> None:
        """Allow the next start of a process that could not be started after a pause."""
        in_a_row = max(1, self._counts.get(name, Restarts()).in_a_row)
        self._not_before_s[name] = now_s + backoff_s(in_a_row, FIRST_S, LONGEST_S)

    @property
    def counts(self) -> Mapping[str, Restarts]:
        """The ends of every process that has ended."""
        return self._counts


def save(home: Home, counts: Mapping[str, Restarts]) -> None:
    """Write the record. Raises OSError, and ConfigError for a pipe or a folder in its place."""
    body = {name: asdict(restarts) for name, restarts in counts.items()}
    with open(home.new_watchdog, "w", opener=open_private) as file:
        json.dump(body, file)
    os.replace(home.new_watchdog, home.watchdog)


def load(home: Home) -> Mapping[str, Restarts]:
    """Return the ends of each process since the watchdog's start; nothing without a readable
    record.
    """
    try:
        with open(home.watchdog, opener=open_regular) as file:
            body = json.load(file)
        read = {
            str(name): Restarts(_count(entry["ends"]), _count(entry["in_a_row"]))
            for name, entry in list(body.items())[:SHOWN_MAX]
        }
    except (ConfigError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return read


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError("not a count")
    return value
