"""Threads for the system's own blocking calls in an event loop: of the store, on weights, on locks.

    in_system_thread(call)  ──▶ system_threads(): at most SYSTEM_THREADS_MAX, for no other code
    asyncio.to_thread(call) ──▶ the default executor of the event loop, for users' code

Calls of workflows and rewards, which may be slow or never return, so delay no lease's renewal.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

SYSTEM_THREADS_MAX = 8
"""Maximum concurrent calls of `in_system_thread`."""
_threads: ContextVar[ThreadPoolExecutor | None] = ContextVar("system_threads", default=None)


@contextmanager
def system_threads() -> Iterator[None]:
    """Provide the threads of `in_system_thread`, for the event loops that start in this block.

    Its end waits for calls in progress: their limit is the patience of the store.
    """
    with ThreadPoolExecutor(SYSTEM_THREADS_MAX, thread_name_prefix="system") as threads:
        token = _threads.set(threads)
        try:
            yield
        finally:
            _threads.reset(token)


async def in_system_thread(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function` as `asyncio.to_thread` does, in a thread that users' code cannot occupy.

    Without `system_threads`, in a thread of the event loop's default executor.
    """
    call = partial(copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads.get(), call)
