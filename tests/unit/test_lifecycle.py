"""What surrounds the supervisor: its background work for MLflow, never the run's trouble; and the end that Prefect asks for."""

import asyncio
import logging
import os
import signal
import threading

import pytest

from storage import runs
from storage.objects import ObjectStore
from tasks.supervision import lifecycle
from tests.unit.test_supervisor import World


class SlowTracker:
    """Counts who is inside `sync` at once."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.trouble = trouble
        self.began, self.let_go = threading.Event(), threading.Event()
        self.finished = 0

    def sync(self) -> bool:
        self.began.set()
        assert self.let_go.wait(10.0)
        self.finished += 1
        if self.trouble is not None:
            raise self.trouble
        return True


async def leave_during_a_sync(tracker: SlowTracker) -> None:
    async with lifecycle._syncing(tracker, 60.0):  # type: ignore[arg-type]  # all that is asked of a tracker here
        await asyncio.to_thread(tracker.began.wait)
        asyncio.get_running_loop().call_later(0.02, tracker.let_go.set)
    tracker.finished += 10


def test_the_last_sync_begins_after_the_one_in_flight_is_through() -> None:
    tracker = SlowTracker()
    asyncio.run(leave_during_a_sync(tracker))
    assert tracker.finished == 11


def test_what_mlflows_client_raises_is_logged_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "tasks.supervision.lifecycle"):
        asyncio.run(leave_during_a_sync(SlowTracker(RuntimeError("a surprise"))))
    assert "tracking ended early" in caplog.text
    assert "a surprise" in caplog.text


def test_a_run_cancelled_while_the_store_is_away_is_cancelled_when_it_is_back(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "is_being_cancelled", lambda: True)
    world = World(memory_store)
    world.look()
    world.backend.away = True

    async def supervise() -> str:
        supervising = asyncio.create_task(lifecycle._supervise(world.supervisor))
        assert await asyncio.to_thread(world.backend.noticed.wait, 10.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.to_thread(world.backend.lasted.wait, 10.0)
        world.backend.away = False
        return (await asyncio.wait_for(supervising, 10.0)).state

    assert asyncio.run(supervise()) == "cancelled"
    stop = runs.read_stop(world.run)
    assert stop is not None
    assert stop.reason == "its flow run was cancelled in Prefect"
    assert len(world.launcher.cancelled) == len(world.launcher.launched)
