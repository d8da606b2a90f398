"""The life cycle of a service: when it must stop, how it waits, and how it retries failing calls.

    lifetime = Lifetime(run, heartbeat, stop)
    while not lifetime.should_stop():
        batch = lifetime.retry("reading a batch", lambda: read(run))
        ...
        lifetime.wait(poll_interval_s)

A service must stop when `stop` is set (by SIGTERM, or because a newer attempt of the same service
is alive), or when the service is over: nothing more of it is needed, in most cases because the run
ended. A store that does not answer delays a service and never stops it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import tenacity

from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.system_threads import in_system_thread
from storage.errors import AstraFlowError, TransientError
from storage.records.control import WaitReason
from storage.run.runs import read_stop
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Least pause between two reads of whether the service is over; `stop` is checked in every call."""
CHECK_PATIENCE_S = 1.0
"""A read of whether the service is over gives up on a failing store after this time."""
SLEEP_MAX_S = 0.1
"""How long an event loop sleeps before it checks `stop` again."""
BACKOFF_S, BACKOFF_MAX_S = 0.5, 10.0
"""First and longest pause between two tries of a failing call; it doubles with each failure."""
SAME_FAILURES = 5
"""Equal failures in a row after which the message says what to do, should one object be the cause.
Each of them takes as long as the patience with the store.
"""

R = TypeVar("R")


class StoppedError(Exception):
    """The service must stop. Caught by the function that runs the service."""


def stop_reason(run: ObjectStore) -> str:
    """Return why the run ended; empty while it goes on."""
    stop = read_stop(run)
    return f"the run is {stop.state}: {stop.reason}" if stop else ""


def backoff_s(failures: int, first_s: float = BACKOFF_S, longest_s: float = BACKOFF_MAX_S) -> float:
    """Return the pause after consecutive failures: 0, `first_s`, then doubled up to `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, 32), longest_s) if failures else 0.0


class SameFailure:
    """Describes failures of the store; adds what a person can do when the same one goes on."""

    def __init__(self) -> None:
        self._last, self._count = "", 0

    def describe(self, error: TransientError) -> str:
        """Return the error's message, with the advice after SAME_FAILURES equal ones."""
        message = str(error)
        self._count = self._count + 1 if message == self._last else 1
        self._last = message
        if self._count < SAME_FAILURES:
            return message
        return (
            f"{message}; if this object alone fails, put a good copy of it back; an order or "
            "shard can also be deleted, and then counts as lost"
        )

    def clear(self) -> None:
        """Record that the store answered."""
        self._last, self._count = "", 0


class Lifetime:
    """The life cycle of one service. All methods may be called from any thread.

    The methods with the prefix `async_` are for an event loop: they read the store in a
    thread (`system_threads`).
    """

    def __init__(
        self,
        run: ObjectStore,
        heartbeat: HeartbeatWriter,
        stop: threading.Event,
        *,
        why_over: Callable[[ObjectStore], str] = stop_reason,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`why_over` reads why nothing more of the service is needed; empty while it is needed."""
        self.run, self.heartbeat, self.stop = run, heartbeat, stop
        self.over = ""
        """Why nothing more of the service is needed, as last read; empty while it is needed."""
        self._why_over, self._clock = why_over, clock
        self._lock = threading.Lock()
        self._check_at_s = clock()

    def is_over(self) -> bool:
        """Whether nothing more of the service is needed. Reads the store every CHECK_INTERVAL_S.

        A read that fails is logged and repeated after the next interval.
        """
        with self._lock:
            if self._is_check_due():
                try:
                    patience_s = min(self.run.patience_s, CHECK_PATIENCE_S)
                    self.over = self._why_over(replace(self.run, patience_s=patience_s))
                except AstraFlowError as error:
                    log.warning("cannot read whether the run is over: %s", error)
                self._check_at_s = self._clock() + CHECK_INTERVAL_S
                if self.over:
                    self.heartbeat.update(note=self.over)
        return bool(self.over)

    def should_stop(self) -> bool:
        """Whether the service must stop: its process was asked to, or it is over."""
        return self.stop.is_set() or self.is_over()

    def check(self) -> None:
        """Raise StoppedError, with the reason, when the service must stop."""
        if self.should_stop():
            raise StoppedError(self.over or "its process was asked to stop")

    def wait(self, seconds: float) -> bool:
        """Pause until `seconds` have passed or the service must stop; returns whether it must."""
        end_s = self._clock() + seconds
        while not self.should_stop():
            if (left_s := end_s - self._clock()) <= 0:
                return False
            self.stop.wait(min(left_s, CHECK_INTERVAL_S))
        return True

    def retry(self, what: str, call: Callable[[], R]) -> R:
        """Return the result of `call`, which is repeated as long as it raises TransientError.

        Args:
            what: names the call in the heartbeat and the log, such as "reading a batch".

        Raises:
            StoppedError: `stop` is set, and the call failed once more.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            wait=lambda state: backoff_s(state.attempt_number),
            stop=tenacity.stop_when_event_set(self.stop),
            sleep=tenacity.sleep_using_event(self.stop),
            before_sleep=lambda state: self._report(what, state),
            reraise=True,
        )
        try:
            result = retrying(call)
        except TransientError as error:
            raise StoppedError(f"{what} failed while the service must stop: {error}") from error
        if retrying.statistics["attempt_number"] > 1:
            self.heartbeat.update(note="", wait_reason=WaitReason.NONE)
        return result

    async def async_is_over(self) -> bool:
        """As `is_over`."""
        if self._is_check_due():
            await in_system_thread(self.is_over)
        return bool(self.over)

    async def async_should_stop(self) -> bool:
        """As `should_stop`."""
        return self.stop.is_set() or await self.async_is_over()

    async def async_wait(self, seconds: float) -> bool:
        """As `wait`; `stop` is noticed within SLEEP_MAX_S."""
        end_s = self._clock() + seconds
        while not await self.async_should_stop():
            if (left_s := end_s - self._clock()) <= 0:
                return False
            await asyncio.sleep(min(left_s, SLEEP_MAX_S))
        return True

    def _is_check_due(self) -> bool:
        return not self.over and self._clock() >= self._check_at_s

    def _report(self, what: str, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        note = f"{what} failed and is retried in {state.upcoming_sleep:g} s: {error}"
        self.heartbeat.update(note=note, wait_reason=WaitReason.STORE)
        log.warning("%s", note)
