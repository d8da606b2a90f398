"""The trainer service of one policy: read batch n, take a step, publish version n, checkpoint.

    batches/{policy}/{n} ──▶ engine.step ──▶ weights/{policy}/{n} ──▶ checkpoints/{policy}/{n}
                                              (during step n + 1)

It exchanges data with other services only through the store, and does not depend on Prefect.
Published versions never change: a trainer that resumes from a checkpoint repeats the batches after
it and compares its weights with the published ones.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from storage import layout
from storage.coordination.gpus_of_service import gpus_of_service
from storage.coordination.lifetime import Lifetime, StoppedError
from storage.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    TransientError,
)
from storage.formats.json_objects import parse
from storage.formats.safetensors import is_finite, weights_digest
from storage.import_path import described, message
from storage.records.batches import Batch
from storage.records.control import ServiceState, WaitReason
from storage.records.numbers import QUANTITY_MAX
from storage.records.progress import TrainerProgress
from storage.records.weights import HostTensor
from storage.run import checkpoints
from storage.run.checkpoints import Checkpoint, CheckpointState
from storage.weights import manifests, reader
from storage.weights.manifests import LoadedWeights
from trainer.config import TrainConfig
from trainer.engines.engine import ReferenceEngine, TrainEngine, make_engine
from trainer.placement import rank_gpus
from trainer.service.batch_source import BatchSource
from trainer.service.mismatch_limits import Finding
from trainer.service.reference import read_reference
from trainer.service.rendezvous import StoreRendezvous, lead
from trainer.service.weight_publisher import WeightPublisher

log = logging.getLogger(__name__)

CALL_PATIENCE_S = 5.0
"""Timeout of a call on a failing store; the service then pauses, where it can be stopped."""
MODEL_CONFIG = "config.json"


def train(
    lifetime: Lifetime,
    policy: str,
    config: TrainConfig,
    steps: int,
    seed: int,
    *,
    batch_size: int,
    max_tokens: int,
) -> None:
    """Train `policy` until version `steps` and its checkpoint are stored, or it must stop.

    When it must stop, it finishes the current step, saves a checkpoint and returns. Waiting for
    version 0 and for batches has no time limit; an unreachable store only delays the service.

    Raises:
        CorruptError: a batch, version 0 or the checkpoint is damaged or does not fit the model, or
            a batch has not `batch_size` rows of at most `max_tokens` tokens.
        ConflictError: another trainer publishes the same policy.
        ConfigError: the model or the engine cannot be built, the version of `reference` does not
            exist, or the mismatch of sampler and trainer is above `mismatch.stop`.
    """
    try:
        with gpus_of_service(lifetime, rank_gpus(config), config.device_share) as are_held:
            if are_held:
                _Trainer(lifetime, policy, config, steps, batch_size, max_tokens).serve(seed)
    except StoppedError as error:
        note = (
            "stopped while the store was unreachable; a resumed trainer repeats the last step: "
            f"{error}"
        )
        lifetime.heartbeat.update(note=note)
        log.warning("trainer %s: %s", policy, note)


class _Trainer:
    def __init__(
        self,
        lifetime: Lifetime,
        policy: str,
        config: TrainConfig,
        steps: int,
        batch_size: int,
        max_tokens: int,
    ) -> None:
        self._lifetime = lifetime
        self._run = replace(lifetime.run, patience_s=CALL_PATIENCE_S)
        self._policy = policy
        self._config = config
        self._steps = steps
        self._heartbeat = lifetime.heartbeat
        self._engine: TrainEngine
        self._batches = BatchSource(
            lifetime, self._run, policy, batch_size, max_tokens, config.poll_interval_s
        )
        self._publication = WeightPublisher(lifetime, self._run, policy, config)
        self._step = 0
        """Version of the engine's weights."""
        self._published = 0
        """Newest version at the start of this trainer; up to it, weights are compared only."""
        self._checkpointed = 0
        self._damaged: set[int] = set()
        """Steps whose checkpoints were damaged when this trainer resumed."""
        self._tokens_trained = 0.0
        self._diverged = False
        self._mismatched = False
        """Whether the mismatch of the last measured step was above `mismatch.warn`."""
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
            batch = self._batches.after(self._step, self._published, self._publication.check)
            if batch is None:
                break
            self._advance(batch)
        if self._checkpointed < self._step:
            self._checkpoint()
        self._heartbeat.update(
            state=ServiceState.DRAINING,
            note=f"leaves with version {max(self._step, self._published)} published",
        )

    def _begin(self, seed: int) -> bool:
        """Start from the newest checkpoint or version 0; return False when it must stop."""
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
        model_config = parse(files[MODEL_CONFIG], f"{MODEL_CONFIG} of {self._policy}")
        nodes: StoreRendezvous | None = None
        if self._config.nodes > 1:
            if self._lifetime.retry(
                "looking for the last checkpoint",
                lambda: checkpoints.exists(self._run, self._policy, self._steps),
            ):
                return False  # the other nodes have left
            try:
                nodes = lead(self._lifetime, self._policy, self._config.nodes)
            except StoppedError:
                return False
        self._engine = make_engine(self._config, model_config, seed, nodes)
        newest = self._lifetime.retry(
            "reading the checkpoint", lambda: checkpoints.newest(self._run, self._policy)
        )
        if newest is None:
            base = self._lifetime.retry(
                "reading version 0", lambda: reader.read(self._run, self._policy, 0)
            )
            self._engine.set_weights(base.tensors)
            for name, tensor in self._engine.weights().items():
                if not is_finite(tensor):
                    raise CorruptError(
                        f"{name} of version 0 of {self._policy} has values that are not finite as "
                        f"{tensor.dtype}; start a new run from a base model without them"
                    )
            self._publication.base = base
        else:
            self._resume(newest)
        self._set_reference()
        latest = self._lifetime.retry(
            "looking for versions", lambda: manifests.latest(self._run, self._policy, self._step)
        )
        if latest is None:
            raise CorruptError(
                f"{layout.checkpoint(self._policy, self._step)} exists, but "
                f"{layout.weights(self._policy, self._step)} does not; restore it, or start a new "
                "run"
            )
        self._published = latest
        if newest is not None and latest == self._step:
            self._compare(self._engine.weights())
        self._heartbeat.update(versions={self._policy: latest})
        self._beat(
            "starts from "
            + ("version 0" if newest is None else f"the checkpoint of step {newest.step}")
        )
        self._version_at_s = time.monotonic()
        return True

    def _resume(self, checkpoint: Checkpoint) -> None:
        try:
            self._engine.load(checkpoint.tensors, checkpoint.state.engine)
        except (ConfigError, TransientError, MemoryError, OSError):
            raise
        except Exception as error:  # an engine may be foreign code; the message names the object
            why = message(error) if isinstance(error, CorruptError) else described(error)
            raise CorruptError(
                f"{layout.checkpoint(self._policy, checkpoint.step)} cannot be loaded: {why}; if "
                "it is damaged, delete it: the trainer then resumes from the one before, or from "
                "version 0"
            ) from error
        self._tokens_trained = checkpoint.state.tokens_trained
        self._damaged.update(checkpoint.damaged)
        self._step = self._checkpointed = checkpoint.step

    def _set_reference(self) -> None:
        """Give the engine the weights of `train.reference`, where the recipe has it."""
        kl = self._config.reference
        if kl is None:
            return
        tensors = self._lifetime.retry(
            "reading the reference",
            lambda: read_reference(self._run, self._policy, kl.version, self._publication.base),
        )
        assert isinstance(self._engine, ReferenceEngine), "make_engine checks the class"
        self._engine.set_reference(tensors)

    def _advance(self, batch: Batch) -> None:
        """Train version n−1 to version n and start its publication."""
        start_s = time.monotonic()
        with self._heartbeat.span("step"):
            metrics = self._engine.step(batch)
        step_s = time.monotonic() - start_s
        self._step = batch.step
        self._tokens_trained = min(self._tokens_trained + metrics["trainer/tokens"], QUANTITY_MAX)
        tokens_per_s = sum(len(row.tokens) for row in batch.rows) / max(step_s, 1e-9)
        publish_wait_s = self._settle()
        self._check_mismatch(metrics)
        wait_fraction = min(
            1.0, self._batches.wait_s / max(time.monotonic() - self._version_at_s, 1e-9)
        )
        metrics |= {
            "trainer/wait_s": self._batches.wait_s,
            "trainer/step_s": step_s,
            "trainer/publish_s": self._publication.seconds,
            "trainer/publish_wait_s": publish_wait_s,
            "trainer/tokens_per_s": tokens_per_s,
            "trainer/wait_fraction": wait_fraction,
        }
        self._publish(metrics)
        self._version_at_s = time.monotonic()
        self._beat(tokens_per_s=tokens_per_s, wait_fraction=wait_fraction, batch=batch)
        if self._step % self._config.checkpoint_every == 0:
            self._checkpoint()

    def _check_mismatch(self, metrics: Mapping[str, float]) -> None:
        """Warn once when the mismatch rises above `warn`; ConfigError when it is above `stop`.

        The step's version is not published then. A resumed trainer meets the same batch, and ends
        with the same error.
        """
        limits = self._config.mismatch
        finding = Finding.of(metrics)
        if finding is None:
            return
        if limits.stop is not None and finding.value > limits.stop:
            raise ConfigError(finding.error(self._policy, self._step, limits.stop))
        warns = limits.warn is not None and finding.value > limits.warn
        if limits.warn is not None and warns and not self._mismatched:
            note = finding.warning(self._policy, self._step, limits.warn)
            self._heartbeat.update(note=note)
            log.warning("%s", note)
        elif self._mismatched and not warns:
            self._heartbeat.update(note="")
        self._mismatched = warns

    def _publish(self, metrics: dict[str, float]) -> None:
        tensors = self._engine.weights()
        if self._step <= self._published:
            self._compare(tensors)
            return
        self._publication.start(self._step, tensors, metrics)

    def _settle(self) -> float:
        """Wait for the publication of the version before; return the seconds waited."""
        start_s = time.monotonic()
        self._publication.settle()
        return time.monotonic() - start_s

    def _compare(self, tensors: Mapping[str, HostTensor]) -> None:
        """Compare weights with the version published before this trainer resumed, which is kept."""
        published = self._publication.read_published(self._step)
        if published.digest == weights_digest(tensors):
            self._publication.base = LoadedWeights(published, tensors)
        elif not self._diverged:
            self._diverged = True
            note = (
                f"resuming from the checkpoint gave other bits at version {self._step} than were "
                f"published. The published versions up to {self._published} are kept; version "
                f"{self._published + 1} is the first from this trainer's weights. On one CPU "
                "thread this should not happen"
            )
            self._heartbeat.update(note=note)
            log.error("%s: %s", self._policy, note)

    def _checkpoint(self) -> None:
        step = self._step
        self._publication.settle()  # a trainer cannot resume from a checkpoint without its version
        with self._heartbeat.span("checkpoint"):
            tensors, engine_state = self._engine.save()
            state = CheckpointState(engine_state, self._tokens_trained)
            if step in self._damaged:
                log.warning("%s: the damaged checkpoint of step %d is replaced", self._policy, step)
                self._lifetime.retry(
                    "deleting a damaged checkpoint",
                    lambda: checkpoints.delete(self._run, self._policy, step),
                )
                self._damaged.remove(step)
            try:
                self._lifetime.retry(
                    f"saving the checkpoint of step {step}",
                    lambda: checkpoints.save(self._run, self._policy, step, tensors, state),
                )
            except ConflictError:
                log.warning("%s: step %d has a checkpoint already; it is kept", self._policy, step)
            self._checkpointed = step
            keep = self._config.checkpoints_keep
            self._lifetime.retry(
                "pruning checkpoints",
                lambda: checkpoints.prune(self._run, self._policy, keep, step, self._damaged),
            )

    def _beat(
        self,
        note: str | None = None,
        *,
        tokens_per_s: float = 0.0,
        wait_fraction: float = 0.0,
        batch: Batch | None = None,
    ) -> None:
        """Put the progress into the heartbeat; rates and batch are those of the last step."""
        metrics = batch.metrics if batch else {}
        self._heartbeat.update(
            state=ServiceState.WORKING,
            note=note,
            progress=TrainerProgress(
                step=self._step,
                tokens_trained=int(self._tokens_trained),
                tokens_per_s=tokens_per_s,
                wait_fraction=wait_fraction,
                reward_mean=metrics.get("dataflow/reward/mean"),
                staleness_mean=metrics.get("dataflow/staleness/mean"),
                staleness_max=metrics.get("dataflow/staleness/max"),
            ),
        )
