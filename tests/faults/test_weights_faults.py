"""Faults between a trainer's weights and the workers, on a local store and on an S3 server in its
own process: no wrong bit is read, committed versions stay, and failures are logged and retried.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rollout.config import EngineConfig
from rollout.service.weight_loader import WeightLoader
from rollout.service.weight_sync import WeightSync
from storage import layout
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import CorruptError, NotFoundError
from storage.formats.safetensors import weights_digest
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, publisher, reader
from storage.weights.manifests import LoadedWeights
from storage.weights.read_through import LAG_MAX_S, ReadThrough, read_through_mirror
from tests.faults.flaky_proxy import FlakyProxy
from tests.support.checkout import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.runs.builders import mirror_next
from tests.support.runs.fakes import ScriptedEngine
from tests.support.stores.s3_process import s3_process
from tests.unit.storage.weights.test_update_path import models, publish

BUCKET = "weights"
UNREACHABLE_S = 30.0

PUBLISHER = """
import os, signal, sys
from storage.formats import tensor_set
from storage.store.object_store import open_store
from storage.weights import delta_store, publisher, reader
from dataclasses import replace
from tests.unit.storage.weights.test_update_path import models
url, kill_at, version = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
delta_store.FILE_BYTES_MAX = tensor_set.FILE_BYTES_MAX = 1  # a file for each tensor
store, writes = open_store(url), []

class Dies:
    def __getattr__(self, verb):
        if verb in ("create", "write"):
            writes.append(verb)
            if len(writes) > kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return getattr(store.backend, verb)

tensors = models(version + 1, size=3000)
held = reader.read(store, "solver", version - 1)
publisher.publish(replace(store, backend=Dies()), "solver", version, tensors[version], base=held, anchor=True)
print(len(writes))
"""

RIVAL = """
import sys
from storage.errors import ConflictError
from storage.store.object_store import open_store
from storage.weights import reader
from tests.support.runs.lifetimes import lifetime_of
from tests.unit.storage.weights.test_update_path import models
from trainer.config import TrainConfig
from trainer.service.weight_publisher import WeightPublisher
run, name = open_store(sys.argv[1]), sys.argv[2]
publication = WeightPublisher(lifetime_of(run, "trainer"), run, "solver", TrainConfig())
publication.base = reader.read(run, "solver", 0)
print("ready", flush=True)
sys.stdin.readline()
publication.start(1, models(2 + int(name), size=3000)[-1], {})
try:
    publication.settle()
    print("won")
except ConflictError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with s3_process([BUCKET]) as address:
            environment.setenv("AWS_ENDPOINT_URL", address)
            yield address


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty run on each kind of store."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    request.getfixturevalue("s3")
    return open_store(f"s3://{BUCKET}/{uuid4().hex}")


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyProxy]:
    """In front of the S3 server."""
    with FlakyProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        yield proxy


