from storage.audit import gaps
from storage.audit.gaps import Gaps


def test_what_is_missing_is_named_and_beyond_a_hundred_counted() -> None:
    assert gaps.gaps([3, 5], 2, 6) == Gaps((2, 4), 0)
    assert gaps.gaps([], 0, 2) == Gaps((0, 1), 0)
    assert gaps.gaps([], 0, 0) == gaps.gaps([0, 1, 2], 0, 3) == gaps.gaps([0, 7], 1, 1) == Gaps((), 0)
    found = gaps.gaps([0, 2, 10**15], 0, 10**15 + 1)
    assert found.first == (1, *range(3, 3 + gaps.TOLD_MAX - 1))
    assert len(found.first) + found.more == 10**15 - 2


def test_what_lies_outside_is_not_asked_for() -> None:
    assert gaps.gaps([0, 1, 4, 9], 2, 6) == Gaps((2, 3, 5), 0)
