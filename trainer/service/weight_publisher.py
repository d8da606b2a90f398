"""Publishes versions beside the training: while the next step runs, the one before is encoded and uploaded.

At most one publication is under way; who asks for the next waits for it. What it raises is raised there, so a trainer learns
one step later that it is not alone. Knows nothing of engines or batches.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from storage.coordination.heartbeats import Pulse
from storage.errors import ConflictError
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor, Manifest
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from storage.weights.compaction import Merging
from storage.weights.manifests import Held
from trainer.config import TrainConfig

log = logging.getLogger(__name__)

Insist = Callable[[str, Callable[[], Any]], Any]
"""`insist` of `patience.py`, bound to a service's pulse and stop."""


class Publication:
    """The weights stream of one policy."""

    def __init__(self, run: ObjectStore, policy: str, config: TrainConfig, pulse: Pulse, insist: Insist) -> None:
        self._run, self._policy, self._config = run, policy, config
        self._pulse, self._insist = pulse, insist
        self.held: Held | None = None
        """The newest version that is known to stand: what the next one may be a delta to. Without one that is an anchor."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"publish-{policy}")
        self._merging = Merging(run, config.publish_memory_mb * 2**20)
        self._under_way: Future[Held] | None = None
        self.seconds = 0.0
        """The last publication took, from its start to its manifest."""

    def start(self, version: int, tensors: Mapping[str, HostTensor], metrics: Mapping[str, float]) -> None:
        """Publish `version` in the background, after the one before is there: raises what `settle` raises."""
        self.settle()
        follows = self.held is not None and self.held.manifest.version == version - 1
        base = self.held if follows and self._config.anchor_every > 1 else None
        self._under_way = self._pool.submit(self._publish, version, tensors, base, metrics)

    def settle(self) -> None:
        """Wait until nothing is under way. Raises ConflictError when another trainer published the version with other weights;
        TransientError when the store is away and the service shall leave."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        with self._pulse.span("publish_wait"):
            self.held = under_way.result()

    def check(self) -> None:
        """Hear of a publication that has ended; raises what `settle` raises, and waits for nothing."""
        if self._under_way is not None and self._under_way.done():
            self.settle()

    def close(self) -> None:
        """Let what is under way end, and hear no more of it."""
        self._pool.shutdown(wait=True)
        self._merging.close()

    def _publish(
        self, version: int, tensors: Mapping[str, HostTensor], base: Held | None, metrics: Mapping[str, float]
    ) -> Held:
        start_s = time.monotonic()
        with self._pulse.span("publish"):
            try:
                manifest = self._insist(
                    f"publishing version {version}",
                    lambda: publisher.publish(
                        self._run,
                        self._policy,
                        version,
                        tensors,
                        base=base,
                        anchor=version % self._config.anchor_every == 0,
                        memory_bytes=self._config.publish_memory_mb * 2**20,
                        metrics=metrics,
                    ),
                )
            except ConflictError as error:
                manifest = self._own(version, weights_digest(tensors), error)
        self.seconds = time.monotonic() - start_s
        self._pulse.update(versions={self._policy: version})
        self._merging.after(self._policy, version)
        return Held(manifest, tensors)

    def _own(self, version: int, digest: str, error: ConflictError) -> Manifest:
        """A version that appeared meanwhile is this trainer's own write whose answer got lost, or a rival's."""
        manifest: Manifest = self._insist(
            "reading a manifest", lambda: manifests.read_manifest(self._run, self._policy, version)
        )
        if manifest.digest != digest:
            raise ConflictError(
                f"version {version} of {self._policy} was published by another trainer with other weights; "
                "two trainers of one policy are alive: stop one of them and start this one again"
            ) from error
        return manifest
