"""When a trainer leaves: it was asked to, or the run has ended. Knows nothing of training."""

import threading
import time

from storage.coordination.heartbeats import Pulse
from storage.run.runs import read_stop
from storage.store.object_store import ObjectStore
from trainer.service.patience import insist

LOOK_INTERVAL_S = 1.0
"""Least pause between two looks for the run's end."""


class Departure:
    def __init__(self, run: ObjectStore, pulse: Pulse, stop: threading.Event) -> None:
        self._run = run
        self._pulse = pulse
        self._stop = stop
        self._looked_s = float("-inf")

    def due(self) -> bool:
        """True from the moment it is time to leave; looks at the store at most once a second."""
        if self._stop.is_set():
            return True
        if time.monotonic() - self._looked_s < LOOK_INTERVAL_S:
            return False
        ended = insist("looking for the run's end", lambda: read_stop(self._run), self._pulse, self._stop)
        self._looked_s = time.monotonic()
        if ended:
            self._pulse.update(note=f"the run is {ended.state}: {ended.reason}")
        return ended is not None

    def due_within(self, pause_s: float) -> bool:
        """The same after a pause, which a request to leave cuts short."""
        return self.due() or self._stop.wait(pause_s)
