"""Event loops with limits for users' code: tasks that ignore their cancellation, block the event
loop, or call `sys.exit()`.

The system's own blocking calls and those of users' code run in separate threads.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from rollout.service.blocked_loop import reported_blocks
from rollout.service.user_threads import UserThreads
from storage.coordination.system_threads import system_threads

T = TypeVar("T")
log = logging.getLogger(__name__)

CANCEL_LIMIT_S = 10.0
"""How long a task may continue after its cancellation; then it is abandoned."""


def run(main: Coroutine[Any, Any, T], on_block: Callable[[str], None] = lambda note: None) -> T:
    """Run as `asyncio.run`, which however waits without limit for tasks and threads that are left.

    `asyncio.to_thread` uses UserThreads, and `in_system_thread` the threads of `system_threads`.
    `on_block` is called, from another thread, while code blocks the event loop (`blocked_loop`).
    """
    with system_threads(), asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_default_executor(UserThreads())
        loop.set_task_factory(_task)
        try:
            with reported_blocks(loop, on_block):
                return runner.run(main)
        finally:
            runner.run(_cancel_rest())


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first error cancels the others, and is raised ungrouped."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> bool:
    """Cancel tasks and wait until they have ended; False if some had to be abandoned.

    An abandoned task may continue as long as its event loop runs, which does not wait for it.
    """
    for task in tasks:
        task.cancel()
    if not tasks:
        return True
    _, abandoned = await asyncio.wait(tasks, timeout=CANCEL_LIMIT_S)
    for task in abandoned:
        log.warning(
            "%s continues %g s after its cancellation and is abandoned; its code must let "
            "CancelledError pass",
            task.get_name(),
            CANCEL_LIMIT_S,
        )
        asyncio._unregister_task(task)  # or the end of the event loop waits for it
    return not abandoned


async def _cancel_rest() -> None:
    await cancel([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])


class _WithoutExit(Coroutine[Any, Any, T]):
    """A coroutine in which `sys.exit()` is a RuntimeError.

    A task that raises SystemExit ends its event loop. A class, and not a coroutine that awaits
    the other: a task that is cancelled before it begins would leave that one not awaited.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self.__qualname__ = getattr(coroutine, "__qualname__", type(coroutine).__name__)

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except SystemExit as error:
            raise RuntimeError(f"sys.exit({error.code!r}) was called") from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except SystemExit as error:
            raise RuntimeError(f"sys.exit({error.code!r}) was called") from error

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **context: Any) -> asyncio.Task[Any]:
    return asyncio.Task(_WithoutExit(coroutine), loop=loop, **context)
