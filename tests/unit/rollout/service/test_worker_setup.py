import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rollout.config import EngineConfig, RegionConfig, RolloutConfig, WorkflowConfig
from rollout.service.worker_setup import end_reason
from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.records.control import Stop, WaitReason
from storage.records.progress import RolloutProgress
from storage.records.types import Json
from storage.records.weights import HostTensor
from storage.run import orders, runs
from storage.store.object_store import ObjectStore
from storage.weights import publisher, reader, replication
from storage.weights.manifests import LoadedWeights
from tests.support.patience import until
from tests.support.runs.builders import mirror_next, tensors
from tests.support.runs.busy_gpus import busy_gpu
from tests.support.runs.fakes import ScriptedEngine, base_files, publish_base
from tests.support.runs.lifetimes import progress_of
from tests.support.runs.workers import RunningWorker, answered, config, write_orders
from tests.support.stores.damaged_weights import spoil

OVER = Stop("completed", "all steps done", 0.0)


class RecordedEngine(ScriptedEngine):
    """Keeps all engines that were made."""

    made: ClassVar[list[ScriptedEngine]] = []

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        super().__init__(config, model_config)
        self.made.append(self)


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    RecordedEngine.made.clear()
    yield RecordedEngine.made
    RecordedEngine.made.clear()


class LoopRecordingEngine(ScriptedEngine):
    """Keeps whether an event loop runs in the thread that makes the engine."""

    loops: ClassVar[list[bool]] = []

    def __init__(self, config: EngineConfig, model_config: Json) -> None:
        super().__init__(config, model_config)
        self.loops.append(asyncio._get_running_loop() is not None)


def test_models_are_opened_outside_of_the_event_loop(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that starts, or an import, takes longer on a busy machine than a loop may wait."""
    monkeypatch.setattr(LoopRecordingEngine, "loops", [])
    write_orders(memory_store, 1)
    publish_base(memory_store, ["solver"])
    engine = EngineConfig(name=f"{__name__}:LoopRecordingEngine")
    with RunningWorker(memory_store, config().model_copy(update={"engine": engine})) as worker:
        until(answered(memory_store, 1))
        worker.stop()
        worker.join()
    assert LoopRecordingEngine.loops == [False]


def with_recorded_engines(device: str = "cpu") -> RolloutConfig:
    engine = EngineConfig(name=f"{__name__}:RecordedEngine", device=device)
    return config().model_copy(update={"engine": engine})


def publish(run: ObjectStore, version: int, base: LoadedWeights | None = None) -> LoadedWeights:
    """Publish a version that differs from the others in one of 10,000 elements."""
    bits = np.arange(10_000, dtype=np.uint16)
    bits[0] = version
    weights = {"model.weight": HostTensor("BF16", (10_000,), bits)}
    files = {} if base else base_files()
    manifest = publisher.publish(run, "solver", version, weights, base=base, extra_files=files)
    return LoadedWeights(manifest, weights)


def test_a_worker_waits_for_the_base_models(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, config()) as worker:
        until(lambda: worker.beat.note == "waits for the base model of solver")
        publish_base(memory_store, ["solver"])
        until(answered(memory_store, 1))
        worker.stop()
        worker.join()


def test_a_worker_leaves_while_it_waits_for_the_base_models(memory_store: ObjectStore) -> None:
    with RunningWorker(memory_store, config()) as worker:
        until(lambda: worker.beat.state == "waiting")
        worker.stop()
        worker.join()


def test_no_worker_is_needed_once_the_run_ended_or_the_last_shard_was_made(
    memory_store: ObjectStore,
) -> None:
    assert end_reason(memory_store) == ""
    orders.create_end(memory_store, 4)
    assert end_reason(memory_store) == "the dataflow needs no further shard"
    runs.request_stop(memory_store, OVER)
    assert end_reason(memory_store) == "the run is completed: all steps done"


def test_a_recipe_that_cannot_work_is_refused_before_anything_starts(
    memory_store: ObjectStore,
) -> None:
    wrong = RolloutConfig(
        workflow=WorkflowConfig(name="debate"),
        engine=EngineConfig(name="tests.support.runs.fakes:ScriptedEngine"),
    )
    with RunningWorker(memory_store, wrong) as worker, pytest.raises(ConfigError, match="debate"):
        worker.join()


def test_a_refresh_reads_only_the_changes_and_from_the_mirror(memory_store: ObjectStore) -> None:
    run, url = memory_store.sub("runs/changes"), "memory://a-mirror-of-changes"
    mirror = replication.of_run(run, url)
    base = publish(run, 0)
    whole = mirror_next(run, mirror)
    with RunningWorker(run, config(regions={"us-east": RegionConfig(mirror=url)})) as worker:
        until(lambda: worker.beat.versions == {"solver": 0})
        publish(run, 1, base)
        changes = mirror_next(run, mirror)
        until(lambda: worker.beat.versions == {"solver": 1})
        worker.stop()
        progress = progress_of(worker.join(), RolloutProgress)
    manifest_bytes = sum(
        len(run.get(layout.manifest(layout.weights("solver", version)))) for version in (0, 1)
    )
    assert whole is not None
    assert changes is not None
    assert changes.num_bytes < whole.num_bytes / 2
    assert (
        progress.weights_bytes_mirror["solver"]
        == whole.num_bytes + changes.num_bytes - manifest_bytes
    )
    assert progress.weights_bytes_home["solver"] < 20_000  # manifests, and not the whole tensor


def test_the_engines_of_a_worker_are_closed_when_it_leaves(
    memory_store: ObjectStore, engines: list[ScriptedEngine]
) -> None:
    publish_base(memory_store, ["solver"])
    write_orders(memory_store, 1)
    with RunningWorker(memory_store, with_recorded_engines()) as worker:
        until(answered(memory_store, 1))
        worker.stop()
        worker.join()
    assert [engine.closed for engine in engines] == [True]


def test_the_engines_of_a_worker_are_closed_when_their_weights_cannot_be_read(
    memory_store: ObjectStore, engines: list[ScriptedEngine]
) -> None:
    publish_base(memory_store, ["solver"])
    spoil(memory_store, "solver", 0)
    settings = with_recorded_engines()
    with RunningWorker(memory_store, settings) as worker, pytest.raises(CorruptError):
        worker.join()
    assert [engine.closed for engine in engines] == [True]


def test_a_worker_without_its_gpu_makes_no_engine_and_can_leave(
    memory_store: ObjectStore, engines: list[ScriptedEngine], tmp_path: Path
) -> None:
    publish_base(memory_store, ["solver"])
    settings = with_recorded_engines("cuda")
    with busy_gpu(tmp_path), RunningWorker(memory_store, settings) as worker:
        until(lambda: worker.beat.wait_reason is WaitReason.GPU)
        worker.stop()
        worker.join()
    assert engines == []


def test_weights_are_read_within_the_memory_that_the_recipe_allows(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    read = reader.read

    def recorded(*arguments: Any, memory_bytes: int, **options: Any) -> LoadedWeights:
        limits.append(memory_bytes)
        return read(*arguments, memory_bytes=memory_bytes, **options)

    monkeypatch.setattr(reader, "read", recorded)
    publish_base(memory_store, ["solver"])
    with RunningWorker(memory_store, config(refresh_memory_mb=70)) as worker:
        until(lambda: worker.beat.versions == {"solver": 0})
        publisher.publish(memory_store, "solver", 1, tensors(1))
        until(lambda: worker.beat.versions == {"solver": 1})
        worker.stop()
        worker.join()
    assert limits == [70 * 2**20] * 2
