import asyncio
import subprocess
import sys
import threading

import pytest

from rollout.service import event_loop, user_threads
from rollout.service.user_threads import UserThreads
from tests.support.patience import PATIENCE_S, until

LEAVES = """
import asyncio, concurrent.futures, threading
from rollout.service import event_loop

async def main():
    hanging = threading.Event()
    asyncio.create_task(asyncio.to_thread(lambda: (hanging.set(), threading.Event().wait())))
    while not hanging.is_set():
        await asyncio.sleep(0)
    return "left"

print(event_loop.run(main()))
"""


def test_a_call_returns_its_result_or_raises_its_exception() -> None:
    threads = UserThreads(2)
    assert threads.submit(divmod, 7, 3).result(PATIENCE_S) == (2, 1)
    assert threads.submit(int, "11", base=2).result(PATIENCE_S) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        threads.submit(int, "eleven").result(PATIENCE_S)


def test_a_call_that_raises_stop_iteration_ends_its_await() -> None:
    async def main() -> None:
        await asyncio.wait_for(asyncio.to_thread(next, iter(())), PATIENCE_S)

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        event_loop.run(main())


def test_calls_beyond_the_limit_wait_until_one_returns(caplog: pytest.LogCaptureFixture) -> None:
    threads, released = UserThreads(2), threading.Event()
    hanging = [threads.submit(released.wait) for _ in range(2)]
    until(lambda: all(call.running() for call in hanging))
    assert caplog.messages == []
    waiting = [threads.submit(threading.get_ident) for _ in range(3)]
    assert waiting[0].cancel()
    assert not any(call.running() for call in waiting)
    assert [message.split(",")[0] for message in caplog.messages] == [
        "2 calls of asyncio.to_thread by the workflow are in progress"
    ]
    released.set()
    assert {call.result(PATIENCE_S) for call in waiting[1:]} != {threading.get_ident()}
    assert [call.result(PATIENCE_S) for call in hanging] == [True, True]


def test_a_thread_keeps_its_local_values_for_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_threads, "IDLE_S", PATIENCE_S)
    threads, local, clients = UserThreads(2), threading.local(), []

    def use_client() -> None:
        if not hasattr(local, "client"):
            local.client = object()
            clients.append(local.client)

    for _ in range(50):
        threads.submit(use_client).result(PATIENCE_S)
    assert len(clients) in (1, 2)  # a thread may not wait yet when the next call comes
    threads.shutdown()


def test_a_thread_without_a_call_ends_after_a_time_or_at_the_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_threads, "IDLE_S", 0.0)
    hasty = UserThreads(1).submit(threading.current_thread).result(PATIENCE_S)
    until(lambda: not hasty.is_alive())
    monkeypatch.setattr(user_threads, "IDLE_S", PATIENCE_S)
    threads = UserThreads(1)
    patient = threads.submit(threading.current_thread).result(PATIENCE_S)
    threads.shutdown()
    until(lambda: not patient.is_alive())


def test_shutdown_waits_for_no_call_and_cancels_those_that_have_not_begun() -> None:
    threads, released = UserThreads(1), threading.Event()
    hanging = threads.submit(released.wait)
    until(hanging.running)
    waiting = threads.submit(int)
    threads.shutdown(wait=True)
    assert (hanging.running(), waiting.cancelled()) == (True, True)
    released.set()
    assert hanging.result(PATIENCE_S)


def test_a_process_leaves_although_a_call_of_asyncio_to_thread_never_returns() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.stdout, done.stderr, done.returncode) == ("left\n", "", 0)
