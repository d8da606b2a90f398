import threading

import pytest

from storage.coordination.heartbeats import Pulse
from storage.errors import CorruptError, TransientError
from storage.store.object_store import ObjectStore
from trainer.service import patience
from trainer.service.patience import insist


class Flaky:
    """Fails so many times, then answers 42."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return 42


@pytest.fixture
def pulse(memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Pulse:
    monkeypatch.setattr(patience, "PAUSE_S", 0.001)
    return Pulse(memory_store, "trainer", "trainer-solver", attempt=0, interval_s=60.0)


def test_a_call_is_tried_until_the_store_answers(pulse: Pulse) -> None:
    flaky = Flaky(5, TransientError("the store is away"))
    assert insist("reading", flaky, pulse, threading.Event()) == 42
    assert flaky.calls == 6
    assert pulse.last.note.startswith("reading failed and is tried again in 0.016 s")


def test_other_errors_come_through_at_once(pulse: Pulse) -> None:
    flaky = Flaky(1, CorruptError("half an object"))
    with pytest.raises(CorruptError):
        insist("reading", flaky, pulse, threading.Event())
    assert flaky.calls == 1


def test_one_that_shall_leave_tries_once_more_and_gives_up(pulse: Pulse) -> None:
    stop = threading.Event()
    stop.set()
    flaky = Flaky(5, TransientError("the store is away"))
    with pytest.raises(TransientError):
        insist("reading", flaky, pulse, stop)
    assert flaky.calls == 1


class NoPause(threading.Event):
    """Remembers the pauses that are asked of it, and makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses_s: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses_s.append(timeout)
        return False


def test_pauses_double_from_half_a_second_to_ten(memory_store: ObjectStore) -> None:
    pulse = Pulse(memory_store, "trainer", "trainer-solver", attempt=0, interval_s=60.0)
    stop = NoPause()
    assert insist("reading", Flaky(7, TransientError("the store is away")), pulse, stop) == 42
    assert stop.pauses_s == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
