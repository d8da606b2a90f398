"""Keep an engine at the newest weights of its policy while it generates.

    poll for the next version ──▶ read and verify, in a thread ──▶ engine.load, between two tokens

Runs in the worker's event loop; calls on the store, deltas and digests run in threads, so that
generation continues. The loaded version stays in host memory, so that only changes are transferred.
Intermediate versions are not loaded. Weights that cannot be read are never used: the engine keeps
its version, and the failure is reported.
"""

import asyncio
import logging
import time

from rollout.service.weight_loader import WeightLoader
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import BACKOFF_MAX_S, backoff_s
from storage.coordination.system_threads import in_system_thread
from storage.errors import AstraFlowError, ConfigError, CorruptError, TransientError
from storage.records.control import WaitReason
from storage.store.object_store import ObjectStore
from storage.weights import manifests, reader
from storage.weights.manifests import LoadedWeights

log = logging.getLogger(__name__)

DAMAGED_BACKOFF_MAX_S = 60.0
"""Longest pause while the stored weights are damaged: each attempt reads a whole model, and only a
person or the next anchor repairs it.
"""


class WeightSync:
    """Refresh of one policy's engine."""

    def __init__(
        self,
        run: ObjectStore,
        policy: str,
        loader: WeightLoader,
        interval_s: float,
        heartbeat: HeartbeatWriter,
        loaded: LoadedWeights | None = None,
        memory_bytes: int = manifests.MEMORY_BYTES,
    ) -> None:
        """`loaded` are the weights of the engine, if they are still in host memory."""
        self._run = run
        self._policy = policy
        self._loader = loader
        self._interval_s = interval_s
        self._heartbeat = heartbeat
        self._loaded = loaded
        self._spare: LoadedWeights | None = None
        """The previous version, whose memory the next one reuses: engines copy their weights."""
        self._memory_bytes = memory_bytes
        self.failures = 0
        """Since the worker was launched."""
        self.refresh_s: float | None = None
        """Duration of the last change of version; None before the first."""
        self._consecutive_failures = 0
        self._damaged = False
        self._misfit: int | None = None
        """The version since the loaded one that did not fit the model."""

    @property
    def policy(self) -> str:
        return self._policy

    @property
    def wait_reason(self) -> WaitReason:
        """Why the newest weights cannot be loaded; NONE while they can."""
        if not self._consecutive_failures:
            return WaitReason.NONE
        return WaitReason.DAMAGED_OBJECT if self._damaged else WaitReason.STORE

    async def serve(self) -> None:
        """Refresh until cancelled, also while the worker drains."""
        while True:
            await self.refresh()
            longest_s = DAMAGED_BACKOFF_MAX_S if self._damaged else BACKOFF_MAX_S
            pause_s = backoff_s(self._consecutive_failures, longest_s=longest_s)
            await asyncio.sleep(max(self._interval_s, pause_s))

    async def refresh(self) -> bool:
        """Load the newest version if it is newer than the engine's; return whether it was.

        A failing store and damaged weights are reported and retried later, and so is one version
        that does not fit the model: no trainer publishes weights of another form.

        Raises:
            ConfigError: a second version does not fit the model, either.
        """
        try:
            newer = await in_system_thread(
                manifests.newer, self._run, self._policy, self._loader.engine.version
            )
            if newer is None:
                self._consecutive_failures = 0
                return False
            start_s = time.monotonic()
            with self._heartbeat.span("refresh"):
                newest = newer.version
                weights = await in_system_thread(
                    reader.read,
                    self._run,
                    self._policy,
                    newest,
                    self._loaded,
                    manifest=newer,
                    spare=self._spare,
                    memory_bytes=self._memory_bytes,
                )
                await self._load(weights)
                self._loaded, self._spare = weights, self._loaded
        except ConfigError:
            raise
        except AstraFlowError as error:
            self._report(error)
            return False
        self._consecutive_failures, self._misfit = 0, None
        self.refresh_s = time.monotonic() - start_s
        self._heartbeat.update(versions={self._policy: newest})
        return True

    async def _load(self, weights: LoadedWeights) -> None:
        """Load a version into the engine; CorruptError for the first one that does not fit,
        where another one is loaded.
        """
        version = weights.manifest.version
        try:
            await self._loader.load(weights)
        except ConfigError as error:
            has_none = self._loader.engine.version < 0  # its start may have failed
            if has_none or self._misfit not in (None, version):
                raise
            self._misfit = version
            raise CorruptError(f"version {version} does not fit the model: {error}") from error

    def _report(self, error: AstraFlowError) -> None:
        self.failures += 1
        self._damaged = not isinstance(error, TransientError)
        self._consecutive_failures += 1
        log.warning("%s stays at version %d: %s", self._policy, self._loader.engine.version, error)
        note = f"{self._policy} stays at version {self._loader.engine.version}: {error}"
        self._heartbeat.update(note=note)
