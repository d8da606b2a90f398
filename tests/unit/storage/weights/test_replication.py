from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from storage import layout
from storage.errors import ConfigError, CorruptError, TransientError
from storage.formats.safetensors import weights_digest
from storage.records.progress import MirrorProgress
from storage.records.weights import HostTensor
from storage.store import object_store
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, publisher, reader, replication, retention
from storage.weights.manifests import LoadedWeights
from storage.weights.read_through import LAG_MAX_S, UNREACHABLE_S, ReadThrough, read_through_mirror
from storage.weights.retention import Retention
from storage.weights.traffic import Counting, counted
from tests.support.runs.builders import mirror_next
from tests.support.runs.lifetimes import ScriptedLifetime, progress_of


def model(version: int) -> Mapping[str, HostTensor]:
    bits = np.arange(4000, dtype=np.uint16)
    bits[: 3 * version] += 1
    return {"w": HostTensor("BF16", (4000,), bits)}


@dataclass
class World:
    home: ObjectStore
    mirror: ObjectStore
    now_s: float = 0.0

    def publish(self, number: int) -> None:
        loaded: LoadedWeights | None = None
        for version in range(number):
            tensors = model(version)
            loaded = LoadedWeights(
                publisher.publish(self.home, "solver", version, tensors, base=loaded), tensors
            )

    def copy_all(self) -> int:
        num_bytes = 0
        while (copied := mirror_next(self.home, self.mirror)) is not None:
            newest = manifests.latest(self.mirror, "solver") or 0
            num_bytes += copied.num_bytes + replication.copy_files(
                self.home, self.mirror, "solver", newest, copied.pending
            )
        return num_bytes

    def near(self, mirror: ObjectStore | None = None) -> tuple[ObjectStore, Counting, Counting]:
        """The reader of a worker in the region, with counters at home and at the mirror."""
        home, at_home = counted(self.home)
        near, at_mirror = counted(mirror or self.mirror)
        store = read_through_mirror(home, near)
        assert isinstance(store.backend, ReadThrough)
        store.backend.clock = lambda: self.now_s
        return store, at_home, at_mirror


@pytest.fixture
def world() -> World:
    home, mirror = (open_store(f"memory://{uuid4().hex}").sub("runs/one") for _ in range(2))
    return World(home, replace(mirror, patience_s=1e-6))


def damage(store: ObjectStore, version: int) -> None:
    (key,) = (
        key for key in store.list(layout.weights("solver", version)) if key.endswith(".safetensors")
    )
    body = bytearray(store.get(key))
    body[-30] ^= 1
    store.put(key, bytes(body))


def manifest_bytes(store: ObjectStore) -> int:
    """Bytes of all manifests."""
    return sum(
        len(store.get(key))
        for key in store.list("weights/solver")
        if key.endswith("/manifest.json")
    )


def test_each_version_is_copied_once_and_then_read_from_the_mirror(world: World) -> None:
    world.publish(4)
    crossed = world.copy_all()
    store, at_home, at_mirror = world.near()
    assert manifests.latest(store, "solver") == 3
    assert weights_digest(reader.fetch(store, "solver", 3)) == weights_digest(model(3))
    assert at_home.weights()["solver"] == manifest_bytes(
        world.home
    )  # the list of versions comes from home, the data from the mirror
    assert 0 < at_mirror.weights()["solver"] <= crossed
    assert world.copy_all() == 0


