import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from storage.coordination.system_threads import (
    SYSTEM_THREADS_MAX,
    in_system_thread,
    system_threads,
)
from tests.support.patience import PATIENCE_S

service: ContextVar[str] = ContextVar("service")


def test_a_system_call_runs_while_all_threads_of_users_hang() -> None:
    released, hung = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        hung.release()
        released.wait()

    async def main() -> str:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        hanging = asyncio.create_task(asyncio.to_thread(hang))
        await in_system_thread(hung.acquire)
        try:
            return await in_system_thread(lambda: threading.current_thread().name)
        finally:
            released.set()
            await hanging

    with system_threads():
        assert asyncio.run(main()).startswith("system_")


def test_as_many_system_calls_as_threads_run_concurrently() -> None:
    barrier = threading.Barrier(SYSTEM_THREADS_MAX, timeout=PATIENCE_S)

    async def main() -> list[int]:
        calls = [in_system_thread(barrier.wait) for _ in range(SYSTEM_THREADS_MAX)]
        return await asyncio.gather(*calls)

    with system_threads():
        assert sorted(asyncio.run(main())) == list(range(SYSTEM_THREADS_MAX))


async def test_a_system_call_gets_its_arguments_and_the_context_and_raises_in_the_caller() -> None:
    service.set("rollout")

    def fail(order: int, *, reason: str) -> None:
        raise ValueError(f"{service.get()}: order {order} {reason}")

    with system_threads(), pytest.raises(ValueError, match=r"^rollout: order 7 is lost$"):
        await in_system_thread(fail, 7, reason="is lost")


async def test_without_system_threads_a_system_call_runs_in_the_default_executor() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="default") as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        name = await in_system_thread(lambda: threading.current_thread().name)
    assert name == "default_0"
