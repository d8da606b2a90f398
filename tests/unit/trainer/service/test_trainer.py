"""The trainer service with an engine that counts: its one weight after batch n is n (or n + 100
after it drifted).
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import Lifetime
from storage.errors import ConfigError, ConflictError, CorruptError, TransientError
from storage.formats.safetensors import weights_digest
from storage.records.batches import Batch, BatchRow, SequenceKey
from storage.records.control import Stop, WaitReason
from storage.records.numbers import QUANTITY_MAX
from storage.records.progress import TrainerProgress
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import batches, checkpoints
from storage.run.checkpoints import CheckpointState
from storage.run.runs import request_stop
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore
from storage.weights import compaction, manifests, publisher, reader
from tests.support.models.trainer_cases import MODEL_CONFIG, base_weights
from tests.support.patience import PATIENCE_S
from tests.support.runs.adapter_versions import LORA, drawn
from tests.support.runs.builders import batch, row
from tests.support.runs.busy_gpus import busy_gpu
from tests.support.runs.lifetimes import (
    ScriptedLifetime,
    heartbeat_writer_of,
    lifetime_of,
    progress_of,
)
from tests.support.stores.resealed import resealed
from trainer.adapters import Lora
from trainer.config import TrainConfig
from trainer.engines.engine import SERVICE_METRICS, make_engine
from trainer.service import batch_source, trainer
from trainer.service.batch_source import LOST_INTERVAL_S
from trainer.service.trainer import train

POLICY = "solver"
CONFIG = TrainConfig(
    engine="tests.unit.trainer.service.test_trainer:CountingEngine",
    checkpoint_every=2,
    checkpoints_keep=2,
    poll_interval_s=0.01,
)
DRIFTING = CONFIG.model_copy(
    update={"engine": "tests.unit.trainer.service.test_trainer:DriftingEngine"}
)

FOREIGN = CONFIG.model_copy(
    update={"engine": "tests.unit.trainer.service.test_trainer:ForeignEngine"}
)


class CountingEngine:
    drift = 0

    def __init__(self, config: TrainConfig, model_config: Json, seed: int) -> None:
        self.value = -1
        self.before_step: Callable[[Batch], None] = BEFORE_STEP.get(seed, lambda batch: None)

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        self.value = int(tensors["weight"].bits[0])

    def step(self, batch: Batch) -> dict[str, float]:
        self.before_step(batch)
        self.value = self.drift + batch.step
        return {"trainer/tokens": 3.0, "trainer/loss": 0.5}

    def weights(self) -> dict[str, HostTensor]:
        return weight_of(self.value)

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        return {"master": HostTensor("I64", (1,), np.array([self.value], dtype=np.int64))}, {
            "value": self.value
        }

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        assert int(tensors["master"].bits[0]) == state["value"]
        self.value = state["value"]


class DriftingEngine(CountingEngine):
    drift = 100


class WideEngine(CountingEngine):
    """An engine with a large weight that changes little, so that a delta is smaller than the whole."""

    def weights(self) -> dict[str, HostTensor]:
        return wide_weight_of(self.value)

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        self.value = int(tensors["weight"].bits[-1])


class OverflowingEngine(WideEngine):
    """An engine one of whose weights is infinite from the second step on."""

    def weights(self) -> dict[str, HostTensor]:
        tensors = super().weights()
        tensors["weight"].bits[0] = 0x7F80 if self.value > 1 else 0
        return tensors


BEFORE_STEP: dict[int, Callable[[Batch], None]] = {}
"""Called by the engine before each step, by its seed: the hook of a test into a running trainer."""


class UnreachableBackend:
    """A store that is unreachable while `away` is set; `refusals_max` calls clear it."""

    def __init__(self, backend: Backend, refusals_max: int | None = None) -> None:
        self.backend = backend
        self.away = threading.Event()
        self.refusals, self.refusals_max = 0, refusals_max

    def __getattr__(self, verb: str) -> Callable[..., object]:
        if self.away.is_set():
            self.refusals += 1
            if self.refusals_max and self.refusals % self.refusals_max == 0:
                self.away.clear()
            raise TransientError("the store is away")
        method: Callable[..., object] = getattr(self.backend, verb)
        return method


def weight_of(value: int) -> dict[str, HostTensor]:
    return {"weight": HostTensor("U8", (1,), np.array([value], dtype=np.uint8))}


def wide_weight_of(value: int) -> dict[str, HostTensor]:
    bits = np.random.default_rng(0).integers(0, 0x7F80, 4096).astype(np.uint16)
    bits[-1] = value
    return {"weight": HostTensor("BF16", (4096,), bits)}


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    publisher.publish(
        memory_store,
        POLICY,
        0,
        weight_of(0),
        extra_files={"config.json": b'{"model_type": "counting"}'},
    )
    return memory_store


def add_batches(run: ObjectStore, *steps: int) -> None:
    for step in steps:
        batches.create(run, batch(policy=POLICY, step=step))


def rows_of(number: int) -> list[BatchRow]:
    return [row(SequenceKey(0, 0, episode, 0)) for episode in range(number)]


def trained(
    run: ObjectStore,
    steps: int,
    config: TrainConfig = CONFIG,
    stop: threading.Event | None = None,
    seed: int = 0,
    batch_size: int = 1,
) -> HeartbeatWriter:
    lifetime = lifetime_of(run, "trainer", stop)
    train(lifetime, POLICY, config, steps, seed, batch_size=batch_size, max_tokens=512)
    return lifetime.heartbeat


def published(run: ObjectStore) -> list[int]:
    """The weight of every version."""
    newest = manifests.latest(run, POLICY)
    assert newest is not None
    return [
        int(reader.fetch(run, POLICY, version)["weight"].bits[0]) for version in range(newest + 1)
    ]


def checkpoint_steps(run: ObjectStore) -> list[int]:
    keys = [key for key in run.list(f"checkpoints/{POLICY}") if key.endswith("manifest.json")]
    return sorted(int(key.split("/")[2]) for key in keys)


def test_the_heartbeat_has_reward_and_staleness_of_the_last_steps_batch(run: ObjectStore) -> None:
    add_batches(run, 1)
    metrics = {
        "dataflow/reward/mean": -0.5,
        "dataflow/staleness/mean": 1.5,
        "dataflow/staleness/max": 3.0,
    }
    batches.create(run, batch(policy=POLICY, step=2, metrics=metrics))
    progress = progress_of(trained(run, steps=2).last, TrainerProgress)
    assert (progress.reward_mean, progress.staleness_mean, progress.staleness_max) == (
        -0.5,
        1.5,
        3.0,
    )


def test_each_batch_becomes_the_version_of_its_number(run: ObjectStore) -> None:
    add_batches(run, 1, 2, 3)
    heartbeat_writer = trained(run, steps=3)
    assert published(run) == [0, 1, 2, 3]
    manifest = manifests.read_manifest(run, POLICY, 3)
    assert (manifest.parent, manifest.batch, manifest.kind) == (2, 3, "anchor")
    progress = progress_of(heartbeat_writer.last, TrainerProgress)
    assert (progress.step, progress.tokens_trained) == (3, 9)
    assert heartbeat_writer.last.versions == {POLICY: 3}
    assert heartbeat_writer.last.seconds.keys() == {
        "wait",
        "step",
        "publish",
        "publish_wait",
        "checkpoint",
    }


def test_a_manifest_has_the_metrics_and_the_times_of_its_step(run: ObjectStore) -> None:
    add_batches(run, 1)
    trained(run, steps=1)
    metrics = manifests.read_manifest(run, POLICY, 1).metrics
    assert metrics["trainer/loss"] == 0.5
    assert metrics.keys() >= {
        "trainer/wait_s",
        "trainer/step_s",
        "trainer/publish_s",
        "trainer/publish_wait_s",
        "trainer/tokens_per_s",
        "trainer/wait_fraction",
    }
    assert 0.0 <= metrics["trainer/wait_fraction"] <= 1.0
    assert metrics["trainer/tokens_per_s"] == pytest.approx(5 / metrics["trainer/step_s"])


class Clock:
    """Replaces the module `time` of the service: only a test advances the time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class LateBatch:
    """A store in which the first search for batch 2 takes five seconds."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self.backend, self.clock, self.late = backend, clock, True

    def read(self, key: str) -> bytes:
        if self.late and key.endswith("batches/solver/00000002.arrow"):
            self.late = False
            self.clock.now_s += 5.0
        return self.backend.read(key)

    def __getattr__(self, verb: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self.backend, verb)
        return method


def test_times_cover_waiting_and_the_step(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(batch_source, "time", clock)
    add_batches(run, 1, 2)

    def takes_two_seconds(given: Batch) -> None:
        clock.now_s += 2.0

    BEFORE_STEP[13] = takes_two_seconds
    trained(replace(run, backend=LateBatch(run.backend, clock)), steps=2, seed=13)  # type: ignore[arg-type]  # a stand-in
    metrics = manifests.read_manifest(run, POLICY, 2).metrics
    assert metrics["trainer/wait_s"] == 5.0
    assert metrics["trainer/step_s"] == 2.0
    assert metrics["trainer/publish_wait_s"] == 0.0
    assert metrics["trainer/wait_fraction"] == pytest.approx(5 / 7)
    assert metrics["trainer/tokens_per_s"] == 5 / 2
    assert manifests.read_manifest(run, POLICY, 1).metrics["trainer/wait_s"] == 0.0


def test_a_trainer_stopped_while_it_repeats_batches_reports_the_newest_version(
    run: ObjectStore,
) -> None:
    add_batches(run, 1, 2, 3)
    for version in (1, 2, 3):
        publisher.publish(run, POLICY, version, weight_of(version))
    stop = threading.Event()
    BEFORE_STEP[14] = lambda given: stop.set()
    heartbeat_writer = trained(run, steps=3, stop=stop, seed=14)
    assert checkpoint_steps(run) == [1]
    assert heartbeat_writer.last.note == "leaves with version 3 published"
    assert heartbeat_writer.last.versions == {POLICY: 3}


def test_checkpoints_are_saved_at_their_interval_and_at_the_last_step_and_old_ones_deleted(
    run: ObjectStore,
) -> None:
    add_batches(run, 1, 2, 3, 4, 5)
    trained(run, steps=5)
    assert checkpoint_steps(run) == [4, 5]
    tensors, state = checkpoints.load(run, POLICY, 4)
    assert state == CheckpointState({"value": 4}, 12.0)
    assert tensors["master"].bits.tolist() == [4]


def test_a_last_step_with_a_checkpoint_gets_no_second_one(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    save = checkpoints.save

    def recorded(run: ObjectStore, policy: str, step: int, *contents: Any) -> None:
        saved.append(step)
        save(run, policy, step, *contents)

    monkeypatch.setattr(checkpoints, "save", recorded)
    add_batches(run, 1, 2, 3, 4)
    trained(run, steps=4)
    assert saved == [2, 4]


def test_a_trainer_without_its_gpu_trains_nothing_and_can_be_stopped(
    run: ObjectStore, tmp_path: Path
) -> None:
    add_batches(run, 1)

    def on_wait(_seconds: float) -> bool:
        return lifetime.heartbeat.last.wait_reason is WaitReason.GPU

    lifetime = ScriptedLifetime(run, "trainer", on_wait)
    with busy_gpu(tmp_path):
        train(
            lifetime,
            POLICY,
            CONFIG.model_copy(update={"device": "cuda"}),
            1,
            0,
            batch_size=1,
            max_tokens=512,
        )
    assert published(run) == [0]


def test_a_trainer_waits_for_version_0_and_for_batches(memory_store: ObjectStore) -> None:
    lifetime = lifetime_of(memory_store, "trainer")
    trainer = threading.Thread(
        target=train,
        args=(lifetime, POLICY, CONFIG, 2, 0),
        kwargs={"batch_size": 1, "max_tokens": 512},
    )
    trainer.start()
    while lifetime.heartbeat.last.state != "waiting":
        time.sleep(0.01)
    assert lifetime.heartbeat.last.note == f"waits for the base model of {POLICY}"
    publisher.publish(memory_store, POLICY, 0, weight_of(0), extra_files={"config.json": b"{}"})
    add_batches(memory_store, 1)
    add_batches(memory_store, 2)
    trainer.join(PATIENCE_S)
    assert not trainer.is_alive()
    assert published(memory_store) == [0, 1, 2]


@pytest.mark.parametrize(
    ("num_published", "batches_there", "why"),
    [
        (3, [1, 2], "version 3 was made of it"),
        (0, [1, 2, 4], "batch 4 exists"),
    ],
)
def test_a_trainer_names_the_lost_batch_that_it_waits_for(
    run: ObjectStore,
    num_published: int,
    batches_there: list[int],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(batch_source, "time", clock)
    add_batches(run, *batches_there)
    for version in range(1, num_published + 1):
        publisher.publish(run, POLICY, version, weight_of(version))
    waited: list[tuple[str, str, str]] = []

    def put_back(seconds: float) -> None:
        last = lifetime.heartbeat.last
        waited.append((last.state, last.wait_reason, last.note))
        clock.now_s += LOST_INTERVAL_S
        if last.wait_reason == "damaged_object":
            add_batches(run, 3)

    notes: dict[int, str] = {}
    BEFORE_STEP[15] = lambda given: notes.update({given.step: lifetime.heartbeat.last.note})
    lifetime = ScriptedLifetime(run, "trainer", put_back)
    train(lifetime, POLICY, CONFIG, 3, 15, batch_size=1, max_tokens=512)
    lost = f"batches/solver/00000003.arrow is lost, {why}: put a good copy back"
    assert waited == [
        ("waiting", "batch", "starts from version 0"),
        ("waiting", "damaged_object", lost),
    ]
    assert notes == {1: "starts from version 0", 2: "starts from version 0", 3: ""}
    assert published(run) == [0, 1, 2, 3]


class CountingBackend:
    """A backend that records the calls on batches."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.calls: list[str] = []

    def __getattr__(self, verb: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self.backend, verb)

        def call(key: str, *arguments: object) -> object:
            if "batches/" in key:
                self.calls.append(f"{verb} {key[-10:-6]}")
            return method(key, *arguments)

        return call