def python(program: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", program, *arguments]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    return subprocess.Popen(command, text=True, cwd=ROOT, **pipes)


def data_keys(run: ObjectStore, version: int) -> list[str]:
    return [
        key for key in run.list(layout.weights("solver", version)) if key.endswith(".safetensors")
    ]


def move_data(here: Path, there: Path) -> None:
    for file in here.glob("*.safetensors"):
        file.rename(there / file.name)


def right(run: ObjectStore, version: int, loaded: LoadedWeights | None = None) -> bool:
    """Whether the version is read with the digest of its manifest."""
    decoded = reader.read(run, "solver", version, loaded)
    return weights_digest(decoded.tensors) == manifests.read_manifest(run, "solver", version).digest


async def worker_at(
    run: ObjectStore, version: int
) -> tuple[ScriptedEngine, WeightSync, HeartbeatWriter]:
    loaded = await asyncio.to_thread(reader.read, run, "solver", version)
    engine = ScriptedEngine(EngineConfig(), {})
    await engine.load(version, loaded.tensors)
    heartbeat_writer = HeartbeatWriter(
        run, "rollout", "rollout-us-east-0", attempt=0, interval_s=60.0
    )
    return (
        engine,
        WeightSync(run, "solver", WeightLoader(engine), 0.05, heartbeat_writer, loaded),
        heartbeat_writer,
    )


def test_a_publication_killed_between_two_writes_is_absent_and_can_be_repeated(
    run: ObjectStore,
) -> None:
    publish(run, models(3, size=3000))
    kills, done = 0, None
    while done is None:
        writer = python(PUBLISHER, run.url, str(kills), "3")
        said, complained = writer.communicate(timeout=PATIENCE_S)
        if writer.returncode == 0:
            done = int(said)
            continue
        assert writer.returncode == -9, complained
        kills += 1
        assert manifests.latest(run, "solver") == 2
        assert right(run, 2)
        with pytest.raises(NotFoundError):
            reader.read(run, "solver", 3)
    assert kills == done >= 6  # three whole tensors, changes, the manifest
    loaded = reader.read(run, "solver", 2)
    assert right(run, 3)
    assert right(run, 3, loaded)
    assert manifests.read_manifest(run, "solver", 3).digest == weights_digest(
        models(4, size=3000)[3]
    )


def test_the_second_trainer_that_publishes_a_version_stops_with_a_clear_error(
    run: ObjectStore,
) -> None:
    publish(run, models(1, size=3000))
    competitors = [python(RIVAL, run.url, str(number)) for number in range(2)]
    for competitor in competitors:
        assert competitor.stdout is not None
        assert competitor.stdout.readline() == "ready\n", competitor.communicate()[1]
    for competitor in competitors:
        assert competitor.stdin is not None
        competitor.stdin.write("go\n")
        competitor.stdin.flush()
    said = [competitor.communicate(timeout=PATIENCE_S)[0].strip() for competitor in competitors]
    assert said.count("won") == 1
    (lost,) = (words for words in said if words != "won")
    assert lost == (
        "version 1 of solver was published by another trainer with other weights; "
        "two trainers of one policy are alive: stop one of them and start this one again"
    )
    winner = said.index("won")
    manifest = manifests.read_manifest(run, "solver", 1)
    assert manifest.digest == weights_digest(models(2 + winner, size=3000)[-1])
    assert right(run, 1)
    assert {key.rpartition("/")[2] for key in data_keys(run, 1)} == {
        file.name for file in manifest.files
    }


@pytest.mark.s3
def test_a_publication_survives_the_loss_of_any_one_response(proxy: FlakyProxy) -> None:
    run = open_store(f"s3://{BUCKET}/{uuid4().hex}")
    versions = models(12, size=3000)
    loaded = publish(run, versions[:1])
    for version in range(1, len(versions)):
        proxy.fail(["none"] * (version - 1) + ["lose"])
        manifest = publisher.publish(run, "solver", version, versions[version], base=loaded[-1])
        lost = proxy.requests >= version
        assert manifests.read_manifest(run, "solver", version) == manifest
        loaded.append(LoadedWeights(manifest, versions[version]))
        assert right(run, version, loaded[-2])
        if not lost:
            break
    assert version > 3  # the response to each request of a publication was lost once
    assert not lost


@pytest.mark.slow
@pytest.mark.s3
def test_a_store_outage_of_half_a_minute_during_a_fetch_delays_it(
    proxy: FlakyProxy,
) -> None:
    run = open_store(f"s3://{BUCKET}/{uuid4().hex}")
    loaded = publish(run, models(5, size=3000))
    proxy.unreachable_s = UNREACHABLE_S
    proxy.fail(["none", "none", "away"])
    start_s = time.monotonic()
    assert right(run, 4, loaded[0])
    assert time.monotonic() - start_s >= UNREACHABLE_S


async def test_an_unreachable_store_is_waited_for_with_the_old_weights_loaded(
    tmp_path: Path,
) -> None:
    run = open_store(str(tmp_path / "store"))
    loaded = publish(run, models(3, size=3000)[:2])
    engine, refresher, heartbeat_writer = await worker_at(run, 1)
    publisher.publish(run, "solver", 2, models(3, size=3000)[2], base=loaded[-1])
    folder = tmp_path / "store" / layout.weights("solver", 2)
    move_data(folder, tmp_path)  # a mount that lost a part of its files
    assert not await refresher.refresh()
    assert engine.version == 1
    assert heartbeat_writer.last.note.startswith("solver stays at version 1: ")
    move_data(tmp_path, folder)
    assert await refresher.refresh()
    assert engine.digest(2) == manifests.read_manifest(run, "solver", 2).digest


def _flip(run: ObjectStore, key: str, other: str) -> None:
    body = run.get(key)
    run.put(key, body[:-20] + bytes([body[-20] ^ 8]) + body[-19:])


def _truncate(run: ObjectStore, key: str, other: str) -> None:
    run.put(key, run.get(key)[:-33])


def _swap(run: ObjectStore, key: str, other: str) -> None:
    run.put(key, run.get(other))


@pytest.mark.parametrize("damage", [_flip, _truncate, _swap])
async def test_a_damaged_object_is_never_served_and_the_next_anchor_is_used(
    run: ObjectStore, damage: Any
) -> None:
    versions = models(5, size=3000)
    loaded = publish(run, versions[:4])
    engine, refresher, heartbeat_writer = await worker_at(run, 2)
    damage(run, data_keys(run, 3)[0], data_keys(run, 2)[0])
    assert not await refresher.refresh()
    assert engine.version == 2
    assert "weights/solver/00000003" in heartbeat_writer.last.note
    assert "is not what its manifest lists" in heartbeat_writer.last.note
    publisher.publish(run, "solver", 4, versions[4], base=loaded[-1], anchor=True)
    assert await refresher.refresh()
    assert engine.digest(4) == weights_digest(versions[4])


async def test_a_manifest_replaced_by_that_of_another_version_is_refused(run: ObjectStore) -> None:
    publish(run, models(4, size=3000))
    engine, refresher, heartbeat_writer = await worker_at(run, 2)
    keys = [layout.manifest(layout.weights("solver", version)) for version in (2, 3)]
    run.put(keys[1], run.get(keys[0]))
    assert not await refresher.refresh()
    assert engine.version == 2
    assert "is the manifest of solver version 2" in heartbeat_writer.last.note


def test_an_anchor_deleted_by_hand_gives_an_error_that_names_the_chain(run: ObjectStore) -> None:
    loaded = publish(run, models(4, size=3000))
    (anchor,) = data_keys(run, 0)
    run.delete(anchor)
    message = rf"version 3 of solver cannot be read, whose chain is 3 ← 2 ← 1 ← 0: .*{anchor}.* is missing, though its manifest"
    with pytest.raises(CorruptError, match=message):
        reader.read(run, "solver", 3)
    assert right(run, 3, loaded[2])  # a reader that has a version needs no anchor
    run.delete(layout.manifest(layout.weights("solver", 0)))
    with pytest.raises(
        CorruptError,
        match="the chain 3 ← 2 ← 1 starts from version 0, which does not exist any more",
    ):
        reader.read(run, "solver", 3)


@pytest.mark.s3
async def test_a_slow_link_delays_only_new_weights(
    proxy: FlakyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_store(f"s3://{BUCKET}/{uuid4().hex}")
    publish(run, models(2, size=2**19, share=0.2))
    engine, refresher, _ = await worker_at(run, 0)
    monkeypatch.setattr(proxy, "bytes_per_s", 30_000.0)
    beats: list[float] = []

    async def generate() -> None:
        while engine.version == 0:
            await asyncio.sleep(0.01)
            beats.append(time.monotonic())

    generating = asyncio.create_task(generate())
    start_s = time.monotonic()
    assert await refresher.refresh()
    assert time.monotonic() - start_s > 1.0  # the delay of the link
    await generating
    assert len(beats) > 5, "other tasks went on meanwhile"
    assert engine.digest(1) == manifests.read_manifest(run, "solver", 1).digest


def test_a_mirror_with_false_data_is_detected_by_digests_and_home_is_read(run: ObjectStore) -> None:
    home, mirror = run.sub("home"), run.sub("mirror")
    loaded = publish(home, models(4, size=3000))
    while mirror_next(home, mirror) is not None:
        pass
    for version in range(4):
        for key in data_keys(mirror, version):
            _flip(mirror, key, "")
        mirror.put(layout.manifest(layout.weights("solver", version)), b"{}")
    store = read_through_mirror(home, mirror)
    assert right(store, 3)
    assert right(read_through_mirror(home, mirror), 3, loaded[1])


def test_a_lagging_mirror_is_waited_for_and_then_skipped(run: ObjectStore) -> None:
    home, mirror = run.sub("home"), run.sub("mirror")
    loaded = publish(home, models(4, size=3000))
    for _ in range(2):
        mirror_next(home, mirror)
    store = read_through_mirror(home, mirror)
    assert isinstance(store.backend, ReadThrough)
    now_s = 0.0
    store.backend.clock = lambda: now_s
    assert manifests.newer(store, "solver", 0) == loaded[1].manifest
    assert manifests.newer(store, "solver", 1) is None
    now_s = LAG_MAX_S
    assert manifests.newer(store, "solver", 1) == loaded[3].manifest
    assert right(store, 3, loaded[1])


def test_a_publisher_and_readers_of_a_chain_work_concurrently(run: ObjectStore) -> None:
    """Readers at every lag read while versions are published; every version they get is correct."""
    versions = models(12, size=3000)
    first = publish(run, versions[:1])[0]
    wrong: list[str] = []
    over = threading.Event()

    def follow() -> None:
        loaded, spare = reader.read(run, "solver", 0), None
        while loaded.manifest.version < len(versions) - 1 and not over.is_set():
            newest = manifests.newer(run, "solver", loaded.manifest.version)
            if newest is None:
                continue
            loaded, spare = (
                reader.read(run, "solver", newest.version, loaded, manifest=newest, spare=spare),
                loaded,
            )
            if weights_digest(loaded.tensors) != weights_digest(versions[newest.version]):
                wrong.append(f"version {newest.version}")

    readers = [threading.Thread(target=follow) for _ in range(3)]
    for thread in readers:
        thread.start()
    loaded = first
    for version in range(1, len(versions)):
        manifest = publisher.publish(
            run, "solver", version, versions[version], base=loaded, anchor=version % 5 == 0
        )
        loaded = LoadedWeights(manifest, versions[version])
    for thread in readers:
        thread.join(PATIENCE_S)
    over.set()
    assert wrong == []
    assert not any(reader.is_alive() for reader in readers)
