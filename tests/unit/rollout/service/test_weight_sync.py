import pytest

from rollout.config import EngineConfig
from rollout.service.weight_loader import WeightLoader
from rollout.service.weight_sync import WeightSync
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.formats.safetensors import weights_digest
from storage.records.control import WaitReason
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from tests.support.runs.builders import tensors
from tests.support.runs.fakes import ScriptedEngine
from tests.support.stores.damaged_weights import spoil


@pytest.fixture
def heartbeat_writer(memory_store: ObjectStore) -> HeartbeatWriter:
    return HeartbeatWriter(memory_store, "rollout", "rollout-us-east-0", attempt=0, interval_s=60.0)


async def engine_at(run: ObjectStore, version: int) -> ScriptedEngine:
    for each in range(version + 1):
        publisher.publish(run, "solver", each, tensors(each))
    engine = ScriptedEngine(EngineConfig(), {})
    await engine.load(version, tensors(version))
    return engine


async def test_without_a_newer_version_nothing_changes(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter
) -> None:
    engine = await engine_at(memory_store, 1)
    assert not await WeightSync(
        memory_store, "solver", WeightLoader(engine), 0.1, heartbeat_writer
    ).refresh()
    assert engine.version == 1


async def test_the_newest_version_is_loaded_and_versions_between_are_skipped(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter
) -> None:
    engine = await engine_at(memory_store, 1)
    for version in (2, 3, 4):
        publisher.publish(memory_store, "solver", version, tensors(version))
    assert await WeightSync(
        memory_store, "solver", WeightLoader(engine), 0.1, heartbeat_writer
    ).refresh()
    assert engine.version == 4
    assert (
        engine.digest(4)
        == manifests.read_manifest(memory_store, "solver", 4).digest
        == weights_digest(tensors(4))
    )
    with pytest.raises(KeyError):
        engine.digest(3)
    assert heartbeat_writer.last.versions == {"solver": 4}
    assert heartbeat_writer.last.seconds["refresh"] > 0


async def test_damaged_weights_are_never_loaded_and_are_reported(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter
) -> None:
    engine = await engine_at(memory_store, 1)
    publisher.publish(memory_store, "solver", 2, tensors(2))
    spoil(memory_store, "solver", 2)
    refresher = WeightSync(memory_store, "solver", WeightLoader(engine), 0.1, heartbeat_writer)
    assert not await refresher.refresh()
    assert not await refresher.refresh()
    assert engine.version == 1
    assert heartbeat_writer.last.note.startswith("solver stays at version 1: ")
    assert (refresher.failures, refresher.wait_reason) == (2, WaitReason.DAMAGED_OBJECT)
    publisher.publish(memory_store, "solver", 3, tensors(3))
    assert await refresher.refresh()
    assert engine.version == 3
    assert refresher.wait_reason is WaitReason.NONE
