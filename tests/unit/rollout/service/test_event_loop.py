import asyncio
import threading
from contextlib import suppress

import pytest

from rollout.service import event_loop
from tests.support.patience import PATIENCE_S


async def ignores_cancellation(released: asyncio.Event) -> None:
    while not released.is_set():
        with suppress(asyncio.CancelledError):
            await released.wait()


def test_a_task_that_ignores_its_cancellation_does_not_keep_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_LIMIT_S", 0.01)
    results = list[str]()
    tasks = list[asyncio.Task[None]]()

    async def main() -> str:
        tasks.append(asyncio.create_task(ignores_cancellation(asyncio.Event())))
        await asyncio.sleep(0)
        return "done"

    thread = threading.Thread(target=lambda: results.append(event_loop.run(main())), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert results == ["done"]
    assert not tasks[0].done()


def test_tasks_that_are_left_are_cancelled_when_the_main_one_fails() -> None:
    tasks = list[asyncio.Task[bool]]()

    async def main() -> None:
        tasks.append(asyncio.create_task(asyncio.Event().wait()))
        raise ValueError("the main task")

    with pytest.raises(ValueError, match="the main task"):
        event_loop.run(main())
    assert tasks[0].cancelled()


async def test_cancel_returns_whether_all_tasks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_LIMIT_S", 0.01)
    released = asyncio.Event()
    ends = asyncio.create_task(asyncio.Event().wait())
    ignores = asyncio.create_task(ignores_cancellation(released))
    await asyncio.sleep(0)
    assert await event_loop.cancel([])
    assert await event_loop.cancel([ends])
    assert not await event_loop.cancel([ends, ignores])
    assert ends.cancelled()
    released.set()
    await ignores


async def test_the_first_error_of_gather_cancels_the_others_and_is_raised_itself() -> None:
    waits = asyncio.Event()
    cancelled = list[str]()

    async def wait() -> None:
        try:
            await waits.wait()
        except asyncio.CancelledError:
            cancelled.append("wait")
            raise

    async def fail() -> None:
        raise ValueError("one of them")

    with pytest.raises(ValueError, match="one of them"):
        await event_loop.gather([wait(), fail()])
    assert cancelled == ["wait"]


def test_a_task_that_is_cancelled_before_it_begins_leaves_no_coroutine_unawaited() -> None:
    async def main() -> bool:
        task = asyncio.create_task(asyncio.sleep(0))
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert event_loop.run(main())
