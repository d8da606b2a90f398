"""The time limit of an episode. It can be paused during waits that the episode does not cause.

async with episode_limit(120.0) as limit:    # around the episode
    async with stopped_time():               # around a wait in a queue of a judge
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final


class EpisodeLimit:
    """The remaining time of an episode."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._stops = 0
        self._remaining_s = 0.0
        self._ended = False

    @property
    def is_over(self) -> bool:
        """Whether the time limit was exceeded."""
        return self._timeout.expired()

    def stop(self) -> None:
        """Pause the limit until `resume` was called as often as `stop`."""
        self._stops += 1
        deadline_s = self._timeout.when()
        if self._stops == 1 and deadline_s is not None and not self._ended and not self.is_over:
            self._remaining_s = deadline_s - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def resume(self) -> None:
        self._stops -= 1
        if (
            self._stops == 0
            and self._timeout.when() is None
            and not self._ended
            and not self.is_over
        ):
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._remaining_s)

    def end(self) -> None:
        """Remove the limit; tasks that outlive the episode no longer have one."""
        self._ended = True


CURRENT: Final[ContextVar[EpisodeLimit | None]] = ContextVar("episode_limit", default=None)


@asynccontextmanager
async def episode_limit(seconds: float) -> AsyncIterator[EpisodeLimit]:
    """Cancel the body with TimeoutError after `seconds`; tasks that it starts share the limit."""
    async with asyncio.timeout(seconds) as timeout:
        limit = EpisodeLimit(timeout)
        token = CURRENT.set(limit)
        try:
            yield limit
        finally:
            limit.end()
            CURRENT.reset(token)


@asynccontextmanager
async def stopped_time() -> AsyncIterator[None]:
    """Pause the limit of the current episode within the body; without one do nothing."""
    limit = CURRENT.get()
    if limit is None:
        yield
        return
    limit.stop()
    try:
        yield
    finally:
        limit.resume()
