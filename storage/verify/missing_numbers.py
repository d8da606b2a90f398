"""Missing numbers of a contiguous series. However long the gaps are, few are listed."""

from collections.abc import Iterable
from typing import NamedTuple

LISTED_MAX = 100
"""Missing numbers that are listed one by one."""


class Gaps(NamedTuple):
    """Missing numbers. Example: 3 and 5 from 2 to 6 give `Gaps((2, 4), 0)`."""

    first: tuple[int, ...]
    """The lowest missing numbers, ascending, at most `LISTED_MAX`."""
    more: int
    """How many are missing beyond these."""


def gaps(present: Iterable[int], start: int, end: int) -> Gaps:
    """Find the numbers from `start` to `end` − 1 that are not in `present`, which is ascending."""
    first: list[int] = []
    missing, expected = 0, start
    for number in (*present, end):
        upto = min(number, end)
        if upto > expected:
            missing += upto - expected
            first += range(expected, min(upto, expected + LISTED_MAX - len(first)))
        expected = max(expected, upto + 1)
    return Gaps(tuple(first), missing - len(first))