def test_a_waiting_trainer_looks_for_a_lost_batch_at_intervals(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(batch_source, "time", clock)
    backend = CountingBackend(run.backend)

    def a_quarter_of_the_interval(seconds: float) -> bool:
        clock.now_s += LOST_INTERVAL_S / 4
        return len(lifetime.waits_s) == 10

    counted = replace(run, backend=backend)  # type: ignore[arg-type]  # delegates the rest
    lifetime = ScriptedLifetime(counted, "trainer", a_quarter_of_the_interval)
    train(lifetime, POLICY, CONFIG, 1, 0, batch_size=1, max_tokens=512)
    few = ["read 0001"] * 4
    assert backend.calls == [*few, "read 0001", "exists 0002", *few, "exists 0002", "read 0001"]


def test_a_trainer_waits_silently_for_a_batch_that_was_not_made_yet(run: ObjectStore) -> None:
    add_batches(run, 1)
    waited: list[tuple[str, str]] = []

    def make_batch(seconds: float) -> None:
        waited.append((lifetime.heartbeat.last.wait_reason, lifetime.heartbeat.last.note))
        add_batches(run, 2)

    lifetime = ScriptedLifetime(run, "trainer", make_batch)
    train(lifetime, POLICY, CONFIG, 2, 0, batch_size=1, max_tokens=512)
    assert waited == [("batch", "starts from version 0")]
    assert published(run) == [0, 1, 2]


def test_a_restarted_finished_trainer_does_nothing(
    run: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    add_batches(run, 1)
    trained(run, steps=1)
    before = run.list()
    trained(run, steps=1)
    assert run.list() == before
    assert caplog.messages == []  # no checkpoint was saved again, either


class SlowVersions:
    """A store with slow writes of versions, which records the order in which objects are created."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.created: list[str] = []

    def create(self, key: str, body: bytes) -> bool:
        if "weights/" in key:
            time.sleep(0.1)
        done = self.backend.create(key, body)
        self.created.append(key)
        return done

    def __getattr__(self, verb: str) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self.backend, verb)
        return method


def test_a_checkpoint_is_written_after_its_version(run: ObjectStore) -> None:
    add_batches(run, 1, 2)
    slow = SlowVersions(run.backend)
    trained(replace(run, backend=slow), steps=2)  # type: ignore[arg-type]  # a stand-in
    version = next(
        place
        for place, key in enumerate(slow.created)
        if key.endswith("weights/solver/00000002/manifest.json")
    )
    assert all(place > version for place, key in enumerate(slow.created) if "checkpoints/" in key)
    assert any("checkpoints/" in key for key in slow.created)


def test_a_resumed_trainer_continues_from_its_checkpoint_with_its_counters(
    run: ObjectStore,
) -> None:
    add_batches(run, 1, 2, 3)
    trained(run, steps=3)
    add_batches(run, 4)
    heartbeat_writer = trained(run, steps=4)
    assert published(run) == [0, 1, 2, 3, 4]
    assert progress_of(heartbeat_writer.last, TrainerProgress).tokens_trained == 12


def test_a_trainer_with_the_largest_count_of_tokens_writes_checkpoints_that_are_read(
    run: ObjectStore,
) -> None:
    def change(manifest: Json) -> None:
        manifest["state"]["tokens_trained"] = QUANTITY_MAX

    add_batches(run, 1, 2, 3)
    trained(run, steps=3)
    key = layout.manifest(layout.checkpoint(POLICY, 3))
    run.put(key, resealed(run.get(key), change))
    add_batches(run, 4)
    trained(run, steps=4)
    newest = checkpoints.newest(run, POLICY)
    assert newest is not None
    assert (newest.step, newest.state.tokens_trained) == (4, QUANTITY_MAX)


def test_a_resumed_trainer_keeps_the_good_checkpoint_and_replaces_the_damaged_one(
    run: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    add_batches(run, 1, 2, 3, 4)
    trained(run, steps=4, config=CONFIG.model_copy(update={"checkpoint_every": 3}))
    assert checkpoint_steps(run) == [3, 4]
    (data,) = [key for key in run.list("checkpoints/solver/00000004") if "model-00000" in key]
    body = bytearray(run.get(data))
    body[-1] ^= 1
    run.put(data, bytes(body))
    add_batches(run, 5)
    newest_before: dict[int, int] = {}

    def look(given: Batch) -> None:
        newest = checkpoints.newest(run, POLICY)
        assert newest is not None
        newest_before[given.step] = newest.step

    BEFORE_STEP[16] = look
    each = CONFIG.model_copy(update={"checkpoint_every": 1, "checkpoints_keep": 1})
    trained(run, steps=5, config=each, seed=16)
    assert newest_before == {4: 3, 5: 4}
    assert checkpoints.load(run, POLICY, 5)[1] == CheckpointState({"value": 5}, 15.0)
    assert "solver: the damaged checkpoint of step 4 is replaced" in caplog.messages
    assert checkpoint_steps(run) == [5]


def test_a_resumed_trainer_prunes_nothing_because_of_a_damaged_later_checkpoint(
    run: ObjectStore,
) -> None:
    add_batches(run, 1, 2, 3, 4)
    trained(run, steps=4, config=CONFIG.model_copy(update={"checkpoints_keep": 3}))
    assert checkpoint_steps(run) == [2, 4]
    (data,) = [key for key in run.list("checkpoints/solver/00000004") if "model-00000" in key]
    run.put(data, b"torn")
    each = CONFIG.model_copy(update={"checkpoint_every": 1, "checkpoints_keep": 2})
    stop = threading.Event()
    BEFORE_STEP[17] = lambda given: stop.set()
    trained(run, steps=4, config=each, stop=stop, seed=17)
    assert checkpoint_steps(run) == [2, 3, 4]
    newest = checkpoints.newest(run, POLICY)
    assert newest is not None
    assert (newest.step, newest.damaged) == (3, {4})


def test_versions_published_after_the_checkpoint_are_trained_again_and_kept(
    run: ObjectStore,
) -> None:
    add_batches(run, 1, 2, 3, 4)
    for version in (1, 2, 3):
        publisher.publish(run, POLICY, version, weight_of(version))
    write_ids = [manifests.read_manifest(run, POLICY, version).write_id for version in (1, 2, 3)]
    trained(run, steps=4)
    assert published(run) == [0, 1, 2, 3, 4]
    assert [
        manifests.read_manifest(run, POLICY, version).write_id for version in (1, 2, 3)
    ] == write_ids


def test_after_training_again_to_the_same_bits_the_next_version_is_a_delta(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(
        memory_store, POLICY, 0, wide_weight_of(0), extra_files={"config.json": b"{}"}
    )
    add_batches(memory_store, 1, 2, 3)
    for version in (1, 2):  # published before the trainer was killed, without a checkpoint
        publisher.publish(memory_store, POLICY, version, wide_weight_of(version))
    wide = CONFIG.model_copy(
        update={"engine": "tests.unit.trainer.service.test_trainer:WideEngine"}
    )
    trained(memory_store, steps=3, config=wide)
    assert manifests.read_manifest(memory_store, POLICY, 3).kind == "delta"
    assert int(reader.fetch(memory_store, POLICY, 3)["weight"].bits[-1]) == 3


def test_after_a_resume_from_the_newest_versions_checkpoint_the_next_version_is_a_delta(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(
        memory_store, POLICY, 0, wide_weight_of(0), extra_files={"config.json": b"{}"}
    )
    add_batches(memory_store, 1, 2, 3)
    wide = CONFIG.model_copy(
        update={"engine": "tests.unit.trainer.service.test_trainer:WideEngine"}
    )
    trained(memory_store, steps=2, config=wide)
    assert checkpoint_steps(memory_store) == [2]
    trained(memory_store, steps=3, config=wide)
    assert manifests.read_manifest(memory_store, POLICY, 3).kind == "delta"
    assert int(reader.fetch(memory_store, POLICY, 3)["weight"].bits[-1]) == 3


def test_after_training_again_to_other_bits_the_next_version_is_an_anchor(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(
        memory_store, POLICY, 0, wide_weight_of(0), extra_files={"config.json": b"{}"}
    )
    add_batches(memory_store, 1, 2)
    publisher.publish(memory_store, POLICY, 1, wide_weight_of(77))
    wide = CONFIG.model_copy(
        update={"engine": "tests.unit.trainer.service.test_trainer:WideEngine"}
    )
    trained(memory_store, steps=2, config=wide)
    assert manifests.read_manifest(memory_store, POLICY, 2).kind == "anchor"
    assert [
        int(reader.fetch(memory_store, POLICY, each)["weight"].bits[-1]) for each in (1, 2)
    ] == [77, 2]


def test_an_uninterrupted_trainer_publishes_deltas(memory_store: ObjectStore) -> None:
    publisher.publish(
        memory_store, POLICY, 0, wide_weight_of(0), extra_files={"config.json": b"{}"}
    )
    add_batches(memory_store, 1, 2, 3, 4)
    wide = CONFIG.model_copy(
        update={"engine": "tests.unit.trainer.service.test_trainer:WideEngine", "anchor_every": 3}
    )
    trained(memory_store, steps=4, config=wide)
    kinds = [
        manifests.read_manifest(memory_store, POLICY, version).kind for version in (1, 2, 3, 4)
    ]
    assert kinds == ["delta", "delta", "anchor", "delta"]


def test_weights_that_are_not_finite_are_not_published_and_earlier_versions_are_kept(
    memory_store: ObjectStore,
) -> None:
    publisher.publish(
        memory_store, POLICY, 0, wide_weight_of(0), extra_files={"config.json": b"{}"}
    )
    add_batches(memory_store, 1, 2, 3)
    overflowing = CONFIG.model_copy(update={"engine": f"{__name__}:OverflowingEngine"})
    with pytest.raises(
        ConfigError,
        match=r"version 2 of solver is not published: its tensor weight has values that are not "
        r"finite as BF16\..*smaller policies\.solver\.train\.lr .*continue from version 1",
    ):
        trained(memory_store, steps=3, config=overflowing)
    assert manifests.latest(memory_store, POLICY) == 1
    assert checkpoint_steps(memory_store) == []


def test_the_metrics_of_a_version_are_those_of_the_step_the_service_and_the_publication(
    run: ObjectStore,
) -> None:
    add_batches(run, 1)
    trained(run, steps=1)
    metrics = manifests.read_manifest(run, POLICY, 1).metrics
    own = {name for name in metrics if not name.startswith("weights/")}
    assert own == {"trainer/tokens", "trainer/loss", *SERVICE_METRICS}


def test_a_trainer_merges_the_deltas_of_a_span(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "BYTES_MIN", 0)
    run = run.sub("wide")
    files = {"config.json": b'{"model_type": "counting"}'}
    publisher.publish(run, POLICY, 0, wide_weight_of(0), extra_files=files)
    add_batches(run, *range(1, 9))
    trained(run, 8, CONFIG.model_copy(update={"engine": f"{__name__}:WideEngine"}))
    assert run.exists(layout.merged_delta(POLICY, 8, 0))


def test_merges_have_the_memory_of_the_recipe(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(
        compaction, "merge", lambda run, policy, end, base, memory_bytes: given.append(memory_bytes)
    )
    add_batches(run, *range(1, 9))
    trained(run, 8, CONFIG.model_copy(update={"publish_memory_mb": 3}))
    assert given == [3 * 2**20]


class AdapterEngine(CountingEngine):
    """An engine whose versions are a base model with an adapter."""

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        self.value = 0

    def weights(self) -> dict[str, HostTensor]:
        return drawn(seed=self.value)


def test_the_manifests_of_a_trainer_name_the_adapter_that_it_publishes(run: ObjectStore) -> None:
    add_batches(run, 1)
    config = CONFIG.model_copy(
        update={
            "engine": f"{__name__}:AdapterEngine",
            "adapter": Lora(rank=2, alpha=3.0, publish="adapter"),
        }
    )
    trained(run, 1, config)
    assert manifests.read_manifest(run, POLICY, 1).adapter == LORA


def test_if_repeated_steps_give_other_bits_the_published_versions_stay_and_an_error_is_logged(
    run: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    add_batches(run, 1, 2, 3)
    for version in (1, 2):
        publisher.publish(run, POLICY, version, weight_of(version))
    trained(run, steps=3, config=DRIFTING)
    assert published(run) == [0, 1, 2, 103]
    loud = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(loud) == 1
    assert "other bits at version 1" in loud[0]
    assert "up to 2 are kept; version 3 is the first" in loud[0]


def test_a_concurrent_publisher_of_other_weights_stops_the_trainer_with_a_remedy(
    run: ObjectStore,
) -> None:
    add_batches(run, 1, 2)

    def rival_is_faster(given: Batch) -> None:
        if given.step == 2:
            publisher.publish(run, POLICY, 2, weight_of(99))

    BEFORE_STEP[7] = rival_is_faster
    with pytest.raises(
        ConflictError, match=r"version 2 of solver .* two trainers of one policy are alive"
    ):
        trained(run, steps=2, seed=7)
    assert published(run) == [0, 1, 99]


def test_an_existing_version_with_equal_weights_counts_as_published(
    run: ObjectStore,
) -> None:
    add_batches(run, 1, 2)

    def publishes_already(given: Batch) -> None:
        publisher.publish(run, POLICY, given.step, weight_of(given.step))

    BEFORE_STEP[8] = publishes_already
    trained(run, steps=2, seed=8)
    assert published(run) == [0, 1, 2]


def test_a_trainer_asked_to_stop_finishes_the_step_and_writes_a_checkpoint(
    run: ObjectStore,
) -> None:
    add_batches(run, 1, 2, 3)
    stop = threading.Event()
    BEFORE_STEP[9] = lambda given: stop.set()
    heartbeat_writer = trained(run, steps=3, stop=stop, seed=9)
    assert published(run) == [0, 1]
    assert checkpoint_steps(run) == [1]
    assert heartbeat_writer.last.state == "draining"


def test_a_trainer_asked_to_stop_before_version_0_ends_immediately(
    memory_store: ObjectStore,
) -> None:
    stop = threading.Event()
    stop.set()
    trained(memory_store, steps=3, stop=stop)
    assert memory_store.list() == []


def test_a_waiting_trainer_stops_at_the_runs_end(run: ObjectStore) -> None:
    add_batches(run, 1)
    request_stop(run, Stop("cancelled", "a person asked", 0.0))
    heartbeat_writer = trained(run, steps=3)
    assert published(run) == [0]
    assert progress_of(heartbeat_writer.last, TrainerProgress).step == 0


def test_a_trainer_reads_the_runs_end_once_per_interval(run: ObjectStore) -> None:
    add_batches(run, 1, 2)

    def run_ends(given: Batch) -> None:
        request_stop(run, Stop("completed", "enough", 0.0))

    BEFORE_STEP[10] = run_ends
    lifetime = Lifetime(
        run, heartbeat_writer_of(run, "trainer"), threading.Event(), clock=lambda: 0.0
    )
    train(lifetime, POLICY, CONFIG, steps=2, seed=10, batch_size=1, max_tokens=512)
    assert published(run) == [
        0,
        1,
        2,
    ]  # the first read was before the request, the second is not due


def test_a_damaged_batch_stops_the_trainer_with_its_name(run: ObjectStore) -> None:
    add_batches(run, 1)
    run.create(f"batches/{POLICY}/00000002.arrow", b"half an object")
    with pytest.raises(CorruptError, match=r"batches/solver/00000002\.arrow is damaged"):
        trained(run, steps=2)
    assert published(run) == [0, 1]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_batch_with_another_number_of_rows_is_not_trained_on(
    run: ObjectStore, num_rows: int
) -> None:
    batches.create(run, batch(*rows_of(2), policy=POLICY))
    batches.create(run, batch(*rows_of(num_rows), policy=POLICY, step=2))
    why = (
        rf"batches/solver/00000002\.arrow is damaged \(it has {num_rows} rows, and every batch of "
        r"solver has 2\)"
    )
    with pytest.raises(CorruptError, match=why):
        trained(run, steps=2, batch_size=2)
    assert published(run) == [0, 1]


def test_a_row_longer_than_the_rollout_engines_contexts_is_not_trained_on(run: ObjectStore) -> None:
    for step, length in enumerate((512, 513), start=1):
        batches.create(
            run, batch(row(prompt=(1,), answer=[2] * (length - 1)), policy=POLICY, step=step)
        )
    why = (
        r"batches/solver/00000002\.arrow is damaged \(it has a row of 513 tokens, and "
        r"rollout\.engine\.max_tokens is 512\)"
    )
    with pytest.raises(CorruptError, match=why):
        trained(run, steps=2)
    assert published(run) == [0, 1]


def test_a_base_model_without_its_config_is_named(memory_store: ObjectStore) -> None:
    publisher.publish(memory_store, POLICY, 0, weight_of(0))
    with pytest.raises(CorruptError, match=r"version 0 of solver has no config\.json"):
        trained(memory_store, steps=1)


@pytest.mark.parametrize("bits", [0x7F800000, 0x7F7FFFFF], ids=["infinity", "huge"])
def test_a_base_model_that_is_not_finite_as_it_is_published_is_named(
    memory_store: ObjectStore, bits: int
) -> None:
    weights = base_weights()
    name = "model.norm.weight"
    spoiled = np.full(weights[name].shape, 0x3F800000, np.uint32)
    spoiled[1] = bits
    weights[name] = HostTensor("F32", weights[name].shape, spoiled)
    files = {"config.json": json.dumps(MODEL_CONFIG).encode()}
    publisher.publish(memory_store, POLICY, 0, weights, extra_files=files)
    with pytest.raises(CorruptError, match=rf"{name} of version 0 of solver .* not finite as BF16"):
        trained(memory_store, steps=1, config=TrainConfig())


def test_an_unknown_engine_is_named_with_a_list_of_engines(run: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="'tourch' is not known; use one of deepspeed, torch,"):
        trained(run, steps=1, config=CONFIG.model_copy(update={"engine": "tourch"}))


def test_a_checkpoint_without_its_version_is_an_error(run: ObjectStore) -> None:
    checkpoints.save(run, POLICY, 3, *with_tokens(CountingEngine(CONFIG, {}, 0)))
    with pytest.raises(
        CorruptError,
        match=r"checkpoints/solver/00000003 exists, but weights/solver/00000003 does not",
    ):
        trained(run, steps=4)


@pytest.mark.parametrize("body", [None, b"{}"])
def test_a_missing_or_damaged_version_before_the_newest_is_an_error_with_a_remedy(
    run: ObjectStore, body: bytes | None
) -> None:
    add_batches(run, 1, 2, 3, 4)
    for version in (1, 2, 3):
        publisher.publish(run, POLICY, version, weight_of(version))
    run.delete(key := "weights/solver/00000002/manifest.json")
    if body is not None:
        run.create(key, body)
    with pytest.raises(
        CorruptError,
        match=rf"version 2 of solver was published to {re.escape(run.url)}, but cannot be read: "
        rf".*{key}.* back, and start the run again, or start a new run from an earlier",
    ):
        trained(run, steps=4)


class UnreadableError(RuntimeError):
    """An error of foreign code without a message."""

    def __str__(self) -> str:
        raise KeyError("text")


class ForeignEngine(CountingEngine):
    """An engine whose `load` raises what its state names."""

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        errors: dict[str, Exception] = {
            "key": KeyError("value"),
            "form": RuntimeError("size mismatch"),
            "unreadable": UnreadableError(),
            "corrupt": CorruptError("the state has format 9"),
            "config": ConfigError("there is no device cuda:7"),
        }
        raise errors[state["raises"]]


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        (
            "key",
            "checkpoints/solver/00000001 cannot be loaded: KeyError: 'value'; if it is damaged, delete it",
        ),
        (
            "form",
            "checkpoints/solver/00000001 cannot be loaded: RuntimeError: size mismatch; if it",
        ),
        (
            "unreadable",
            "checkpoints/solver/00000001 cannot be loaded: UnreadableError: its message cannot be "
            "read: __str__ raised KeyError; if it",
        ),
        ("corrupt", "checkpoints/solver/00000001 cannot be loaded: the state has format 9; if it"),
    ],
)
def test_a_state_that_the_engine_cannot_load_is_named(
    run: ObjectStore, raises: str, message: str
) -> None:
    publisher.publish(run, POLICY, 1, weight_of(1))
    checkpoints.save(run, POLICY, 1, weight_of(1), CheckpointState({"raises": raises}, 3.0))
    with pytest.raises(CorruptError, match=message):
        trained(run, steps=2, config=FOREIGN)


def test_an_unavailable_device_is_no_damage_of_the_checkpoint(run: ObjectStore) -> None:
    publisher.publish(run, POLICY, 1, weight_of(1))
    checkpoints.save(run, POLICY, 1, weight_of(1), CheckpointState({"raises": "config"}, 3.0))
    with pytest.raises(ConfigError, match=r"^there is no device cuda:7$"):
        trained(run, steps=2, config=FOREIGN)


def with_tokens(engine: CountingEngine) -> tuple[dict[str, HostTensor], CheckpointState]:
    tensors, state = engine.save()
    return tensors, CheckpointState(state, 0.0)


def test_an_unreachable_store_only_delays_the_trainer(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "CALL_PATIENCE_S", 0.01)
    add_batches(run, 1, 2)
    backend = UnreachableBackend(run.backend, refusals_max=3)

    def goes_away(given: Batch) -> None:
        backend.away.set()

    BEFORE_STEP[11] = goes_away
    trained(replace(run, backend=backend), steps=2, seed=11)
    assert published(run) == [0, 1, 2]
    assert backend.refusals == 2 * 3


def test_a_trainer_stopped_during_a_store_outage_repeats_the_step_after_a_resume(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "CALL_PATIENCE_S", 0.01)
    add_batches(run, 1, 2)
    backend, stop = UnreachableBackend(run.backend), threading.Event()

    def goes_away(given: Batch) -> None:
        backend.away.set()
        stop.set()

    BEFORE_STEP[12] = goes_away
    heartbeat_writer = trained(replace(run, backend=backend), steps=2, stop=stop, seed=12)
    assert "stopped while the store was unreachable" in heartbeat_writer.last.note
    assert published(run) == [0]
    trained(run, steps=2)
    assert published(run) == [0, 1, 2]


def test_the_built_in_engine_trains_in_the_service(memory_store: ObjectStore) -> None:
    from tests.support.models.trainer_cases import (
        MODEL_CONFIG,
        base_weights,
        reference_model,
        sampled_batch,
    )

    base = base_weights()
    given = sampled_batch(reference_model(base))
    files = {"config.json": json.dumps(MODEL_CONFIG).encode()}
    publisher.publish(memory_store, POLICY, 0, base, extra_files=files)
    batches.create(memory_store, given)
    config = TrainConfig(lr=1e-2, minibatches=3)
    trained(memory_store, steps=1, config=config, seed=5, batch_size=len(given.rows))
    alone = make_engine(config, MODEL_CONFIG, seed=5)
    alone.set_weights(base)
    metrics = alone.step(given)
    first = reader.fetch(memory_store, POLICY, 1)
    assert weights_digest(first) == weights_digest(alone.weights()) != weights_digest(base)
    assert manifests.read_manifest(memory_store, POLICY, 1).metrics.items() >= metrics.items()
    assert all(tensor.dtype == "BF16" for tensor in first.values())


def test_a_failed_publication_stops_a_waiting_trainer(
    run: ObjectStore,
) -> None:
    add_batches(run, 1)  # the next one would need version 1

    class Full:
        def __getattr__(self, verb: str) -> Callable[..., object]:
            def refuse(*arguments: object) -> object:
                raise ConfigError("the disk is full")

            if verb == "write":
                return refuse
            method: Callable[..., object] = getattr(run.backend, verb)
            return method

    stop = threading.Event()
    rescue = threading.Timer(20.0, stop.set)  # without the check it would wait permanently
    rescue.start()
    with pytest.raises(ConfigError, match="the disk is full"):
        trained(replace(run, backend=Full()), steps=3, stop=stop)  # type: ignore[arg-type]  # a stand-in
    assert not stop.is_set()
    rescue.cancel()
