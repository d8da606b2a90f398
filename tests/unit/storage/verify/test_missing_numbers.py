from storage.verify import missing_numbers
from storage.verify.missing_numbers import Gaps


def test_missing_numbers_are_listed_and_beyond_a_hundred_counted() -> None:
    assert missing_numbers.gaps([3, 5], 2, 6) == Gaps((2, 4), 0)
    assert missing_numbers.gaps([], 0, 2) == Gaps((0, 1), 0)
    assert (
        missing_numbers.gaps([], 0, 0)
        == missing_numbers.gaps([0, 1, 2], 0, 3)
        == missing_numbers.gaps([0, 7], 1, 1)
        == Gaps((), 0)
    )
    result = missing_numbers.gaps([0, 2, 10**15], 0, 10**15 + 1)
    assert result.first == (1, *range(3, 3 + missing_numbers.LISTED_MAX - 1))
    assert len(result.first) + result.more == 10**15 - 2


def test_numbers_outside_the_range_are_not_requested() -> None:
    assert missing_numbers.gaps([0, 1, 4, 9], 2, 6) == Gaps((2, 3, 5), 0)