def test_a_large_file_is_read_in_parts_from_the_mirror_and_on_retry_from_home(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES_MIN", 1000)
    monkeypatch.setattr(object_store, "PART_BYTES_MAX", 1000)
    world.publish(1)
    world.copy_all()
    (key,) = (
        key for key in world.home.list(layout.weights("solver", 0)) if key.endswith(".safetensors")
    )
    body = world.home.get(key)
    damage(world.mirror, 0)
    wrong = world.mirror.get(key)
    assert len(body) == len(wrong) > 8000
    store, at_home, at_mirror = world.near()
    assert store.get(key, len(body)) == wrong
    assert (at_home.weights(), at_mirror.weights()) == ({}, {"solver": len(body)})
    assert store.get(key, len(body)) == body  # a reader retries after an invalid file
    assert (at_home.weights(), at_mirror.weights()) == (
        {"solver": len(body)},
        {"solver": len(body)},
    )


def test_a_lagging_mirror_is_waited_for_and_then_skipped(world: World) -> None:
    world.publish(2)
    world.copy_all()
    tensors = model(2)
    loaded = reader.read(world.home, "solver", 1)
    publisher.publish(world.home, "solver", 2, tensors, base=loaded)
    store, at_home, _ = world.near()
    assert manifests.latest(store, "solver", 1) == 1
    world.now_s = LAG_MAX_S + 1
    assert manifests.latest(store, "solver", 1) == 2
    assert weights_digest(reader.read(store, "solver", 2, loaded).tensors) == weights_digest(
        tensors
    )
    assert at_home.weights()["solver"] > sum(
        file.num_bytes for file in manifests.read_manifest(world.home, "solver", 2).files
    )


def test_a_mirror_with_false_data_is_detected_and_home_is_read(world: World) -> None:
    world.publish(3)
    world.copy_all()
    damage(world.mirror, 2)
    store, at_home, _ = world.near()
    assert weights_digest(reader.fetch(store, "solver", 2)) == weights_digest(model(2))
    assert at_home.weights()["solver"] > manifest_bytes(world.home)
    damage(world.home, 2)
    with pytest.raises(CorruptError, match="is not what its manifest lists"):
        reader.fetch(world.near()[0], "solver", 2)


def test_an_unreachable_mirror_is_skipped(world: World) -> None:
    world.publish(2)

    class Away:
        def read(self, key: str) -> bytes:
            raise TransientError("no route")

        def exists(self, key: str) -> bool:
            raise TransientError("no route")

    store, *_ = world.near(replace(world.mirror, backend=Away()))  # type: ignore[arg-type]
    assert manifests.latest(store, "solver") == 1
    assert weights_digest(reader.fetch(store, "solver", 1)) == weights_digest(model(1))


def test_a_mirror_killed_between_two_files_has_no_partial_version(world: World) -> None:
    world.publish(2)
    world.copy_all()
    world.mirror.delete(
        layout.manifest(layout.weights("solver", 1))
    )  # killed before its last write
    store, *_ = world.near()
    assert manifests.latest(store, "solver") == 0
    world.copy_all()
    assert manifests.latest(store, "solver") == 1


def test_retired_versions_are_mirrored_without_their_data(world: World) -> None:
    world.publish(12)
    tensors = model(12)
    publisher.publish(
        world.home, "solver", 12, tensors
    )  # an anchor: later versions do not need the earlier ones
    now_s = float(manifests.read_manifest(world.home, "solver", 12).created_s) + 1.0
    retention.retire(
        world.home,
        retention.plan(world.home, "solver", Retention(last=1, every=0, grace_s=0.0), now_s),
    )
    world.copy_all()
    store, at_home, _ = world.near()
    assert manifests.latest(store, "solver") == 12
    assert weights_digest(reader.fetch(store, "solver", 12)) == weights_digest(tensors)
    assert at_home.weights()["solver"] == len(
        world.home.get(layout.manifest(layout.weights("solver", 12)))
    )


def test_the_mirror_service_copies_each_policy_survives_outages_and_counts_bytes(
    world: World,
) -> None:
    world.publish(3)
    publisher.publish(world.home, "verifier", 0, model(0))

    def on_wait(seconds: float) -> bool:
        if len(lifetime.waits_s) == 3:
            damage(world.home, 2)  # bytes are copied unchanged and verified by the reader
        return len(lifetime.waits_s) == 9

    lifetime = ScriptedLifetime(world.home, "mirror", on_wait)
    replication.replicate(lifetime, world.mirror, ["solver", "verifier"])
    heartbeat_writer = lifetime.heartbeat
    assert (
        manifests.latest(world.mirror, "solver"),
        manifests.latest(world.mirror, "verifier"),
    ) == (2, 0)
    assert heartbeat_writer.last.versions == {"solver": 2, "verifier": 0}
    folder = layout.weights("solver", 0)
    assert (
        progress_of(heartbeat_writer.last, MirrorProgress).mirrored_bytes["solver"]
        > sum(len(world.home.get(key)) for key in world.home.list(folder)) / 2
    )
    assert set(lifetime.waits_s) == {0.0, replication.POLL_INTERVAL_S}


def test_the_home_of_another_run_is_no_mirror(world: World) -> None:
    """Who writes `run.json` chooses the mirror, and could name a store of somebody else."""
    world.publish(3)
    world.home.create(layout.RUN, b'{"a": 1}')
    world.mirror.create(layout.RUN, b"{}")
    with pytest.raises(
        ConfigError, match=r"has a run\.json: it is the home of a run and no mirror"
    ):
        replication.replicate(
            ScriptedLifetime(world.home, "mirror", no_stop), world.mirror, ["solver"]
        )
    assert list(world.mirror.list("")) == [layout.RUN]


def test_a_copy_of_a_run_may_be_its_mirror(world: World) -> None:
    world.publish(3)
    world.home.create(layout.RUN, b"{}")
    world.mirror.create(layout.RUN, b"{}")
    replication.replicate(
        ScriptedLifetime(world.home, "mirror", no_stop), world.mirror, ["solver"], last=2
    )
    assert manifests.latest(world.mirror, "solver") == 2


def test_a_mirror_reports_the_base_models_it_waits_for(world: World) -> None:
    messages: list[tuple[str, str, str]] = []

    def next_look(seconds: float) -> bool:
        heartbeat = lifetime.heartbeat.last
        messages.append((heartbeat.state, heartbeat.wait_reason, heartbeat.note))
        if len(messages) == 2:
            world.publish(1)
        if len(messages) == 3:
            publisher.publish(world.home, "verifier", 0, model(0))
        return len(messages) == 4

    lifetime = ScriptedLifetime(world.home, "mirror", next_look)
    replication.replicate(lifetime, world.mirror, ["solver", "verifier"])
    assert messages == [
        ("starting", "", ""),
        ("waiting", "base_model", "waits for the base model of solver, verifier"),
        ("waiting", "base_model", "waits for the base model of verifier"),
        ("working", "", ""),
    ]


def test_a_stalled_mirror_delays_its_workers_once_and_not_per_version(
    world: World,
) -> None:
    world.publish(8)
    mirror_next(world.home, world.mirror)
    store, *_ = world.near()
    assert manifests.latest(store, "solver") == 0
    world.now_s = LAG_MAX_S + 1
    assert manifests.latest(store, "solver") == 7
    world.copy_all()
    assert manifests.latest(store, "solver") == 7


def test_objects_of_another_run_in_a_mirror_are_not_used(world: World) -> None:
    world.publish(3)
    world.copy_all()
    for key in world.home.list("weights"):
        world.home.delete(key)
    publisher.publish(world.home, "solver", 0, model(5))
    store, *_ = world.near()
    assert manifests.latest(store, "solver") == 0
    assert weights_digest(reader.fetch(store, "solver", 0)) == weights_digest(model(5))


def test_a_mirror_that_falls_further_behind_is_skipped(
    world: World,
) -> None:
    """Home publishes a version per second; the mirror copies one in four."""
    world.publish(1)
    world.copy_all()
    store, *_ = world.near()
    loaded = reader.read(store, "solver", 0)
    furthest = 0
    for second in range(1, 41):
        world.now_s = float(second)
        tensors = model(second)
        publisher.publish(
            world.home,
            "solver",
            second,
            tensors,
            base=LoadedWeights(
                manifests.read_manifest(world.home, "solver", second - 1), model(second - 1)
            ),
        )
        if second % 4 == 0:
            mirror_next(world.home, world.mirror)
        if result := manifests.newer(store, "solver", loaded.manifest.version):
            loaded = reader.read(store, "solver", result.version, loaded)
        furthest = max(furthest, second - loaded.manifest.version)
    assert furthest <= LAG_MAX_S + 2
    assert loaded.manifest.version >= 39


def test_a_mirror_one_version_behind_is_in_time(world: World) -> None:
    world.publish(1)
    world.copy_all()
    store, at_home, _ = world.near()
    loaded = reader.read(store, "solver", 0)
    for second in range(1, 60):
        world.now_s = float(second)
        before = LoadedWeights(
            manifests.read_manifest(world.home, "solver", second - 1), model(second - 1)
        )
        publisher.publish(world.home, "solver", second, model(second), base=before)
        if result := manifests.newer(store, "solver", loaded.manifest.version):
            loaded = reader.read(store, "solver", result.version, loaded)
        mirror_next(world.home, world.mirror)  # directly after the worker's poll
    assert loaded.manifest.version == 58
    read = sum(
        len(world.home.get(key))
        for key in world.home.list("weights/solver")
        if key.endswith("/manifest.json")
    )
    assert at_home.weights()["solver"] <= 2 * read  # manifests only


def test_a_mirror_that_does_not_respond_is_requested_again_only_after_a_pause(world: World) -> None:
    world.publish(3)
    requested: list[str] = []

    class Hangs:
        def read(self, key: str) -> bytes:
            requested.append(key)
            raise TransientError("timed out")

        def exists(self, key: str) -> bool:
            requested.append(key)
            raise TransientError("timed out")

    store, *_ = world.near(replace(world.mirror, backend=Hangs()))  # type: ignore[arg-type]
    assert manifests.latest(store, "solver") == 2
    assert weights_digest(reader.fetch(store, "solver", 2)) == weights_digest(model(2))
    assert len(requested) == 1
    world.now_s = UNREACHABLE_S
    assert manifests.latest(store, "solver") == 2
    assert len(requested) == 2


def test_a_mirror_of_another_run_with_the_same_id_is_refused(world: World) -> None:
    world.publish(2)
    publisher.publish(world.mirror, "solver", 0, model(7))
    with pytest.raises(
        ConfigError, match=f"{world.mirror.url} mirrors another run of this name; empty it"
    ):
        replication.replicate(
            ScriptedLifetime(world.home, "mirror", no_stop), world.mirror, ["solver"]
        )


def test_a_version_without_a_manifest_at_home_is_skipped(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.publish(6)
    world.home.delete(layout.manifest(layout.weights("solver", 3)))
    lifetime = ScriptedLifetime(world.home, "mirror", lambda seconds: len(lifetime.waits_s) > 20)
    replication.replicate(lifetime, world.mirror, ["solver"], last=5)
    assert [
        version for version in range(7) if manifests.exists(world.mirror, "solver", version)
    ] == [
        0,
        1,
        2,
        4,
        5,
    ]
    assert lifetime.heartbeat.last.versions == {"solver": 5}
    assert caplog.messages.count("version 3 of solver is missing and is not mirrored") == 1


def lose_manifest(home: ObjectStore, version: int) -> str:
    key = layout.manifest(layout.weights("solver", version))
    home.put(key, b"{}")
    return key


def lose_data(home: ObjectStore, version: int) -> str:
    folder = layout.weights("solver", version)
    (key,) = (key for key in home.list(folder) if key.endswith(".safetensors"))
    home.delete(key)
    return key


@pytest.mark.parametrize("lose", [lose_manifest, lose_data])
@pytest.mark.parametrize("damaged", [[3], [2, 3, 4]])
def test_versions_that_are_damaged_at_home_do_not_block_later_ones(
    world: World, damaged: list[int], lose: Callable[[ObjectStore, int], str]
) -> None:
    world.publish(5)
    publish_more(world.home, range(5, 7), anchors=range(5, 6))
    keys = [lose(world.home, version) for version in damaged]
    notes: list[str] = []
    lifetime = ScriptedLifetime(
        world.home, "mirror", lambda seconds: notes.append(lifetime.heartbeat.last.note)
    )
    replication.replicate(lifetime, world.mirror, ["solver"], last=6)
    found = [note for note in notes if note]
    assert len(found) == len(damaged)
    for note, version, key in zip(found, damaged, keys, strict=True):
        assert note.startswith(f"version {version} of solver is mirrored without its data: ")
        assert key in note
    assert max(lifetime.waits_s) <= replication.POLL_INTERVAL_S
    assert lifetime.heartbeat.last.note == ""
    store, at_home, _ = world.near()
    assert manifests.latest(store, "solver") == 6
    assert weights_digest(reader.fetch(store, "solver", 6)) == weights_digest(model(6))
    assert at_home.weights()["solver"] < model(6)["w"].bits.nbytes  # manifests only


def test_a_damaged_version_before_a_lost_one_does_not_block_later_ones(world: World) -> None:
    world.publish(5)
    publish_more(world.home, range(5, 7), anchors=range(5, 6))
    lose_manifest(world.home, 3)
    world.home.delete(layout.manifest(layout.weights("solver", 4)))
    kept(world, no_stop, last=6)
    assert manifests.latest(world.mirror, "solver") == 6


def test_a_folder_in_the_place_of_a_manifest_does_not_block_later_versions(
    world: World, tmp_path: Path
) -> None:
    local = World(open_store(str(tmp_path)).sub("runs/one"), world.mirror)
    local.publish(4)
    manifest = tmp_path / "runs/one" / layout.manifest(layout.weights("solver", 2))
    manifest.unlink()
    manifest.mkdir()
    kept(local, no_stop, last=3)
    assert manifests.latest(world.mirror, "solver") == 3


def test_a_damaged_newest_version_is_copied_after_it_was_put_back(world: World) -> None:
    world.publish(3)
    key = layout.manifest(layout.weights("solver", 2))
    body = world.home.get(key)
    world.home.put(key, b"{}")

    def put_back(seconds: float) -> None:
        if lifetime.heartbeat.last.note.startswith(f"solver is not mirrored: {key} "):
            world.home.put(key, body)

    lifetime = ScriptedLifetime(world.home, "mirror", put_back)
    replication.replicate(lifetime, world.mirror, ["solver"], last=2)
    assert weights_keys(world.mirror) == weights_keys(world.home)


def test_a_failing_policy_delays_the_others_for_the_first_pauses_only(world: World) -> None:
    world.publish(2)
    lose_manifest(world.home, 1)
    for version in range(3):
        publisher.publish(world.home, "verifier", version, model(version))
    held = [world.home.get(layout.manifest(layout.weights("verifier", n))) for n in (1, 2)]
    for number in (1, 2):
        world.home.delete(layout.manifest(layout.weights("verifier", number)))

    def on_wait(seconds: float) -> bool:
        if seconds == 4.0 and held:
            number = 3 - len(held)
            world.home.put(layout.manifest(layout.weights("verifier", number)), held.pop(0))
        return len(lifetime.waits_s) == 15

    lifetime = ScriptedLifetime(world.home, "mirror", on_wait)
    replication.replicate(lifetime, world.mirror, ["solver", "verifier"])
    assert manifests.latest(world.mirror, "verifier") == 2
    assert lifetime.waits_s[2:] == [*[0.5, 1.0, 2.0, 4.0, 0.0] * 2, 0.5, 1.0, 2.0]


def test_a_version_that_cannot_be_mirrored_is_not_fetched_repeatedly(world: World) -> None:
    world.publish(3)
    manifest = manifests.read_manifest(world.home, "solver", 2)
    (key,) = (
        key for key in world.home.list(layout.weights("solver", 2)) if key.endswith(".safetensors")
    )
    assert key.endswith(manifest.files[0].name)
    world.home.delete(key)
    home, counting = counted(world.home)
    lifetime = ScriptedLifetime(home, "mirror", lambda seconds: len(lifetime.waits_s) > 12)
    replication.replicate(lifetime, world.mirror, ["solver"])
    assert lifetime.waits_s[3:] == [0.5, 1.0, 2.0, 4.0, 8.0, *[10.0] * 5]
    assert lifetime.heartbeat.last.note.startswith("solver is not mirrored: ")
    assert manifests.latest(world.mirror, "solver") == 1
    assert (
        counting.weights()["solver"]
        < 20 * len(world.home.get(layout.manifest(layout.weights("solver", 2)))) + 20_000
    )


def test_a_lost_bucket_is_waited_for_and_one_that_never_existed_is_refused(
    world: World,
) -> None:
    world.publish(3)
    broken = [False]

    class MayLackItsBucket:
        def __getattr__(self, verb: str) -> Any:
            if broken[0]:
                raise ConfigError("the bucket eu does not exist")
            return getattr(world.mirror.backend, verb)

    mirror = replace(world.mirror, backend=MayLackItsBucket())  # type: ignore[arg-type]
    rounds = iter(range(8))

    def on_wait(seconds: float) -> bool:
        number = next(rounds, None)
        broken[0] = number in (2, 3, 4)
        return number is None

    lifetime = ScriptedLifetime(world.home, "mirror", on_wait)
    replication.replicate(lifetime, mirror, ["solver"])
    assert lifetime.waits_s[3:6] == [0.5, 1.0, 2.0]
    assert manifests.latest(world.mirror, "solver") == 2
    broken[0] = True
    with pytest.raises(ConfigError, match="bucket eu"):
        replication.replicate(ScriptedLifetime(world.home, "mirror", no_stop), mirror, ["solver"])


def publish_more(home: ObjectStore, versions: range, anchors: range) -> None:
    """A run whose next version follows the one before the first of `versions`."""
    loaded = reader.read(home, "solver", versions[0] - 1)
    for version in versions:
        tensors = model(version)
        loaded = LoadedWeights(
            publisher.publish(
                home, "solver", version, tensors, base=loaded, anchor=version in anchors
            ),
            tensors,
        )


def kept(world: World, on_wait: Callable[[float], bool], last: int) -> ScriptedLifetime:
    lifetime = ScriptedLifetime(world.home, "mirror", on_wait)
    replication.replicate(lifetime, world.mirror, ["solver"], last)
    return lifetime


def weights_keys(store: ObjectStore) -> set[str]:
    return set(store.list(layout.WEIGHTS))


def test_an_anchor_is_published_with_its_changes_and_its_whole_tensors_follow_later(
    world: World,
) -> None:
    world.publish(3)
    world.copy_all()
    publish_more(world.home, range(3, 4), anchors=range(3, 4))
    anchor = manifests.read_manifest(world.home, "solver", 3)
    whole = {f"{layout.weights('solver', 3)}/{file.name}" for file in anchor.files}
    shown: list[tuple[int | None, bool]] = []

    def on_wait(seconds: float) -> bool:
        shown.append(
            (manifests.latest(world.mirror, "solver"), whole <= weights_keys(world.mirror))
        )
        if len(shown) == 2:
            publish_more(world.home, range(4, 6), anchors=range(0))
        return False

    heartbeat_writer = kept(world, on_wait, last=5).heartbeat
    assert shown == [(2, False), (3, False), (4, False), (5, False)]
    assert weights_keys(world.mirror) == weights_keys(world.home)
    assert progress_of(heartbeat_writer.last, MirrorProgress).mirrored_bytes["solver"] == sum(
        len(world.home.get(key)) for key in weights_keys(world.home) if int(key.split("/")[2]) >= 3
    )


def test_the_reader_of_an_anchors_predecessor_uses_the_mirror_and_a_new_reader_home(
    world: World,
) -> None:
    world.publish(3)
    world.copy_all()
    publish_more(world.home, range(3, 4), anchors=range(3, 4))
    assert mirror_next(world.home, world.mirror) is not None
    store, at_home, _ = world.near()
    loaded = reader.read(store, "solver", 2)
    before = at_home.weights()["solver"]
    assert weights_digest(reader.read(store, "solver", 3, loaded).tensors) == weights_digest(
        model(3)
    )
    manifest_bytes = len(world.home.get(layout.manifest(layout.weights("solver", 3))))
    assert at_home.weights()["solver"] - before == manifest_bytes
    store, at_home, _ = world.near()
    assert weights_digest(reader.fetch(store, "solver", 3)) == weights_digest(model(3))
    assert at_home.weights()["solver"] > manifest_bytes


def test_a_mirror_killed_before_the_whole_tensors_of_an_anchor_fetches_them_on_restart(
    world: World,
) -> None:
    world.publish(3)
    world.copy_all()
    publish_more(world.home, range(3, 5), anchors=range(3, 4))
    for _ in range(2):
        mirror_next(world.home, world.mirror)
    assert len(weights_keys(world.home) - weights_keys(world.mirror)) == 1
    kept(world, no_stop, last=4)
    assert weights_keys(world.mirror) == weights_keys(world.home)


def test_an_anchor_retired_before_its_whole_tensors_were_copied_blocks_nothing(
    world: World,
) -> None:
    world.publish(3)
    publish_more(world.home, range(3, 4), anchors=range(3, 4))
    publish_more(world.home, range(4, 6), anchors=range(5, 6))
    polls = 0

    def on_wait(seconds: float) -> bool:
        nonlocal polls
        polls += 1
        if manifests.latest(world.mirror, "solver") == 5 and not world.home.exists(
            layout.retired("solver", 3)
        ):
            wanted = Retention(last=1, every=0, grace_s=0.0)
            retention.retire(world.home, retention.plan(world.home, "solver", wanted, 4e9))
        return False

    kept(world, on_wait, last=5)
    assert weights_digest(reader.fetch(world.mirror, "solver", 5)) == weights_digest(model(5))
    assert polls < 20


def test_a_mirror_unreachable_at_first_completes_its_anchor_later(world: World) -> None:
    world.publish(3)
    world.copy_all()
    publish_more(world.home, range(3, 4), anchors=range(3, 4))
    mirror_next(world.home, world.mirror)
    outage = Flaky(world.home.backend, fails=1)
    home = replace(world.home, backend=outage, patience_s=1e-6)  # type: ignore[arg-type]  # it passes every verb on
    replication.replicate(
        ScriptedLifetime(home, "mirror", no_stop), world.mirror, ["solver"], last=3
    )
    assert outage.failed
    assert weights_keys(world.mirror) == weights_keys(world.home)


@pytest.mark.parametrize("version", [2, 0])
def test_a_damaged_manifest_in_the_mirror_blocks_no_newer_version(
    world: World, version: int
) -> None:
    """That of version 0 is not taken for the base model of another run."""
    world.publish(3)
    world.copy_all()
    world.mirror.put(layout.manifest(layout.weights("solver", version)), b"{}")
    publish_more(world.home, range(3, 5), anchors=range(0))
    kept(world, no_stop, last=4)
    assert manifests.latest(world.mirror, "solver") == 4


def test_a_damaged_base_model_at_home_is_named_and_waited_for(world: World) -> None:
    """The note must not advise to empty the mirror, which has the only undamaged manifest."""
    world.publish(2)
    world.copy_all()
    key = layout.manifest(layout.weights("solver", 0))
    world.home.put(key, b"{}")
    notes: list[str] = []

    def put_back(seconds: float) -> None:
        notes.append(lifetime.heartbeat.last.note)
        if notes[-1]:
            world.home.put(key, world.mirror.get(key))

    lifetime = ScriptedLifetime(world.home, "mirror", put_back)
    replication.replicate(lifetime, world.mirror, ["solver"], last=1)
    assert any(note.startswith(f"solver is not mirrored: {key} ") for note in notes), notes
    assert not any("empty it" in note for note in notes), notes


def test_anchors_published_by_a_concurrent_mirror_are_completed_too(world: World) -> None:
    world.publish(3)
    world.copy_all()
    publish_more(world.home, range(3, 6), anchors=range(3, 4))
    polls = 0

    def on_wait(seconds: float) -> bool:
        nonlocal polls
        polls += 1
        if polls == 1:
            mirror_next(world.home, world.mirror)
            mirror_next(world.home, world.mirror)
        return False

    kept(world, on_wait, last=5)
    assert weights_keys(world.mirror) == weights_keys(world.home)


def test_a_missing_anchor_file_at_home_blocks_nothing(world: World) -> None:
    world.publish(3)
    publish_more(world.home, range(3, 5), anchors=range(3, 4))
    (file,) = manifests.read_manifest(world.home, "solver", 3).files
    world.home.delete(f"{layout.weights('solver', 3)}/{file.name}")
    lifetime = kept(world, no_stop, last=4)
    assert manifests.latest(world.mirror, "solver") == 4
    assert max(lifetime.waits_s) <= replication.POLL_INTERVAL_S


class Flaky:
    """A backend whose first reads of delta manifests fail."""

    def __init__(self, backend: Any, fails: int) -> None:
        self._backend, self._fails, self.failed = backend, fails, False

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._backend, verb)

    def read(self, key: str) -> bytes:
        if self._fails and key.endswith("00000003/manifest.json"):
            self._fails, self.failed = self._fails - 1, True
            raise TransientError("the store is away")
        body: bytes = self._backend.read(key)
        return body


def no_stop(seconds: float) -> bool:
    return False
