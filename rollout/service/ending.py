"""Whether a worker shall leave: because it was told to (SIGTERM sets an event), or because nothing more of it is wanted (the
run was stopped, or the dataflow needs no further shard)."""

import asyncio
import logging
import threading
import time

from storage.errors import AstraFlowError
from storage.run import orders, runs
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
"""Pause between two questions to the store whether the run has ended."""


class Ending:
    """Used from one event loop; the event may be set from anywhere."""

    def __init__(self, run: ObjectStore, stop: threading.Event) -> None:
        self._run = run
        self._stop = stop
        self._looked_s = time.monotonic() - LOOK_INTERVAL_S
        self.run_over = False
        """The run has ended: nothing more of it is wanted."""

    @property
    def near(self) -> bool:
        return self.run_over or self._stop.is_set()

    async def within(self, pause_s: float) -> bool:
        """Whether the end is near, after a pause of `pause_s` in which it was not."""
        if not self.run_over and time.monotonic() - self._looked_s >= LOOK_INTERVAL_S:
            try:
                self.run_over = await asyncio.to_thread(_over, self._run)
            except AstraFlowError as error:
                log.warning("cannot tell whether the run has ended: %s", error)
            self._looked_s = time.monotonic()
        if not self.near:
            await asyncio.sleep(pause_s)
        return self.near


def _over(run: ObjectStore) -> bool:
    return runs.read_stop(run) is not None or orders.ended(run)
