"""Finding the end of a numbered series by asking for single numbers: no listing, and
logarithmically few requests.
"""

from collections.abc import Callable


def first_absent(exists: Callable[[int], bool], start: int) -> int:
    """The first number from `start` on that does not exist, in a series without gaps from `start`
    on.

    Doubles its stride until it meets an absent number, then halves the interval: a service that
    starts on a run with 10,000 orders asks about 25 times. A service that keeps up asks once or
    twice.
    """
    if not exists(start):
        return start
    present, stride = start, 1
    while exists(present + stride):
        present, stride = present + stride, stride * 2
    absent = present + stride
    while absent - present > 1:
        middle = (present + absent) // 2
        present, absent = (middle, absent) if exists(middle) else (present, middle)
    return absent
