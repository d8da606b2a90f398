"""Tasks that outlive the call that began them, and end with their owner."""

import asyncio
from collections.abc import Coroutine


class OwnedTasks:
    """The running tasks of one owner."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all of them, and wait until they have ended."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
