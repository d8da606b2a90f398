import subprocess
import sys
import threading

import pytest

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
