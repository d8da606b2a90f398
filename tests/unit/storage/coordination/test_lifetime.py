"""When a service must stop, how it waits, and how it retries; clocks, events and the run's end are
arguments.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from storage.coordination import lifetime as lifetime_module
from storage.coordination.lifetime import (
    CHECK_INTERVAL_S,
    CHECK_PATIENCE_S,
    SAME_FAILURES,
    SLEEP_MAX_S,
    Lifetime,
    SameFailure,
    StoppedError,
    backoff_s,
    stop_reason,
)
from storage.errors import CorruptError, TransientError
from storage.records.control import Stop
from storage.run.runs import request_stop
from storage.store.object_store import ObjectStore
from tests.support.patience import PATIENCE_S
from tests.support.runs.dataflow_world import OutageBackend
from tests.support.runs.lifetimes import heartbeat_writer_of

PAUSES_MAX = 1000
CANCELLED = Stop("cancelled", "a person asked", 0.0)


class Time(threading.Event):
    """A stop event and the clock of its lifetime: a pause takes no time, and advances the clock.

    `script` names what happens at the end of pauses, by their number from 0.
    """

    def __init__(self, script: dict[int, Callable[[], object]] | None = None) -> None:
        super().__init__()
        self.now_s = 0.0
        self.pauses_s: list[float] = []
        self._script = script or {}

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        assert len(self.pauses_s) < PAUSES_MAX, "it never stops"
        self.now_s += seconds
        self.pauses_s.append(seconds)
        self._script.get(len(self.pauses_s) - 1, lambda: None)()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pause(timeout)
        return self.is_set()

    async def sleep(self, seconds: float) -> None:
        self.pause(seconds)


def at(
    time: Time, run: ObjectStore, why_over: Callable[[ObjectStore], str] = stop_reason
) -> Lifetime:
    return Lifetime(
        run, heartbeat_writer_of(run, "trainer"), time, why_over=why_over, clock=time.clock
    )


class Flaky:
    """A call that fails the given number of times, then returns 42."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures, self.error = failures, error or TransientError("the store is away")
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return 42


class Reads:
    """A `why_over` that counts its reads."""

    def __init__(self, reason: str = "") -> None:
        self.reason, self.count = reason, 0

    def __call__(self, run: ObjectStore) -> str:
        self.count += 1
        return self.reason


# --- when a service must stop ---


def test_a_service_runs_until_its_process_gets_a_stop_request(memory_store: ObjectStore) -> None:
    time = Time()
    lifetime = at(time, memory_store)
    assert not lifetime.should_stop()
    time.set()
    assert lifetime.should_stop()
    assert lifetime.over == ""


def test_a_service_stops_at_the_runs_end_with_the_reason_in_its_heartbeat(
    memory_store: ObjectStore,
) -> None:
    request_stop(memory_store, CANCELLED)
    lifetime = at(Time(), memory_store)
    assert lifetime.should_stop()
    assert lifetime.over == "the run is cancelled: a person asked"
    assert lifetime.heartbeat.last.note == "the run is cancelled: a person asked"


def test_the_heartbeat_of_a_needed_service_keeps_its_note(
    memory_store: ObjectStore,
) -> None:
    lifetime = at(Time(), memory_store)
    lifetime.heartbeat.update(note="waits for version 0")
    assert not lifetime.should_stop()
    assert lifetime.heartbeat.last.note == "waits for version 0"


def test_a_service_can_end_for_its_own_reason(memory_store: ObjectStore) -> None:
    request_stop(memory_store, CANCELLED)
    needed = Reads()
    lifetime = at(Time(), memory_store, needed)
    assert not lifetime.should_stop()
    assert at(Time(), memory_store, Reads("all is copied")).should_stop()


