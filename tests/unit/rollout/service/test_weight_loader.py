import pytest

from rollout.config import EngineConfig
from rollout.service.weight_loader import WeightLoader
from rollout.service.weight_sync import WeightSync
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.formats import adapters
from storage.formats.safetensors import weights_digest
from storage.store.object_store import ObjectStore
from storage.weights import manifests, reader
from tests.support.runs.adapter_versions import LORA, publish_adapters
from tests.support.runs.fakes import ScriptedEngine


async def test_an_engine_gets_merged_tensors_and_the_published_digest_is_reported(
    memory_store: ObjectStore,
) -> None:
    publish_adapters(memory_store)
    engine = ScriptedEngine(EngineConfig(), {})
    loader = WeightLoader(engine)
    for version in (0, 1, 2):
        weights = reader.read(memory_store, "solver", version)
        await loader.load(weights)
        adapter = LORA if version else None
        merged = adapters.merged(adapter, weights.tensors).tensors
        assert engine.version == version
        assert engine.digest(version) == weights_digest(merged)
        assert loader.digest(version) == weights.manifest.digest
        assert (engine.digest(version) == loader.digest(version)) == (version == 0)
    with pytest.raises(KeyError):
        loader.digest(3)


async def test_a_worker_that_refreshes_serves_merged_versions(memory_store: ObjectStore) -> None:
    publish_adapters(memory_store, 2)
    loader = WeightLoader(ScriptedEngine(EngineConfig(), {}))
    await loader.load(reader.read(memory_store, "solver", 0))
    heartbeat = HeartbeatWriter(memory_store, "rollout", "rollout-a-0", attempt=0, interval_s=60.0)
    assert await WeightSync(memory_store, "solver", loader, 0.1, heartbeat).refresh()
    assert loader.engine.version == 1
    manifest = manifests.read_manifest(memory_store, "solver", 1)
    assert loader.digest(1) == manifest.digest != loader.engine.digest(1)
