"""Publish versions in the background: a version is encoded and uploaded during the next step.

At most one publication runs; the start of the next one waits for it and raises its errors, so a
trainer detects a rival one step later.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from storage.coordination.lifetime import Lifetime
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats.safetensors import is_finite, weights_digest
from storage.records.weights import HostTensor, Manifest
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from storage.weights.compaction import BackgroundMerger
from storage.weights.manifests import LoadedWeights
from trainer.config import TrainConfig

log = logging.getLogger(__name__)


class WeightPublisher:
    """Publishes the versions of one policy, one after the other."""

    def __init__(
        self, lifetime: Lifetime, run: ObjectStore, policy: str, config: TrainConfig
    ) -> None:
        """`run` is the store of `lifetime` with the timeouts of a trainer."""
        self._lifetime, self._run, self._policy, self._config = lifetime, run, policy, config
        self.base: LoadedWeights | None = None
        """Newest published version, the base of the next delta; without one, that is an anchor."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"publish-{policy}")
        self._merger = BackgroundMerger(run, config.publish_memory_mb * 2**20)
        self._under_way: Future[LoadedWeights] | None = None
        self.seconds = 0.0
        """Duration of the last publication, from its start to its manifest."""

    def start(
        self, version: int, tensors: Mapping[str, HostTensor], metrics: Mapping[str, float]
    ) -> None:
        """Publish `version` in the background after `settle`, which may raise."""
        self.settle()
        follows = self.base is not None and self.base.manifest.version == version - 1
        base = self.base if follows and self._config.anchor_every > 1 else None
        self._under_way = self._pool.submit(self._publish, version, tensors, base, metrics)

    def settle(self) -> None:
        """Wait for the running publication.

        Raises:
            ConfigError: the weights have values that are not finite; the version is not published.
            ConflictError: another trainer published the version with other weights.
            StoppedError: the store is unreachable and the service must stop.
        """
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        with self._lifetime.heartbeat.span("publish_wait"):
            self.base = under_way.result()

    def check(self) -> None:
        """Raise what `settle` raises if the publication has ended; never waits."""
        if self._under_way is not None and self._under_way.done():
            self.settle()

    def close(self) -> None:
        """Wait for the running publication; its errors are ignored."""
        self._pool.shutdown(wait=True)
        self._merger.close()

    def read_published(self, version: int) -> Manifest:
        """Read the manifest of a version that was published; CorruptError, with what a person can
        do, where it is missing or damaged.
        """
        try:
            return self._lifetime.retry(
                "reading a manifest",
                lambda: manifests.read_manifest(self._run, self._policy, version),
            )
        except (NotFoundError, CorruptError) as error:
            put_back = "; put it back" if isinstance(error, NotFoundError) else ""
            raise CorruptError(
                f"version {version} of {self._policy} was published to {self._run.url}, but cannot "
                f"be read: {error}{put_back}, and start the run again, or start a new run from an "
                "earlier version"
            ) from error

    def _publish(
        self,
        version: int,
        tensors: Mapping[str, HostTensor],
        base: LoadedWeights | None,
        metrics: Mapping[str, float],
    ) -> LoadedWeights:
        start_s = time.monotonic()
        with self._lifetime.heartbeat.span("publish"):
            self._check_finite(version, tensors)
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
                        adapter=self._config.adapter.stored(),
                    ),
                )
            except ConflictError as error:
                manifest = self._existing(version, weights_digest(tensors), error)
        self.seconds = time.monotonic() - start_s
        self._lifetime.heartbeat.update(versions={self._policy: version})
        self._merger.merge_up_to(self._policy, version)
        return LoadedWeights(manifest, tensors)

    def _check_finite(self, version: int, tensors: Mapping[str, HostTensor]) -> None:
        train = f"policies.{self._policy}.train"
        for name, tensor in tensors.items():
            if not is_finite(tensor):
                raise ConfigError(
                    f"version {version} of {self._policy} is not published: its tensor {name} has "
                    f"values that are not finite as {tensor.dtype}. Start a new run with a smaller "
                    f"{train}.lr or a larger {train}.eps, which may continue from version "
                    f"{version - 1}: earlier versions are kept. If the moments in this run's "
                    "newest checkpoint are the cause, delete it: the trainer then resumes from "
                    "the one before"
                )

    def _existing(self, version: int, digest: str, error: ConflictError) -> Manifest:
        """Return the manifest of a version that exists already, if its weights have `digest`.

        It then is this trainer's own write whose response was lost, else another trainer's.
        """
        manifest = self.read_published(version)
        if manifest.digest != digest:
            raise ConflictError(
                f"version {version} of {self._policy} was published by another trainer with other "
                "weights; two trainers of one policy are alive: stop one of them and start this "
                "one again"
            ) from error
        return manifest