def test_the_store_is_read_once_per_interval_and_not_after_the_end(
    memory_store: ObjectStore,
) -> None:
    time, reads = Time(), Reads()
    lifetime = at(time, memory_store, reads)
    counts = []
    for now_s in (0.0, 0.5, 0.999, 1.0, 1.001, 1.999, 2.0):
        time.now_s = now_s * CHECK_INTERVAL_S
        assert not lifetime.should_stop()
        counts.append(reads.count)
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    reads.reason = "enough"
    time.now_s += CHECK_INTERVAL_S
    assert lifetime.should_stop()
    time.now_s += 10 * CHECK_INTERVAL_S
    reads.reason = ""
    assert lifetime.should_stop()
    assert reads.count == 4


def test_a_process_with_a_stop_request_does_not_read_the_store(
    memory_store: ObjectStore,
) -> None:
    time, reads = Time(), Reads()
    time.set()
    assert at(time, memory_store, reads).should_stop()
    assert reads.count == 0


def test_a_draining_service_can_still_check_for_the_runs_end(memory_store: ObjectStore) -> None:
    time, reads = Time(), Reads()
    time.set()
    lifetime = at(time, memory_store, reads)
    assert not lifetime.is_over()
    reads.reason = "enough"
    time.now_s += CHECK_INTERVAL_S
    assert lifetime.is_over()


