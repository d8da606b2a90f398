from dataclasses import replace
from typing import Any

import pytest

from rollout.config import EngineConfig
from rollout.service import weight_loader
from rollout.service.weight_loader import WeightLoader
from rollout.service.weight_sync import WeightSync
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import CorruptError
from storage.formats import adapters
from storage.formats.safetensors import weights_digest
from storage.records.weights import StoredAdapter
from storage.store.object_store import ObjectStore
from storage.weights import manifests, reader
from storage.weights.manifests import LoadedWeights
from tests.support.recorded import first_arguments
from tests.support.runs.adapter_versions import LORA, A, B, W, publish_adapters
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


NAN, INFINITE = 0x7FC0, 0xFF80
"""In BF16."""


def spoiled(weights: LoadedWeights, name: str, bits: int) -> LoadedWeights:
    """The same version with its last number of one tensor replaced."""
    tensor = weights.tensors[name]
    changed = tensor.bits.copy()
    changed.reshape(-1)[-1] = bits
    return weights._replace(tensors={**weights.tensors, name: replace(tensor, bits=changed)})


@pytest.mark.parametrize("bits", [NAN, INFINITE])
async def test_an_engine_is_not_given_weights_that_are_not_finite(
    memory_store: ObjectStore, bits: int
) -> None:
    publish_adapters(memory_store)
    base, adapted = (reader.read(memory_store, "solver", version) for version in (0, 1))
    engine = ScriptedEngine(EngineConfig(), {})
    loader = WeightLoader(engine)
    with pytest.raises(CorruptError, match=r"norm\.weight of version 0 has values that are not"):
        await loader.load(spoiled(base, "norm.weight", bits))
    assert engine.version == -1
    await loader.load(base)
    with pytest.raises(CorruptError, match=f"{W} of version 1 has values that are not finite"):
        await loader.load(spoiled(adapted, B, bits))
    assert engine.version == 0
    with pytest.raises(KeyError):
        loader.digest(1)


class AdapterServer(ScriptedEngine):
    """An engine that applies adapters itself."""

    serves_adapters = True

    async def load_adapter(self, version: int, form: StoredAdapter, tensors: Any) -> None:
        await self.load(version, tensors)


async def test_nor_an_adapter_that_is_not(memory_store: ObjectStore) -> None:
    publish_adapters(memory_store)
    adapted = reader.read(memory_store, "solver", 1)
    loader = WeightLoader(AdapterServer(EngineConfig(), {}))
    with pytest.raises(CorruptError, match=f"{A} of version 1 has values that are not finite"):
        await loader.load(spoiled(adapted, A, NAN))
    await loader.load(adapted)
    assert loader.engine.version == 1


async def test_only_tensors_that_changed_are_searched(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_adapters(memory_store)
    first = reader.read(memory_store, "solver", 1)
    second = reader.read(memory_store, "solver", 2, first)
    searched = first_arguments(monkeypatch, weight_loader, "is_finite")
    loader = WeightLoader(ScriptedEngine(EngineConfig(), {}))
    await loader.load(first)
    assert sorted(tensor.shape for tensor in searched) == [(5,), (64, 5)]
    searched.clear()
    await loader.load(second)
    assert [tensor.shape for tensor in searched] == [(64, 5)]
