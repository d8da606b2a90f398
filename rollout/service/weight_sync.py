"""Keeps an engine at the newest weights of its policy, while it generates.

    look (a probe of the next version) ──▶ read, verified, in a thread ──▶ engine.load, between two decode steps

A task of the worker's event loop; the store's calls, deltas and digests run in threads, so
generation goes on meanwhile. The version that is held stays in host memory, so that only the
changes since need to be fetched. Versions in between are not loaded. Weights that cannot be read
are never served: the engine keeps what it has, and the failure is reported.
"""

import asyncio
import logging
import time

from rollout.engines.engine import Engine
from storage.coordination.heartbeats import HeartbeatWriter
from storage.coordination.lifetime import BACKOFF_MAX_S, backoff_s
from storage.errors import AstraFlowError, ConfigError, TransientError
from storage.records.control import WaitReason
from storage.store.object_store import ObjectStore
from storage.weights import manifests, reader
from storage.weights.manifests import LoadedWeights

log = logging.getLogger(__name__)

DAMAGED_BACKOFF_MAX_S = 60.0
"""Longest pause while the stored weights are damaged: each try fetches a whole model, and only a
person or the next anchor corrects it.
"""


class WeightSync:
    """One policy's refreshing."""

    def __init__(
        self,
        run: ObjectStore,
        policy: str,
        engine: Engine,
        interval_s: float,
        heartbeat: HeartbeatWriter,
        held: LoadedWeights | None = None,
        memory_bytes: int = manifests.MEMORY_BYTES,
    ) -> None:
        """`held` is what the engine has loaded, where that is still in host memory."""
        self._run = run
        self._policy = policy
        self._engine = engine
        self._interval_s = interval_s
        self._heartbeat = heartbeat
        self._held = held
        self._spare: LoadedWeights | None = None
        """The version before, whose memory the next one takes: engines keep none of what they are
        given.
        """
        self._memory_bytes = memory_bytes
        self.failures = 0
        """Since the worker was launched."""
        self.refresh_s: float | None = None
        """Duration of the last change of version; None before the first."""
        self._failures_in_a_row = 0
        self._damaged = False

    @property
    def policy(self) -> str:
        return self._policy

    @property
    def wait_reason(self) -> WaitReason:
        """Why the newest weights cannot be loaded; NONE while they can."""
        if not self._failures_in_a_row:
            return WaitReason.NONE
        return WaitReason.DAMAGED_OBJECT if self._damaged else WaitReason.STORE

    async def serve(self) -> None:
        """Refresh until cancelled: also while the worker drains, so that it plays with fresh
        weights to its end.
        """
        while True:
            await self.refresh()
            longest_s = DAMAGED_BACKOFF_MAX_S if self._damaged else BACKOFF_MAX_S
            pause_s = backoff_s(self._failures_in_a_row, longest_s=longest_s)
            await asyncio.sleep(max(self._interval_s, pause_s))

    async def refresh(self) -> bool:
        """Load the newest version if it is newer than the engine's; returns whether it did.

        A failing store and damaged weights are reported and tried again later. Raises ConfigError
        for weights that do not fit the model.
        """
        try:
            found = await asyncio.to_thread(
                manifests.newer, self._run, self._policy, self._engine.version
            )
            if found is None:
                self._failures_in_a_row = 0
                return False
            start_s = time.monotonic()
            with self._heartbeat.span("refresh"):
                newest = found.version
                read = await asyncio.to_thread(
                    reader.read,
                    self._run,
                    self._policy,
                    newest,
                    self._held,
                    manifest=found,
                    spare=self._spare,
                    memory_bytes=self._memory_bytes,
                )
                await self._engine.load(newest, read.tensors)
                self._held, self._spare = read, self._held
        except ConfigError:
            raise
        except AstraFlowError as error:
            self._report(error)
            return False
        self._failures_in_a_row = 0
        self.refresh_s = time.monotonic() - start_s
        self._heartbeat.update(versions={self._policy: newest})
        return True

    def _report(self, error: AstraFlowError) -> None:
        self.failures += 1
        self._damaged = not isinstance(error, TransientError)
        self._failures_in_a_row += 1
        log.warning("%s stays at version %d: %s", self._policy, self._engine.version, error)
        note = f"{self._policy} stays at version {self._engine.version}: {error}"
        self._heartbeat.update(note=note)
