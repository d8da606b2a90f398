import asyncio
import threading
from dataclasses import replace

import pytest

from rollout.service import ending as ending_module
from rollout.service.ending import LOOK_INTERVAL_S, Ending
from storage.records.control import Stop
from storage.run import orders, runs
from storage.store.object_store import ObjectStore, open_store
from tests.dataflow_world import Flicker


async def test_the_end_is_near_when_the_worker_is_told_to_leave(memory_store: ObjectStore) -> None:
    stop = threading.Event()
    ending = Ending(memory_store, stop)
    assert not await ending.within(0.0)
    stop.set()
    assert await ending.within(0.0)
    assert not ending.run_over


async def test_the_end_is_near_when_the_run_is_over(memory_store: ObjectStore) -> None:
    runs.request_stop(memory_store, Stop("completed", "all steps done", 0.0))
    ending = Ending(memory_store, threading.Event())
    assert await ending.within(0.0)
    assert ending.run_over


async def test_a_stop_that_cannot_be_read_is_no_end() -> None:
    store = open_store("memory://unreadable-stop")
    store.put("stop.json", b"{")
    assert not await Ending(store, threading.Event()).within(0.0)


async def test_the_end_is_near_when_no_further_shard_is_needed(memory_store: ObjectStore) -> None:
    ending = Ending(memory_store, threading.Event())
    assert not await ending.within(0.0)
    orders.end(memory_store, 4)
    later = Ending(memory_store, threading.Event())
    assert await later.within(0.0)
    assert later.run_over
    assert later.near


async def test_the_store_is_asked_once_in_an_interval_and_never_again_once_the_run_is_over(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, looks = 1000.0, 0
    over = ending_module._over

    def look(run: ObjectStore) -> bool:
        nonlocal looks
        looks += 1
        return over(run)

    monkeypatch.setattr(ending_module, "_over", look)
    monkeypatch.setattr(ending_module.time, "monotonic", lambda: now_s)
    ending = Ending(memory_store, threading.Event())
    assert not await ending.within(0.0)
    orders.end(memory_store, 4)
    now_s += LOOK_INTERVAL_S / 2
    assert not await ending.within(0.0)
    assert looks == 1
    now_s += LOOK_INTERVAL_S / 2
    assert await ending.within(0.0)
    now_s += 10 * LOOK_INTERVAL_S
    assert await ending.within(0.0)
    assert looks == 2


async def test_a_worker_that_is_to_leave_pauses_no_more(memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []

    async def sleep(pause_s: float) -> None:
        paused.append(pause_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    stop = threading.Event()
    ending = Ending(memory_store, stop)
    assert not await ending.within(7.0)
    stop.set()
    assert await ending.within(7.0)
    assert paused == [7.0]


async def test_a_store_that_is_away_is_no_end_and_is_asked_again(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending_module, "LOOK_INTERVAL_S", 0.0)
    flicker = Flicker(memory_store.backend)
    ending = Ending(replace(memory_store, backend=flicker, patience_s=1e-6), threading.Event())
    orders.end(memory_store, 0)
    flicker.down.set()
    assert not await ending.within(0.0)
    assert "cannot tell whether the run has ended: the store is away" in caplog.text
    flicker.down.clear()
    assert await ending.within(0.0)
