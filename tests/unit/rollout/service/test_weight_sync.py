import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollout.config import EngineConfig
from rollout.service import weight_sync
from rollout.service.weight_loader import WeightLoader
from rollout.service.weight_sync import WeightSync
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import ConfigError
from storage.formats.safetensors import weights_digest
from storage.records.control import WaitReason
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher
from storage.weights.manifests import LoadedWeights
from tests.support.runs.builders import tensors
from tests.support.runs.dataflow_world import OutageBackend
from tests.support.runs.fakes import ScriptedEngine
from tests.support.stores.damaged_weights import spoil


@pytest.fixture
def heartbeat_writer(memory_store: ObjectStore) -> HeartbeatWriter:
    return HeartbeatWriter(memory_store, "rollout", "rollout-us-east-0", attempt=0, interval_s=60.0)


async def engine_at(run: ObjectStore, version: int) -> ScriptedEngine:
    for each in range(version + 1):
        publisher.publish(run, "solver", each, tensors(each))
    engine = ScriptedEngine(EngineConfig(), {})
    if version >= 0:
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


class Picky(ScriptedEngine):
    """An engine whose model has no place for the weights of some versions."""

    misfits: tuple[int, ...] = ()

    async def load(self, version: int, weights: object, digest: str | None = None) -> None:
        if version in self.misfits:
            raise ConfigError(f"version {version} has a tensor that the model lacks")
        await super().load(version, tensors(version))


async def test_one_version_that_does_not_fit_the_model_is_passed_over_and_a_second_one_is_not(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter
) -> None:
    await engine_at(memory_store, 1)
    engine = Picky(EngineConfig(), {})
    await engine.load(1, tensors(1))
    sync = WeightSync(memory_store, "solver", WeightLoader(engine), 0.1, heartbeat_writer)
    engine.misfits = (2, 4, 5)
    for version in (2, 4):
        publisher.publish(memory_store, "solver", version, tensors(version))
        assert not await sync.refresh()
        assert not await sync.refresh()
        assert sync.wait_reason is WaitReason.DAMAGED_OBJECT
        assert f"version {version} has a tensor" in heartbeat_writer.last.note
        if version == 2:
            publisher.publish(memory_store, "solver", 3, tensors(3))
            assert await sync.refresh()
            assert sync.wait_reason is WaitReason.NONE
    assert engine.version == 3
    publisher.publish(memory_store, "solver", 5, tensors(5))
    with pytest.raises(ConfigError, match="version 5 has a tensor"):
        await sync.refresh()


async def test_a_version_that_is_not_finite_is_passed_over(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter
) -> None:
    engine = await engine_at(memory_store, 1)
    sync = WeightSync(memory_store, "solver", WeightLoader(engine), 0.1, heartbeat_writer)
    given = tensors(2)
    name = next(name for name, each in given.items() if each.dtype == "BF16")
    infinite = replace(given[name], bits=np.full_like(given[name].bits, 0x7F80))
    publisher.publish(memory_store, "solver", 2, given | {name: infinite})
    assert not await sync.refresh()
    assert "of version 2 has values that are not finite" in heartbeat_writer.last.note
    publisher.publish(memory_store, "solver", 3, tensors(3))
    assert await sync.refresh()
    assert engine.version == 3


async def test_a_store_that_cannot_be_read_as_it_is_set_up_is_no_damage(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_at(memory_store, 1)
    sync = WeightSync(memory_store, "solver", WeightLoader(engine), 0.1, heartbeat_writer)

    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("weights is a link")

    publisher.publish(memory_store, "solver", 2, tensors(2))
    for module, name in ((weight_sync.reader, "read"), (manifests, "newer")):
        monkeypatch.setattr(module, name, refuse)
        with pytest.raises(ConfigError, match="weights is a link"):
            await sync.refresh()


async def test_weights_that_an_engine_without_any_refuses_are_not_passed_over(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter
) -> None:
    """Its start may have failed."""
    publisher.publish(memory_store, "solver", 0, tensors(0))
    engine = Picky(EngineConfig(), {})
    engine.misfits = (0,)
    sync = WeightSync(memory_store, "solver", WeightLoader(engine), 0.1, heartbeat_writer)
    with pytest.raises(ConfigError, match="version 0 has a tensor"):
        await sync.refresh()


class Pauses:
    """In the place of `asyncio.sleep`: notes the pauses, takes no time, and ends after `count`."""

    def __init__(self, count: int) -> None:
        self.asked: list[float] = []
        self._count = count

    async def __call__(self, delay: float) -> None:
        self.asked.append(delay)
        if len(self.asked) == self._count:
            raise asyncio.CancelledError


async def pauses_of(sync: WeightSync, count: int, patch: pytest.MonkeyPatch) -> list[float]:
    pauses = Pauses(count)
    with patch.context() as patched:
        patched.setattr(asyncio, "sleep", pauses)
        with pytest.raises(asyncio.CancelledError):
            await sync.serve()
    return pauses.asked


async def test_pauses_after_damage_double_up_to_a_minute_and_end_with_it(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_at(memory_store, 1)
    publisher.publish(memory_store, "solver", 2, tensors(2))
    spoil(memory_store, "solver", 2)
    sync = WeightSync(memory_store, "solver", WeightLoader(engine), 0.7, heartbeat_writer)
    pauses = await pauses_of(sync, 9, monkeypatch)
    assert pauses == [0.7, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    publisher.publish(memory_store, "solver", 3, tensors(3))
    assert await pauses_of(sync, 2, monkeypatch) == [0.7, 0.7]
    assert engine.version == 3


async def test_pauses_of_an_outage_are_shorter_and_end_with_it_also_without_a_newer_version(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engine_at(memory_store, 1)
    backend = OutageBackend(memory_store.backend)
    run = replace(memory_store, backend=backend, patience_s=0.0)
    sync = WeightSync(run, "solver", WeightLoader(engine), 0.1, heartbeat_writer)
    backend.down.set()
    assert await pauses_of(sync, 7, monkeypatch) == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert sync.wait_reason is WaitReason.STORE
    backend.down.clear()
    assert await pauses_of(sync, 1, monkeypatch) == [0.1]
    assert (sync.failures, sync.wait_reason) == (7, WaitReason.NONE)


class Recorded(WeightLoader):
    """Keeps the versions that it was given."""

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.given: list[LoadedWeights] = []

    async def load(self, weights: LoadedWeights) -> None:
        self.given.append(weights)
        await super().load(weights)


async def test_a_version_is_written_to_the_memory_of_the_version_before_the_loaded_one(
    memory_store: ObjectStore, heartbeat_writer: HeartbeatWriter
) -> None:
    """Of two buffers in turn, so that a refresh needs no fresh memory; the loaded bits stay."""
    loader = Recorded(await engine_at(memory_store, -1))
    sync = WeightSync(memory_store, "solver", loader, 0.1, heartbeat_writer)
    base = None
    for version in range(8):
        bits = np.arange(1000, dtype=np.uint16)
        bits[0] += version
        weights = {"weight": HostTensor("BF16", (1000,), bits)}
        base = LoadedWeights(
            publisher.publish(memory_store, "solver", version, weights, base=base), weights
        )
        assert await sync.refresh()
        for loaded in loader.given[-2:]:
            assert weights_digest(loaded.tensors) == loaded.manifest.digest
    assert [each.manifest.kind for each in loader.given] == ["anchor"] + ["delta"] * 7
    places = {each.tensors["weight"].bits.ctypes.data for each in loader.given[1:]}
    assert len(places) == 2
