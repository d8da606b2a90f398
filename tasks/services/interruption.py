"""How work that has no loop of its own (building a base model, one evaluation) hears that it is to leave: it calls `check`
wherever it reports progress, and is left by an exception when the time has come."""

import threading
import time
from collections.abc import Callable

from storage.errors import TransientError
from storage.run import runs
from storage.store.object_store import ObjectStore

LOOK_INTERVAL_S = 1.0
"""Pause between two looks for the run's stop; the event is looked at in every call."""


class LeftEarlyError(Exception):
    """The run was stopped, or the process was told to leave. Caught by whoever handed out the `Interruption`."""


class Interruption:
    """Of one member. Not for use from two threads at once."""

    def __init__(self, run: ObjectStore, stop: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._stop, self._clock = run, stop, clock
        self._next_look = clock()

    def check(self) -> None:
        """Returns at once while there is nothing to hear. Raises LeftEarlyError when `stop` is set or the run is over."""
        if self._stop.is_set():
            raise LeftEarlyError("told to leave")
        if self._clock() < self._next_look:
            return
        try:
            stopped = runs.read_stop(self._run)
        except TransientError:
            stopped = None  # a store that is away stops nobody
        self._next_look = self._clock() + LOOK_INTERVAL_S
        if stopped is not None:
            raise LeftEarlyError(f"the run is {stopped.state}")
