import itertools

import pytest

from storage.errors import CorruptError, TransientError
from storage.store import remembered as module
from storage.store.remembered import remembered


class Reads:
    """Counts the reads, each of which takes `took_s`, and fails with `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.took_s = 0.0
        self.num = 0
        self._used_s = 0.0

    def thread_time(self) -> float:
        return self._used_s

    def __call__(self, place: str) -> str:
        self.num += 1
        self._used_s += self.took_s
        if self.error:
            raise self.error
        return f"{place} {self.num}"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    made = Reads()
    monkeypatch.setattr(module.time, "thread_time", made.thread_time)
    return made


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_value_is_read_once(reads: Reads) -> None:
    read = remembered(2)(reads)
    assert [read("a"), read("a"), read("b"), read("a")] == ["a 1", "a 1", "b 2", "a 1"]


def test_of_more_values_than_are_kept_the_oldest_is_read_again(reads: Reads) -> None:
    read = remembered(2)(reads)
    assert [read(place) for place in "abca"] == ["a 1", "b 2", "c 3", "a 4"]


def test_a_slow_failure_is_kept_for_a_hundred_times_its_time(
    reads: Reads, now_s: list[float]
) -> None:
    read = remembered(2)(reads)
    reads.error, reads.took_s = CorruptError("torn"), 0.5
    for _ in range(3):
        with pytest.raises(CorruptError, match=r"^torn$"):
            read("a")
    assert reads.num == 1
    reads.error = None
    now_s[0] += 49.0
    with pytest.raises(CorruptError):
        read("a")
    assert read("b") == "b 2"
    now_s[0] += 1.5
    assert read("a") == "a 3"


@pytest.mark.parametrize(
    ("error", "took_s"), [(CorruptError("torn"), 0.05), (TransientError("away"), 9.0)]
)
def test_a_fast_failure_and_one_of_the_store_are_not_kept(
    error: Exception, took_s: float, reads: Reads, now_s: list[float]
) -> None:
    read = remembered(2)(reads)
    reads.error, reads.took_s = error, took_s
    for _ in range(2):
        with pytest.raises(type(error)):
            read("a")
    reads.error = None
    assert read("a") == "a 3"


def test_a_limited_number_of_failures_is_kept(reads: Reads, now_s: list[float]) -> None:
    read = remembered(2)(reads)
    reads.error, reads.took_s = CorruptError("torn"), 0.5
    for place in itertools.chain("abc", "c"):
        with pytest.raises(CorruptError):
            read(place)
    assert reads.num == 3
