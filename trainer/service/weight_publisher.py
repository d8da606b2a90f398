"""Publish versions beside the training: while the next step runs, the version before is encoded and
uploaded.

At most one publication is under way; the start of the next one waits for it. Its errors are raised
there, so a trainer notices a rival one step later. Knows nothing of engines or batches.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from storage.coordination.lifetime import Lifetime
from storage.errors import ConflictError
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor, Manifest
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from storage.weights.compaction import BackgroundMerger
from storage.weights.manifests import LoadedWeights
from trainer.config import TrainConfig

log = logging.getLogger(__name__)


class WeightPublisher:
    """The weights stream of one policy."""

    def __init__(
        self, lifetime: Lifetime, run: ObjectStore, policy: str, config: TrainConfig
    ) -> None:
        """`run` is the store of `lifetime`, with its own patience."""
        self._lifetime, self._run, self._policy, self._config = lifetime, run, policy, config
        self.held: LoadedWeights | None = None
        """The newest version that is known to stand: what the next one may be a delta to. Without
        one that is an anchor.
        """
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"publish-{policy}")
        self._merger = BackgroundMerger(run, config.publish_memory_mb * 2**20)
        self._under_way: Future[LoadedWeights] | None = None
        self.seconds = 0.0
        """The last publication took, from its start to its manifest."""

    def start(
        self, version: int, tensors: Mapping[str, HostTensor], metrics: Mapping[str, float]
    ) -> None:
        """Publish `version` in the background, after the one before is there: raises what `settle`
        raises.
        """
        self.settle()
        follows = self.held is not None and self.held.manifest.version == version - 1
        base = self.held if follows and self._config.anchor_every > 1 else None
        self._under_way = self._pool.submit(self._publish, version, tensors, base, metrics)

    def settle(self) -> None:
        """Wait until nothing is under way. Raises ConflictError when another trainer published the
        version with other weights; StoppedError when the store is away and the service must stop.
        """
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        with self._lifetime.heartbeat.span("publish_wait"):
            self.held = under_way.result()

    def check(self) -> None:
        """Raise what `settle` raises if the publication has ended; never waits."""
        if self._under_way is not None and self._under_way.done():
            self.settle()

    def close(self) -> None:
        """Wait until nothing is under way; its errors are ignored."""
        self._pool.shutdown(wait=True)
        self._merger.close()

    def _publish(
        self,
        version: int,
        tensors: Mapping[str, HostTensor],
        base: LoadedWeights | None,
        metrics: Mapping[str, float],
    ) -> LoadedWeights:
        start_s = time.monotonic()
        with self._lifetime.heartbeat.span("publish"):
            try:
                manifest = self._lifetime.retry(
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
        self._lifetime.heartbeat.update(versions={self._policy: version})
        self._merger.merge_up_to(self._policy, version)
        return LoadedWeights(manifest, tensors)

    def _own(self, version: int, digest: str, error: ConflictError) -> Manifest:
        """A version that appeared meanwhile is this trainer's own write whose answer got lost, or a
        rival's.
        """
        manifest = self._lifetime.retry(
            "reading a manifest", lambda: manifests.read_manifest(self._run, self._policy, version)
        )
        if manifest.digest != digest:
            raise ConflictError(
                f"version {version} of {self._policy} was published by another trainer with other "
                "weights; "
                "two trainers of one policy are alive: stop one of them and start this one again"
            ) from error
        return manifest