def test_an_unreachable_store_stops_no_service_and_is_read_again_after_an_interval(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    flicker = OutageBackend(memory_store.backend)
    time = Time()
    lifetime = at(time, replace(memory_store, backend=flicker, patience_s=1e-6))
    request_stop(memory_store, CANCELLED)
    flicker.down.set()
    assert not lifetime.should_stop()
    assert "cannot read whether the run is over: the store is away" in caplog.text
    flicker.down.clear()
    assert not lifetime.should_stop()
    time.now_s += CHECK_INTERVAL_S
    assert lifetime.should_stop()


def test_an_unreadable_stop_ends_no_service(memory_store: ObjectStore) -> None:
    memory_store.put("stop.json", b"{")
    assert not at(Time(), memory_store).should_stop()


@pytest.mark.parametrize(("patience_s", "given_s"), [(45.0, CHECK_PATIENCE_S), (0.25, 0.25)])
def test_a_read_of_the_runs_end_has_a_short_timeout(
    memory_store: ObjectStore, patience_s: float, given_s: float
) -> None:
    given: list[ObjectStore] = []

    def why_over(run: ObjectStore) -> str:
        given.append(run)
        return ""

    run = replace(memory_store, patience_s=patience_s)
    assert not at(Time(), run, why_over).should_stop()
    assert given == [replace(memory_store, patience_s=given_s)]


def test_only_one_of_several_threads_reads_the_store(memory_store: ObjectStore) -> None:
    reading, go_on, reads = threading.Event(), threading.Event(), 0

    def why_over(run: ObjectStore) -> str:
        nonlocal reads
        reads += 1
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return ""

    lifetime = at(Time(), memory_store, why_over)
    threads = [threading.Thread(target=lifetime.should_stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert reading.wait(PATIENCE_S)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert reads == 1


# --- check ---


def test_check_returns_while_the_service_is_needed_and_raises_with_the_reason_to_stop(
    memory_store: ObjectStore,
) -> None:
    time = Time()
    lifetime = at(time, memory_store)
    lifetime.check()
    time.set()
    with pytest.raises(StoppedError, match=r"^its process was asked to stop$"):
        lifetime.check()
    request_stop(memory_store, CANCELLED)
    with pytest.raises(StoppedError, match=r"^the run is cancelled: a person asked$"):
        at(Time(), memory_store).check()


# --- wait ---


@pytest.mark.parametrize(
    ("seconds", "pauses_s"), [(0.0, []), (0.3, [0.3]), (1.0, [1.0]), (2.5, [1.0, 1.0, 0.5])]
)
def test_a_pause_has_the_requested_length(
    memory_store: ObjectStore, seconds: float, pauses_s: list[float]
) -> None:
    time = Time()
    assert not at(time, memory_store).wait(seconds)
    assert time.pauses_s == pauses_s
    assert time.now_s == seconds


def test_a_pause_ends_at_a_stop_request(memory_store: ObjectStore) -> None:
    time = Time({0: lambda: time.set()})
    assert at(time, memory_store).wait(60.0)
    assert time.pauses_s == [1.0]


def test_a_pause_ends_within_an_interval_after_the_runs_end(memory_store: ObjectStore) -> None:
    time = Time({1: lambda: request_stop(memory_store, CANCELLED)})
    assert at(time, memory_store).wait(60.0)
    assert time.pauses_s == [1.0, 1.0]


def test_a_stopping_service_does_not_pause(memory_store: ObjectStore) -> None:
    asked, over = Time(), Time()
    asked.set()
    assert at(asked, memory_store).wait(7.5)
    assert at(over, memory_store, Reads("enough")).wait(7.5)
    assert (asked.pauses_s, over.pauses_s) == ([], [])


def test_a_stop_request_at_the_end_of_a_pause_is_returned(memory_store: ObjectStore) -> None:
    time = Time({0: lambda: time.set()})
    assert at(time, memory_store).wait(0.5)


def test_a_pause_of_the_real_clock_is_ended_by_another_thread(memory_store: ObjectStore) -> None:
    stop = threading.Event()
    threading.Timer(0.01, stop.set).start()
    start_s = time.monotonic()
    assert Lifetime(memory_store, heartbeat_writer_of(memory_store, "trainer"), stop).wait(
        PATIENCE_S
    )
    assert time.monotonic() - start_s < PATIENCE_S


# --- retry and backoff ---


def test_the_backoff_doubles_from_the_first_to_the_longest_pause() -> None:
    assert [backoff_s(failures) for failures in range(8)] == [
        0.0,
        0.5,
        1.0,
        2.0,
        4.0,
        8.0,
        10.0,
        10.0,
    ]
    assert [backoff_s(failures, 1.0, 30.0) for failures in (1, 2, 5, 6, 7)] == [
        1.0,
        2.0,
        16.0,
        30.0,
        30.0,
    ]
    assert backoff_s(10**9) == 10.0


def test_a_call_is_retried_with_doubled_pauses_until_the_store_responds(
    memory_store: ObjectStore,
) -> None:
    time, flaky = Time(), Flaky(7)
    assert at(time, memory_store).retry("reading a batch", flaky) == 42
    assert flaky.calls == 8
    assert time.pauses_s == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_the_heartbeat_and_the_log_name_what_a_retry_waits_for(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    notes: list[str] = []
    time = Time({index: lambda: notes.append(lifetime.heartbeat.last.note) for index in range(2)})
    lifetime = at(time, memory_store)
    with caplog.at_level(logging.WARNING):
        lifetime.retry("reading a batch", Flaky(2))
    assert notes == [
        "reading a batch failed and is retried in 0.5 s: the store is away",
        "reading a batch failed and is retried in 1 s: the store is away",
    ]
    assert [record.getMessage() for record in caplog.records] == notes
    assert lifetime.heartbeat.last.note == ""  # it has been read by now


def test_the_heartbeat_is_cleared_after_a_retry_succeeds(memory_store: ObjectStore) -> None:
    lifetime = at(Time(), memory_store)
    lifetime.retry("reading a batch", Flaky(1))
    assert lifetime.heartbeat.last.note == ""


def test_a_call_that_succeeds_does_not_change_the_heartbeat(memory_store: ObjectStore) -> None:
    lifetime = at(Time(), memory_store)
    lifetime.heartbeat.update(note="builds the engine")
    assert lifetime.retry("reading", Flaky(0)) == 42
    assert lifetime.heartbeat.last.note == "builds the engine"


def test_other_errors_are_raised_immediately(memory_store: ObjectStore) -> None:
    time, flaky = Time(), Flaky(1, CorruptError("half an object"))
    with pytest.raises(CorruptError, match="half an object"):
        at(time, memory_store).retry("reading", flaky)
    assert (flaky.calls, time.pauses_s) == (1, [])


def test_a_stopping_service_tries_once_and_gives_up(memory_store: ObjectStore) -> None:
    time, flaky = Time(), Flaky(5)
    time.set()
    with pytest.raises(
        StoppedError, match=r"^reading failed while the service must stop: the store is away$"
    ):
        at(time, memory_store).retry("reading", flaky)
    assert (flaky.calls, time.pauses_s) == (1, [])
    assert at(time, memory_store).retry("reading", Flaky(0)) == 42


def test_a_stop_request_during_the_pause_allows_one_more_try(memory_store: ObjectStore) -> None:
    time, flaky = Time({1: lambda: time.set()}), Flaky(5)
    with pytest.raises(StoppedError):
        at(time, memory_store).retry("reading", flaky)
    assert (flaky.calls, time.pauses_s) == (3, [0.5, 1.0])


# --- in an event loop ---


async def test_an_event_loop_gets_the_same_stop_reason(memory_store: ObjectStore) -> None:
    time, reads = Time(), Reads()
    lifetime = at(time, memory_store, reads)
    assert not await lifetime.async_should_stop()
    assert not await lifetime.async_should_stop()
    assert reads.count == 1
    time.set()
    time.now_s += CHECK_INTERVAL_S
    assert await lifetime.async_should_stop()
    assert reads.count == 1
    assert not await lifetime.async_is_over()
    assert reads.count == 2
    reads.reason = "enough"
    time.now_s += CHECK_INTERVAL_S
    assert await lifetime.async_is_over()
    time.clear()
    assert await lifetime.async_should_stop()


async def test_an_event_loop_reads_the_store_in_a_thread(memory_store: ObjectStore) -> None:
    threads: list[int] = []

    def why_over(run: ObjectStore) -> str:
        threads.append(threading.get_ident())
        return ""

    assert not await at(Time(), memory_store, why_over).async_should_stop()
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize(("seconds", "num_sleeps"), [(0.0, 0), (0.05, 1), (0.25, 3), (1.0, 10)])
async def test_an_event_loops_pause_consists_of_short_sleeps(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, seconds: float, num_sleeps: int
) -> None:
    time = Time()
    monkeypatch.setattr(asyncio, "sleep", time.sleep)
    assert not await at(time, memory_store, Reads()).async_wait(seconds)
    assert time.now_s == pytest.approx(seconds)
    assert len([pause_s for pause_s in time.pauses_s if pause_s > 1e-9]) == num_sleeps
    assert all(pause_s <= SLEEP_MAX_S for pause_s in time.pauses_s)


async def test_an_event_loops_pause_ends_shortly_after_a_stop_request_or_the_runs_end(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Time({4: lambda: asked.set()})
    monkeypatch.setattr(asyncio, "sleep", asked.sleep)
    assert await at(asked, memory_store, Reads()).async_wait(60.0)
    assert asked.pauses_s == [SLEEP_MAX_S] * 5

    ended = Time({4: lambda: request_stop(memory_store, CANCELLED)})
    monkeypatch.setattr(asyncio, "sleep", ended.sleep)
    assert await at(ended, memory_store).async_wait(60.0)
    assert CHECK_INTERVAL_S <= ended.now_s <= CHECK_INTERVAL_S + 2 * SLEEP_MAX_S


async def test_a_stopping_service_does_not_pause_its_event_loop(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time()
    monkeypatch.setattr(asyncio, "sleep", time.sleep)
    time.set()
    assert await at(time, memory_store).async_wait(7.5)
    assert time.pauses_s == []


def test_the_default_times_are_short() -> None:
    assert lifetime_module.SLEEP_MAX_S <= 0.1
    assert lifetime_module.CHECK_INTERVAL_S <= 1.0
    assert lifetime_module.CHECK_PATIENCE_S <= 1.0


def test_the_advice_is_given_when_the_same_failure_goes_on() -> None:
    failure = SameFailure()
    away, other = TransientError("a is away"), TransientError("b is away")
    for _ in range(SAME_FAILURES - 1):
        assert failure.describe(away) == "a is away"
    assert failure.describe(other) == "b is away"
    for _ in range(SAME_FAILURES - 1):
        assert failure.describe(away) == "a is away"
    assert failure.describe(away) == failure.describe(away)
    assert failure.describe(away).startswith("a is away; if this object alone fails, put a good")
    failure.clear()
    assert failure.describe(away) == "a is away"
