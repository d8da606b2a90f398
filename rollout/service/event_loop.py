"""Event loops with limits: tasks that run together, and tasks that ignore their cancellation.

The system's own blocking calls and those of users' code run in separate threads.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from rollout.service.user_threads import UserThreads
from storage.coordination.system_threads import system_threads

T = TypeVar("T")
log = logging.getLogger(__name__)

CANCEL_LIMIT_S = 10.0
"""How long a task may continue after its cancellation; then it is abandoned."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run as `asyncio.run`, which however waits without limit for tasks and threads that are left.

    `asyncio.to_thread` uses UserThreads, and `in_system_thread` the threads of `system_threads`.
    """
    with system_threads(), asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(UserThreads())
        try:
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
