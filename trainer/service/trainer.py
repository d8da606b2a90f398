"""The trainer of one policy: takes batch n, steps, publishes version n, checkpoints. Knows no
Prefect.

    batches/{policy}/{n} ──▶ engine.step ──▶ weights/{policy}/{n} ──▶ checkpoints/{policy}/{n}
                                              (during step n + 1)

It meets the others in the store alone. What is published stands for ever: a trainer that resumes
from its checkpoint trains through the batches it had already consumed, and compares what it gets
with what it had published.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from storage import layout
from storage.coordination.lifetime import Lifetime, StoppedError
from storage.errors import ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import parse
from storage.formats.safetensors import weights_digest
from storage.records.batches import Batch
from storage.records.control import ServiceState, WaitReason
from storage.records.progress import TrainerProgress
from storage.records.weights import HostTensor
from storage.run import batches, checkpoints
from storage.run.checkpoints import Checkpoint
from storage.weights import manifests, reader
from storage.weights.manifests import LoadedWeights
from trainer.config import TrainConfig
from trainer.engines.engine import TrainEngine, make_engine
from trainer.service.weight_publisher import WeightPublisher

log = logging.getLogger(__name__)

CALL_PATIENCE_S = 5.0
"""A call on a failing store gives up after this time; the service pauses then, and can be stopped.
"""
MODEL_CONFIG = "config.json"


def train(lifetime: Lifetime, policy: str, config: TrainConfig, steps: int, seed: int) -> None:
    """Train `policy` until version `steps` is published, or the service must stop.

    When it must stop, it finishes the step it is in, saves a checkpoint and returns. It waits for
    version 0 and for batches without a limit; a store that is away only delays it.

    Raises:
        CorruptError: a batch, version 0 or the checkpoint cannot be read or trained on.
        ConflictError: another trainer publishes the same policy.
        ConfigError: the model or the engine cannot be built.
    """
    try:
        _Trainer(lifetime, policy, config, steps).serve(seed)
    except StoppedError as error:
        note = f"stopped while the store was away; a resumed trainer redoes the last step: {error}"
        lifetime.heartbeat.update(note=note)
        log.warning("trainer %s: %s", policy, note)


class _Trainer:
    def __init__(self, lifetime: Lifetime, policy: str, config: TrainConfig, steps: int) -> None:
        self._lifetime = lifetime
        self._run = replace(lifetime.run, patience_s=CALL_PATIENCE_S)
        self._policy = policy
        self._config = config
        self._steps = steps
        self._heartbeat = lifetime.heartbeat
        self._engine: TrainEngine
        self._publication = WeightPublisher(lifetime, self._run, policy, config)
        self._step = 0
        """The version that the engine's weights are."""
        self._standing = 0
        """The newest version when this trainer began: up to it, what comes out is compared and not
        published.
        """
        self._checkpointed = 0
        self._tokens_trained = 0.0
        self._diverged = False
        self._wait_s = 0.0
        """Waited for the batch of the current step."""
        self._version_at_s = time.monotonic()

    def serve(self, seed: int) -> None:
        try:
            self._serve(seed)
        finally:
            self._publication.close()

    def _serve(self, seed: int) -> None:
        if not self._begin(seed):
            return
        while self._step < self._steps and not self._lifetime.should_stop():
            batch = self._next_batch()
            if batch is None:
                break
            self._advance(batch)
        if self._checkpointed < self._step:
            self._checkpoint()
        self._heartbeat.update(
            state=ServiceState.DRAINING,
            note=f"leaves with version {max(self._step, self._standing)} published",
        )

    def _begin(self, seed: int) -> bool:
        """Build the engine from version 0 or the newest checkpoint.

        Returns False when it must stop before version 0 exists.
        """
        while not self._lifetime.retry(
            "reading version 0", lambda: manifests.exists(self._run, self._policy, 0)
        ):
            self._heartbeat.update(
                state=ServiceState.WAITING,
                wait_reason=WaitReason.BASE_MODEL,
                note=f"waits for the base model of {self._policy}",
            )
            if self._lifetime.wait(self._config.poll_interval_s):
                return False
        self._heartbeat.update(state=ServiceState.STARTING, note="builds the engine")
        files = self._lifetime.retry(
            "reading the model's files", lambda: reader.fetch_files(self._run, self._policy)
        )
        if MODEL_CONFIG not in files:
            raise CorruptError(
                f"version 0 of {self._policy} has no {MODEL_CONFIG}; publish the base model with "
                "its files"
            )
        self._engine = make_engine(
            self._config, parse(files[MODEL_CONFIG], f"{MODEL_CONFIG} of {self._policy}"), seed
        )
        newest = self._lifetime.retry(
            "reading the checkpoint", lambda: checkpoints.newest(self._run, self._policy)
        )
        if newest is None:
            base = self._lifetime.retry(
                "reading version 0", lambda: reader.read(self._run, self._policy, 0)
            )
            self._engine.set_weights(base.tensors)
            self._publication.held = base
        else:
            self._resume(newest)
        standing = self._lifetime.retry(
            "looking for versions", lambda: manifests.latest(self._run, self._policy, self._step)
        )
        if standing is None:
            raise CorruptError(
                f"{layout.checkpoint(self._policy, self._step)} exists, but "
                f"{layout.weights(self._policy, self._step)} "
                "does not; restore it, or start a new run"
            )
        self._standing = standing
        if newest is not None and standing == self._step:
            self._compare(self._engine.weights())
        self._heartbeat.update(versions={self._policy: standing})
        self._report(
            "starts from "
            + ("version 0" if newest is None else f"the checkpoint of step {newest.step}")
        )
        self._version_at_s = time.monotonic()
        return True

    def _resume(self, checkpoint: Checkpoint) -> None:
        self._engine.load(checkpoint.tensors, checkpoint.state["engine"])
        self._tokens_trained = float(checkpoint.state["tokens_trained"])
        self._step = self._checkpointed = checkpoint.step

    def _next_batch(self) -> Batch | None:
        """Wait for the batch after the current step, and measure how long.

        Returns None when the trainer must stop.
        """
        step = self._step + 1
        start_s = time.monotonic()
        batch: Batch | None = None
        with self._heartbeat.span("wait"):
            while (
                batch := self._lifetime.retry("reading a batch", lambda: self._read_batch(step))
            ) is None:
                self._heartbeat.update(state=ServiceState.WAITING, wait_reason=WaitReason.BATCH)
                self._publication.check()  # the batch may need the very version whose publication failed
                if self._lifetime.wait(self._config.poll_interval_s):
                    break
        self._wait_s = time.monotonic() - start_s
        self._heartbeat.update(state=ServiceState.WORKING)
        return batch

    def _read_batch(self, step: int) -> Batch | None:
        try:
            return batches.read(self._run, self._policy, step)
        except NotFoundError:
            return None
        except CorruptError as error:
            raise CorruptError(
                f"the trainer of {self._policy} cannot go on: {layout.batch(self._policy, step)} "
                f"is damaged ({error}); "
                "restore the object, or start a new run"
            ) from error

    def _advance(self, batch: Batch) -> None:
        """From version n−1 to version n, published."""
        start_s = time.monotonic()
        with self._heartbeat.span("step"):
            metrics = self._engine.step(batch)
        step_s = time.monotonic() - start_s
        self._step = batch.step
        self._tokens_trained += metrics["trainer/tokens"]
        tokens_per_s = sum(len(row.tokens) for row in batch.rows) / max(step_s, 1e-9)
        publish_wait_s = self._settle()
        wait_fraction = min(1.0, self._wait_s / max(time.monotonic() - self._version_at_s, 1e-9))
        metrics |= {
            "trainer/wait_s": self._wait_s,
            "trainer/step_s": step_s,
            "trainer/publish_s": self._publication.seconds,
            "trainer/publish_wait_s": publish_wait_s,
            "trainer/tokens_per_s": tokens_per_s,
            "trainer/wait_fraction": wait_fraction,
        }
        self._publish(metrics)
        self._version_at_s = time.monotonic()
        self._report(tokens_per_s=tokens_per_s, wait_fraction=wait_fraction)
        if self._step % self._config.checkpoint_every == 0:
            self._checkpoint()

    def _publish(self, metrics: dict[str, float]) -> None:
        tensors = self._engine.weights()
        if self._step <= self._standing:
            self._compare(tensors)
            return
        self._publication.start(self._step, tensors, metrics)

    def _settle(self) -> float:
        """Waits for the publication of the version before; the seconds it took."""
        start_s = time.monotonic()
        self._publication.settle()
        return time.monotonic() - start_s

    def _compare(self, tensors: Mapping[str, HostTensor]) -> None:
        """A version published before this trainer resumed stands, whatever came out now."""
        standing = self._lifetime.retry(
            "reading a manifest",
            lambda: manifests.read_manifest(self._run, self._policy, self._step),
        )
        if standing.digest == weights_digest(tensors):
            self._publication.held = LoadedWeights(standing, tensors)
        elif not self._diverged:
            self._diverged = True
            note = (
                f"going on from the checkpoint gave other bits at version {self._step} than were "
                "published. "
                f"The published versions up to {self._standing} stand; version "
                f"{self._standing + 1} is the first "
                "from this trainer's weights. On one CPU thread this should not happen"
            )
            self._heartbeat.update(note=note)
            log.error("%s: %s", self._policy, note)

    def _checkpoint(self) -> None:
        step = self._step
        self._publication.settle()  # a checkpoint without its version could not be gone on from
        with self._heartbeat.span("checkpoint"):
            tensors, engine_state = self._engine.save()
            state = {"engine": engine_state, "tokens_trained": self._tokens_trained}
            try:
                self._lifetime.retry(
                    f"saving the checkpoint of step {step}",
                    lambda: checkpoints.save(self._run, self._policy, step, tensors, state),
                )
            except ConflictError:
                log.warning(
                    "%s: step %d has a checkpoint already, which stands", self._policy, step
                )
            self._checkpointed = step
            keep = self._config.checkpoints_keep
            self._lifetime.retry(
                "pruning checkpoints", lambda: checkpoints.prune(self._run, self._policy, keep)
            )

    def _report(
        self, note: str | None = None, *, tokens_per_s: float = 0.0, wait_fraction: float = 0.0
    ) -> None:
        """Put the progress into the heartbeat; the rates are those of the last step."""
        self._heartbeat.update(
            state=ServiceState.WORKING,
            note=note,
            progress=TrainerProgress(
                step=self._step,
                tokens_trained=int(self._tokens_trained),
                tokens_per_s=tokens_per_s,
                wait_fraction=wait_fraction,
            ),
        )
