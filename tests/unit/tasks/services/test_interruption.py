"""How work without a loop of its own hears that it is to leave."""

import threading

import pytest

from storage.records.control import Stop
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.services.interruption import LOOK_INTERVAL_S, Interruption, LeftEarlyError


def test_work_goes_on_while_nobody_stops_it_and_ends_when_its_process_is_told(memory_store: ObjectStore) -> None:
    stop = threading.Event()
    interruption = Interruption(memory_store, stop)
    interruption.check()
    stop.set()
    with pytest.raises(LeftEarlyError, match="told to leave"):
        interruption.check()


def test_a_stopped_run_is_heard_of_at_the_next_look_at_the_store(memory_store: ObjectStore) -> None:
    now_s = 0.0
    interruption = Interruption(memory_store, threading.Event(), clock=lambda: now_s)
    interruption.check()
    runs.request_stop(memory_store, Stop("cancelled", "enough", 1.0))
    now_s = LOOK_INTERVAL_S / 2
    interruption.check()
    now_s = LOOK_INTERVAL_S
    with pytest.raises(LeftEarlyError, match="the run is cancelled"):
        interruption.check()
