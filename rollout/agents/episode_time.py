"""The time limit of one episode, which stands still while something outside the episode is waited
for.

async with episode_limit(120.0) as limit:      # around the play
    async with stopped_time():                 # around a wait that is no fault of the episode, such as a queue
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final


class EpisodeLimit:
    """What is left of an episode's time."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._stops = 0
        self._left_s = 0.0
        self._ended = False

    @property
    def is_over(self) -> bool:
        """Whether the time ran out."""
        return self._timeout.expired()

    def stop(self) -> None:
        """Let no time pass until `go_on` was called as often as this."""
        self._stops += 1
        deadline_s = self._timeout.when()
        if self._stops == 1 and deadline_s is not None and not self._ended and not self.is_over:
            self._left_s = deadline_s - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def go_on(self) -> None:
        self._stops -= 1
        if (
            self._stops == 0
            and self._timeout.when() is None
            and not self._ended
            and not self.is_over
        ):
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)

    def end(self) -> None:
        """The episode is over; tasks that it left behind no longer have a limit."""
        self._ended = True


CURRENT: Final[ContextVar[EpisodeLimit | None]] = ContextVar("episode_limit", default=None)


@asynccontextmanager
async def episode_limit(seconds: float) -> AsyncIterator[EpisodeLimit]:
    """Cut the body with TimeoutError after so many seconds; the tasks that it starts share the
    limit.
    """
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
    """Let no time of the current episode pass meanwhile; without an episode it does nothing."""
    limit = CURRENT.get()
    if limit is None:
        yield
        return
    limit.stop()
    try:
        yield
    finally:
        limit.go_on()
