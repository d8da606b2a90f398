"""When a trainer leaves: a request, or the end of the run, which is looked for at most once a second."""

import threading

import pytest

from storage.coordination.heartbeats import Pulse
from storage.records.control import Stop
from storage.run.runs import request_stop
from storage.store.object_store import ObjectStore
from trainer.service import departure
from trainer.service.departure import Departure


class Pauses(threading.Event):
    """Remembers the pauses that are asked of it; a request to leave arrives during the first one, if at all."""

    def __init__(self, request: bool) -> None:
        super().__init__()
        self.request, self.pauses_s = request, list[float | None]()

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses_s.append(timeout)
        if self.request:
            self.set()
        return self.is_set()


@pytest.fixture
def pulse(memory_store: ObjectStore) -> Pulse:
    return Pulse(memory_store, "trainer", "trainer-solver", attempt=0, interval_s=60.0)


def test_a_request_to_leave_is_enough(memory_store: ObjectStore, pulse: Pulse) -> None:
    stop = threading.Event()
    leaving = Departure(memory_store, pulse, stop)
    assert not leaving.due()
    stop.set()
    assert leaving.due()


def test_the_end_of_the_run_is_named_in_the_heartbeat(memory_store: ObjectStore, pulse: Pulse) -> None:
    request_stop(memory_store, Stop("cancelled", "a person asked", 0.0))
    assert Departure(memory_store, pulse, threading.Event()).due()
    assert pulse.last.note == "the run is cancelled: a person asked"


@pytest.mark.parametrize(("interval_s", "seen"), [(1e9, False), (0.0, True)])
def test_the_store_is_asked_again_after_an_interval_and_not_before(
    memory_store: ObjectStore, pulse: Pulse, monkeypatch: pytest.MonkeyPatch, interval_s: float, seen: bool
) -> None:
    monkeypatch.setattr(departure, "LOOK_INTERVAL_S", interval_s)
    leaving = Departure(memory_store, pulse, threading.Event())
    assert not leaving.due()
    request_stop(memory_store, Stop("completed", "enough", 0.0))
    assert leaving.due() is seen


@pytest.mark.parametrize("request_arrives", [True, False])
def test_a_pause_is_cut_short_by_a_request_to_leave(memory_store: ObjectStore, pulse: Pulse, request_arrives: bool) -> None:
    stop = Pauses(request_arrives)
    assert Departure(memory_store, pulse, stop).due_within(7.5) is request_arrives
    assert stop.pauses_s == [7.5]


def test_who_is_to_leave_already_does_not_pause(memory_store: ObjectStore, pulse: Pulse) -> None:
    stop = Pauses(request=False)
    stop.set()
    assert Departure(memory_store, pulse, stop).due_within(7.5)
    assert stop.pauses_s == []
