"""Numbers that are missing from a row that should have none missing. However long the gaps are,
little is said and held.
"""

from collections.abc import Iterable
from typing import NamedTuple

TOLD_MAX = 100
"""Missing numbers that are named one by one."""


class Gaps(NamedTuple):
    """What is missing. Example: of 3, 5 from 2 to 6 `Gaps((2, 4), 0)`."""

    first: tuple[int, ...]
    """The lowest missing numbers, ascending, at most `TOLD_MAX`."""
    more: int
    """How many are missing beyond these."""


def gaps(there: Iterable[int], start: int, end: int) -> Gaps:
    """Of the numbers from `start` up to but without `end`; `there` holds the ones that exist,
    ascending.
    """
    first: list[int] = []
    missing, expected = 0, start
    for number in (*there, end):
        upto = min(number, end)
        if upto > expected:
            missing += upto - expected
            first += range(expected, min(upto, expected + TOLD_MAX - len(first)))
        expected = max(expected, upto + 1)
    return Gaps(tuple(first), missing - len(first))
