import gc
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.coordination import heartbeats
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.formats.safetensors import file_digest, to_safetensors, weights_digest
from storage.records.control import ServiceState
from storage.records.progress import ServiceKind
from storage.records.weights import FileInfo, HostTensor, Manifest, MergedDelta, StoredDelta
from storage.store.memory import MemoryObjects
from storage.store.object_store import ObjectStore
from storage.store.s3 import S3Objects
from storage.verify.violations import Findings
from storage.verify.weights import WeightsAudit
from storage.weights import manifests, publisher, reader, retention, tags
from storage.weights.manifests import LoadedWeights
from storage.weights.retention import Retention, Retired
from tests.support.runs import builders
from tests.support.stores.killed_store import Killed, killed_at
from tests.support.stores.stranger import sealed

DAY_S = 86400.0
VERSIONS = 30


def model(version: int) -> Mapping[str, HostTensor]:
    bits = np.arange(4000, dtype=np.uint16)
    bits[: 3 * version] += 1
    return {"w": HostTensor("BF16", (4000,), bits)}


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """Versions 0 to 29; 0, 10 and 20 are anchors."""
    loaded: LoadedWeights | None = None
    for version in range(VERSIONS):
        tensors = model(version)
        base = loaded if version % 10 else None
        loaded = LoadedWeights(
            publisher.publish(memory_store, "solver", version, tensors, base=base), tensors
        )
    return memory_store


def later_s(run: ObjectStore) -> float:
    return float(manifests.read_manifest(run, "solver", VERSIONS - 1).created_s) + DAY_S


def readable(run: ObjectStore) -> list[int]:
    results = []
    for version in range(VERSIONS):
        try:
            digest = weights_digest(reader.fetch(run, "solver", version))
        except NotFoundError:
            continue
        assert digest == manifests.read_manifest(run, "solver", version).digest
        results.append(version)
    return results


def test_kept_versions_stay_readable_through_whole_chains_and_others_are_retired(
    run: ObjectStore,
) -> None:
    planned = retention.plan(
        run, "solver", Retention(last=2, every=20, versions={"solver": [13]}), later_s(run)
    )
    assert readable(run) == list(range(VERSIONS))  # a plan changes nothing
    retention.retire(run, planned)
    # 28 and 29 need 20 and all versions between; 13 needs 10, 11 and 12
    assert readable(run) == [0, 10, 11, 12, 13, *range(20, 30)] == list(planned.kept)
    assert planned.kept[13] == "named"
    assert planned.kept[12] == "leads to version 13"
    assert planned.kept[20] == "every 20th"
    assert planned.num_bytes > 0
    with pytest.raises(
        NotFoundError,
        match="the data of version 1 of solver, which version 5 needs, was retired on purpose",
    ):
        reader.fetch(run, "solver", 5)


def test_versions_are_named_by_policy_and_number() -> None:
    assert retention.named(["solver@4", "solver@7", "verifier@4"], ["solver", "verifier"]) == {
        "solver": {4, 7},
        "verifier": {4},
    }
    for word in ("solver", "solver@", "solver@x", "solver@²", "slover@4"):
        with pytest.raises(ConfigError, match=f"'{word}' names no version; write POLICY@VERSION"):
            retention.named([word], ["solver"])


def test_an_unknown_version_is_refused_with_the_newest_existing_one(
    run: ObjectStore,
) -> None:
    retention.check_versions_exist(run, {"solver": {0, VERSIONS - 1}})
    retention.check_versions_exist(run, {})
    with pytest.raises(
        ConfigError,
        match=f"there is no solver@{VERSIONS} to keep; the newest is solver@{VERSIONS - 1}",
    ):
        retention.check_versions_exist(run, {"solver": {3, VERSIONS}})
    with pytest.raises(
        ConfigError, match="there is no verifier@0 to keep; verifier has no version yet"
    ):
        retention.check_versions_exist(run, {"verifier": {0}})


def test_merged_deltas_are_retired_with_their_version_and_counted(run: ObjectStore) -> None:
    key, name = layout.merged_delta("solver", 8, 0), f"{'0' * 32}.delta-00000.safetensors"
    before = retention.plan(run, "solver", Retention(last=1, every=0), later_s(run)).num_bytes
    step = StoredDelta(0, {}, (FileInfo(name, 5, "sha256:"),))
    run.put(key, seal(MergedDelta(policy="solver", version=8, step=step)))
    run.put(f"{layout.weights('solver', 8)}/{name}", b"12345")
    planned = retention.plan(run, "solver", Retention(last=1, every=0), later_s(run))
    assert planned.num_bytes == before + 5
    mirror = run.sub("mirror")
    for stored in run.list(layout.WEIGHTS):
        mirror.put(stored, run.get(stored))
    in_mirror = retention.plan_mirror(run, mirror, planned)
    for place in (run, mirror):
        recorded, backend = killed_at(place, number=10**9)
        if place is run:
            retention.retire(recorded, planned)
        else:
            retention.retire_mirror(run, recorded, in_mirror)
        assert not place.exists(key)
        assert not place.exists(f"{layout.weights('solver', 8)}/{name}")
        changes = [change.split(" ") for change in backend.changes]
        deleted = [key for verb, key, *_ in changes if verb == "delete"]
        at_key, at_file = (
            next(at for at, each in enumerate(deleted) if each.endswith(end)) for end in (key, name)
        )
        assert at_key < at_file  # a reader finds no merged delta without its files


def test_unknown_objects_in_the_weights_folder_are_kept(run: ObjectStore) -> None:
    strange = [f"weights/solver/{key}" for key in ("notes.txt", "old/a", "7/a", "٣٣٣٣٣٣٣٣/a")]
    for key in strange:
        run.put(key, b"")
    retention.retire(run, retention.plan(run, "solver", Retention(last=1, every=0), later_s(run)))
    assert all(run.exists(key) for key in strange)


def test_retiring_twice_deletes_nothing_more(run: ObjectStore) -> None:
    wanted = Retention(last=2, every=0)
    retention.retire(run, retention.plan(run, "solver", wanted, later_s(run)))
    again = retention.plan(run, "solver", wanted, later_s(run))
    assert (again.retired, again.num_bytes) == ({}, 0)
    more = retention.plan(run, "solver", Retention(last=2, every=5), later_s(run))
    assert (list(more.kept), more.retired) == (
        [0, *range(20, 30)],
        {},
    )  # a retired version cannot be kept


def test_young_versions_and_those_a_live_worker_may_be_reading_are_kept(
    run: ObjectStore,
) -> None:
    young = retention.plan(
        run, "solver", Retention(last=1, every=0, grace_s=DAY_S), later_s(run) - DAY_S
    )
    assert young.retired == {}
    pulse = HeartbeatWriter(run, "rollout", "rollout-a-0", attempt=0, interval_s=3600.0)
    pulse.update(versions={"solver": 14})
    with pulse:
        pass  # its last beat stands
    beat = heartbeats.readable(run)[0]
    beat_s = beat.beat_s
    left = retention.plan(run, "solver", Retention(last=1, every=0, grace_s=0.0), beat_s + 60.0)
    assert 15 in left.retired  # a worker that has ended needs nothing
    builders.put_heartbeat(run, replace(beat, state=ServiceState.WORKING))
    held = retention.plan(run, "solver", Retention(last=1, every=0, grace_s=0.0), beat_s + 60.0)
    assert held.kept[14] == held.kept[15] == "a live worker or evaluation has loaded version 14"
    assert sorted(held.retired) == list(range(1, 10))  # 10 to 13 lead to 14
    dead = retention.plan(
        run, "solver", Retention(last=1, every=0, grace_s=0.0), beat_s + retention.ALIVE_S
    )
    assert 15 in dead.retired
    barely = retention.plan(
        run, "solver", Retention(last=1, every=0, grace_s=0.0), beat_s + retention.ALIVE_S - 0.5
    )
    assert 15 in barely.kept


READERS: list[tuple[ServiceKind, str, dict[str, int], bool]] = [
    ("rollout", "working", {"solver": 14}, True),
    ("rollout", "draining", {"solver": 14}, True),
    ("evaluation", "working", {"solver": 14}, True),
    ("evaluation", "waiting", {"solver": 14}, True),
    ("rollout", "done", {"solver": 14}, False),
    ("evaluation", "failed", {"solver": 14}, False),
    ("evaluation", "working", {"verifier": 14}, False),
    ("trainer", "working", {"solver": 14}, False),
    ("mirror", "working", {"solver": 14}, False),
    ("dataflow", "working", {"solver": 14}, False),
]


def test_versions_in_use_by_live_workers_and_evaluations_are_kept(
    run: ObjectStore,
) -> None:
    results, beat_s = [], later_s(run)
    for kind, state, versions, _ in READERS:
        heartbeat = builders.heartbeat(
            kind, "one", beat_s=beat_s, started_s=beat_s, state=state, versions=versions
        )
        builders.put_heartbeat(run, heartbeat)
        kept = retention.plan(
            run, "solver", Retention(last=1, every=0, grace_s=0.0), beat_s + 60.0
        ).kept
        run.delete(layout.heartbeat(kind, "one"))
        results.append((kind, state, versions, 14 in kept and 10 in kept))
    assert results == READERS


@pytest.mark.parametrize("kind", ["rollout", "evaluation"])
def test_an_unreadable_heartbeat_keeps_every_version(run: ObjectStore, kind: str) -> None:
    wanted = Retention(last=1, every=0, grace_s=0.0)
    run.put(f"heartbeats/{kind}/a-0.json", b'{"format": 2}')
    with pytest.raises(
        CorruptError,
        match=rf"heartbeats/{kind}/a-0\.json has format 2.*: wait for its next heartbeat",
    ):
        retention.plan(run, "solver", wanted, later_s(run))
    run.delete(f"heartbeats/{kind}/a-0.json")
    for other in (
        f"heartbeats/{kind}/.DS_Store",
        f"heartbeats/{kind}/a-0.json/x",
        f"heartbeats/{kind}.json",
    ):
        run.put(other, b"no heartbeat")
    run.put(
        "heartbeats/trainer/trainer-solver.json", b""
    )  # of a worker that reads no older version
    assert 14 in retention.plan(run, "solver", wanted, later_s(run)).retired


def test_the_oldest_version_among_several_readers_is_kept(run: ObjectStore) -> None:
    beat_s = later_s(run)
    for name, version in (("a", 27), ("b", 23), ("c", 25)):
        heartbeat = builders.heartbeat(
            "evaluation", name, beat_s=beat_s, started_s=beat_s, versions={"solver": version}
        )
        builders.put_heartbeat(run, heartbeat)
    kept = retention.plan(
        run, "solver", Retention(last=1, every=0, grace_s=0.0), beat_s + 60.0
    ).kept
    assert [version for version, why in kept.items() if "has loaded version 23" in why] == list(
        range(23, 29)
    )


def changes_of(planned: retention.RetirementPlan) -> int:
    """The numbers of objects that executing the plan creates and deletes."""
    return len(planned.retired) + sum(len(keys) for keys in planned.retired.values())


def shape(run: ObjectStore) -> list[str]:
    """Every key, without the write ids in the names of data files."""
    return sorted(re.sub(r"[0-9a-f]{32}", "", key) for key in run.list())


def told_of(run: ObjectStore, version: int) -> str:
    """What a reader of the version gets."""
    try:
        tensors = reader.fetch(run, "solver", version)
    except NotFoundError as error:
        return "retired" if "was retired on purpose" in str(error) else str(error)
    return "readable" if weights_digest(tensors) == weights_digest(model(version)) else "damaged"


def chain(store: ObjectStore) -> ObjectStore:
    """Versions 0 to 7; 0 and 4 are anchors, and version 3 has a merged delta and an unlisted file."""
    loaded: LoadedWeights | None = None
    for version in range(8):
        tensors = model(version)
        loaded = LoadedWeights(
            publisher.publish(
                store, "solver", version, tensors, base=loaded if version % 4 else None
            ),
            tensors,
        )
    folder = layout.weights("solver", 3)
    step = StoredDelta(0, {}, (FileInfo(f"{'0' * 32}.delta-00000.safetensors", 5, "sha256:"),))
    store.put(
        layout.merged_delta("solver", 3, 0),
        seal(MergedDelta(policy="solver", version=3, step=step)),
    )
    store.put(f"{folder}/{'0' * 32}.delta-00000.safetensors", b"12345")
    store.put(f"{folder}/{'1' * 32}.model-00000.safetensors", b"cut off")
    return store


@pytest.mark.parametrize("after", [False, True])
def test_gc_killed_at_any_change_loses_no_kept_version_and_the_next_gc_finishes(
    memory_store: ObjectStore, after: bool
) -> None:
    wanted, now_s = Retention(last=2, every=0, grace_s=0.0), 1e12
    whole = chain(memory_store.sub("whole"))
    planned = retention.plan(whole, "solver", wanted, now_s)
    assert sorted(planned.retired) == [1, 2, 3]
    num_changes = changes_of(planned)
    assert num_changes == 9  # three records, three data files, and three more of version 3
    retention.retire(whole, planned)
    for number in range(1, num_changes + 1):
        run = chain(memory_store.sub(f"{after}-{number}"))
        dying, backend = killed_at(run, number, after)
        with pytest.raises(Killed):
            retention.retire(dying, retention.plan(run, "solver", wanted, now_s))
        verbs = [change.partition(" ")[0] for change in backend.changes]
        assert verbs[:3] == ["create"] * len(verbs[:3]), (
            "a version's data was deleted before all records were created"
        )
        assert [told_of(run, version) for version in (0, 4, 5, 6, 7)] == ["readable"] * 5
        for version in (1, 2, 3):  # unchanged, or retired on purpose: never damaged
            assert told_of(run, version) in ("readable", "retired")
        retention.retire(run, retention.plan(run, "solver", wanted, now_s))
        assert shape(run) == shape(whole)


@pytest.mark.parametrize("after", [False, True])
def test_gc_of_a_mirror_killed_at_any_change_shows_no_damage_and_the_next_gc_finishes(
    memory_store: ObjectStore, after: bool
) -> None:
    home = chain(memory_store.sub("home"))
    bodies = {key: home.get(key) for key in home.list()}
    planned = retention.plan(home, "solver", Retention(last=2, every=0, grace_s=0.0), 1e12)
    retention.retire(home, planned)
    for number in range(1, changes_of(planned) + 1):
        mirror = memory_store.sub(f"mirror-{number}")
        for key, body in bodies.items():
            mirror.put(key, body)
        dying, _ = killed_at(mirror, number, after)
        with pytest.raises(Killed):
            retention.retire_mirror(home, dying, retention.plan_mirror(home, mirror, planned))
        assert [told_of(mirror, version) for version in (0, 4, 5, 6, 7)] == ["readable"] * 5
        assert {told_of(mirror, version) for version in (1, 2, 3)} <= {"readable", "retired"}
        retention.retire_mirror(home, mirror, retention.plan_mirror(home, mirror, planned))
        assert shape(mirror) == shape(home)


def test_a_lagging_reader_with_retired_deltas_continues_from_an_anchor(run: ObjectStore) -> None:
    loaded = reader.read(run, "solver", 5)
    retention.retire(run, retention.plan(run, "solver", Retention(last=1, every=0), later_s(run)))
    assert weights_digest(reader.read(run, "solver", 29, loaded).tensors) == weights_digest(
        model(29)
    )


def test_gc_killed_between_the_record_and_the_data_is_finished_by_the_next_one(
    run: ObjectStore,
) -> None:
    planned = retention.plan(run, "solver", Retention(last=1, every=0), later_s(run))
    dying, _ = killed_at(run, len(planned.retired) + 1)
    with pytest.raises(Killed):
        retention.retire(dying, planned)
    assert {key for keys in planned.retired.values() for key in keys} <= set(
        run.list()
    )  # no data has been deleted yet
    run.put(
        f"{layout.weights('solver', 7)}/{'0' * 32}.model-00000.safetensors",
        b"a writer that was cut off",
    )
    retention.retire(run, retention.plan(run, "solver", Retention(last=1, every=0), later_s(run)))
    assert run.list(layout.weights("solver", 7)) == [
        f"{layout.weights('solver', 7)}/manifest.json",
        f"{layout.weights('solver', 7)}/retired.json",
    ]


def test_no_version_of_a_frozen_run_is_retired(run: ObjectStore) -> None:
    planned = retention.plan(run, "solver", Retention(last=1, every=0), later_s(run))
    retention.freeze(run)
    retention.freeze(run)
    with pytest.raises(ConfigError, match="is frozen; thaw it first"):
        retention.retire(run, planned)
    assert readable(run) == list(range(VERSIONS))
    retention.thaw(run)
    retention.retire(run, planned)
    assert readable(run) == [0, *range(20, 30)]


def audited(run: ObjectStore) -> list[str]:
    """Objects of the violations that the audit finds, without the missing batches."""
    findings = Findings()
    WeightsAudit(run, "solver", findings).audit(-1, lambda what, share: None)
    return [
        violation.where
        for violation in findings.violations()
        if not violation.where.startswith("batches/")
    ]


def test_the_audit_skips_retired_versions_and_checks_a_partly_retired_one(
    run: ObjectStore,
) -> None:
    planned = retention.plan(run, "solver", Retention(last=1, every=0), later_s(run))
    bodies = {number: run.get(planned.retired[number][0]) for number in (10, 11, 15)}
    retention.retire(run, planned)
    assert audited(run) == []
    for (
        number,
        body,
    ) in bodies.items():  # as if killed before these were deleted; 15 lacks its update path
        run.put(planned.retired[number][0], body)
    assert audited(run) == []
    run.put(planned.retired[11][0], bodies[11][:-1] + bytes([bodies[11][-1] ^ 1]))
    assert audited(run) == [layout.weights("solver", 11)]


def test_the_audit_returns_each_versions_digest_with_two_manifests_in_memory_at_most(
    run: ObjectStore,
) -> None:
    alive: list[int] = []

    def progress(what: str, share: float) -> None:
        alive.append(sum(type(item) is Manifest for item in gc.get_objects()))

    gc.freeze()  # else the many objects of other tests are looked through at each call of progress
    try:
        digests = WeightsAudit(run, "solver", Findings()).audit(-1, progress)
    finally:
        gc.unfreeze()
    assert digests == {version: weights_digest(model(version)) for version in range(VERSIONS)}
    assert max(alive) <= alive[0] + 2


def test_a_delta_without_changes_is_retired_with_its_update_path(
    memory_store: ObjectStore,
) -> None:
    """It has no data files, but is unreadable without its base."""
    loaded: LoadedWeights | None = None
    for version in range(12):
        tensors = model(version // 3)  # two of three versions equal the previous one
        loaded = LoadedWeights(
            publisher.publish(
                memory_store, "solver", version, tensors, base=loaded, anchor=version == 10
            ),
            tensors,
        )
    assert loaded is not None
    keep_last, now_s = (
        Retention(last=1, every=0, grace_s=0.0),
        float(loaded.manifest.created_s) + 1.0,
    )
    retention.retire(memory_store, retention.plan(memory_store, "solver", keep_last, now_s))
    for version in range(1, 10):
        record = unseal(
            Retired,
            memory_store.get(layout.retired("solver", version)),
            layout.retired("solver", version),
        )
        assert (record.policy, record.version) == ("solver", version)
    assert audited(memory_store) == []
    assert retention.plan(memory_store, "solver", keep_last, now_s).retired == {}
    more = replace(keep_last, last=4, versions={"solver": [2]})
    # 7 and 8 have no files, and 6, from which they are read, is deleted; 1 and 2 are read from 0.
    planned = retention.plan(memory_store, "solver", more, now_s)
    assert (planned.returned, list(planned.kept)) == ((1, 2), [0, 1, 2, 10, 11])
    unchanged = manifests.read_manifest(memory_store, "solver", 8)
    assert manifests.is_retired(memory_store, unchanged)
    for version in (6, 7):
        memory_store.delete(layout.retired("solver", version))
    assert not manifests.is_retired(memory_store, unchanged)


def test_gc_always_keeps_the_newest_version_and_refuses_to_keep_none() -> None:
    assert Retention(last=1, every=0, grace_s=0.0) == Retention(1, 0, None, 0.0)
    for last, every in ((0, 0), (0, 5), (1, -1)):
        with pytest.raises(
            ConfigError,
            match=f"keep the newest {last}, every {every}th and what is younger than 5 s",
        ):
            Retention(last=last, every=every, grace_s=5.0)


@pytest.mark.parametrize("grace_s", [float("nan"), float("inf"), -1.0])
def test_an_invalid_age_is_refused(grace_s: float) -> None:
    with pytest.raises(
        ConfigError, match="the first is at least 1, the others are finite and at least 0"
    ):
        Retention(grace_s=grace_s)


@pytest.mark.parametrize("missing", [0, 3, 16])
def test_nothing_is_retired_while_a_manifest_is_missing(run: ObjectStore, missing: int) -> None:
    key = layout.manifest(layout.weights("solver", missing))
    body = run.get(key)
    run.delete(key)
    with pytest.raises(
        CorruptError, match=f"version {missing} of solver is missing, version 29 exists"
    ):
        retention.plan(run, "solver", Retention(last=1), 0.0)
    run.create(key, body)
    assert retention.plan(run, "solver", Retention(last=1), later_s(run)).retired


def anchored(store: ObjectStore) -> ObjectStore:
    """Versions 0 to 11; 0, 4 and 8 are anchors, and 4 and 8 carry their deltas."""
    loaded: LoadedWeights | None = None
    for version in range(12):
        tensors = model(version)
        loaded = LoadedWeights(
            publisher.publish(
                store, "solver", version, tensors, base=loaded, anchor=version % 4 == 0
            ),
            tensors,
        )
    return store


def anchor_file(run: ObjectStore, version: int) -> str:
    manifest = manifests.read_manifest(run, "solver", version)
    assert (manifest.kind, manifest.step is not None) == ("anchor", True)
    return f"{layout.weights('solver', version)}/{manifest.files[0].name}"


def flip_last_bit(run: ObjectStore, key: str) -> None:
    body = run.get(key)
    run.put(key, body[:-1] + bytes([body[-1] ^ 1]))


TWO = Retention(last=2, every=0, grace_s=0.0)
FOUR = "leads to version 4, whose own tensors are damaged"
EIGHT = "leads to version 8, whose own tensors are damaged"


@pytest.mark.parametrize("damage", [ObjectStore.delete, flip_last_bit])
def test_an_anchor_that_lost_its_tensors_keeps_the_chain_to_the_anchor_before(
    memory_store: ObjectStore, damage: Callable[[ObjectStore, str], None]
) -> None:
    run = anchored(memory_store)
    damage(run, anchor_file(run, 8))
    planned = retention.plan(run, "solver", TWO, 1e12)
    assert {version: planned.kept[version] for version in (4, 5, 6, 7)} == dict.fromkeys(
        (4, 5, 6, 7), EIGHT
    )
    assert sorted(planned.retired) == [1, 2, 3]
    retention.retire(run, planned)
    assert [told_of(run, version) for version in (0, *range(4, 12))] == ["readable"] * 9


@pytest.mark.parametrize("damage", [ObjectStore.delete, flip_last_bit])
def test_two_damaged_anchors_keep_the_chain_to_the_anchor_before_both(
    memory_store: ObjectStore, damage: Callable[[ObjectStore, str], None]
) -> None:
    run = anchored(memory_store)
    for version in (4, 8):
        damage(run, anchor_file(run, version))
    planned = retention.plan(run, "solver", TWO, 1e12)
    assert [planned.kept[version] for version in (1, 3, 4, 7, 9)] == [
        FOUR, FOUR, EIGHT, EIGHT, "leads to version 10",
    ]  # fmt: skip
    assert planned.retired == {}
    retention.retire(run, planned)
    assert told_of(run, 11) == "readable"


def test_only_anchors_whose_older_versions_are_deleted_are_read(memory_store: ObjectStore) -> None:
    run = anchored(memory_store)
    for version in (4, 8):
        flip_last_bit(run, anchor_file(run, version))
    by_manifests = retention.plan(run, "solver", TWO, 1e12, verify=False)
    assert sorted(by_manifests.retired) == [1, 2, 3, 4, 5, 6, 7]
    seven = Retention(last=2, every=0, versions={"solver": [7]}, grace_s=0.0)
    planned = retention.plan(run, "solver", seven, 1e12)  # 4 to 7 are kept without anchor 8
    assert [planned.kept[version] for version in (1, 6, 7)] == [FOUR, "leads to version 7", "named"]
    assert planned.retired == {}


def rewrite(run: ObjectStore, version: int, **fields: object) -> None:
    """Replace fields of a manifest."""
    key = layout.manifest(layout.weights("solver", version))
    run.put(key, sealed({**json.loads(run.get(key)), **fields}))


@pytest.mark.parametrize("fields", [{"entry": "x"}, {"digest": "xxh3_128:" + "0" * 32}])
def test_an_anchor_whose_files_have_other_tensors_than_listed_keeps_the_versions_before(
    memory_store: ObjectStore, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = anchored(memory_store)
    key = layout.manifest(layout.weights("solver", 8))
    body = run.get(key)
    info = manifests.read_manifest(run, "solver", 8).tensors["w"]
    infos = {"w": replace(info, **fields)}
    listed = {name: asdict(info) for name, info in infos.items()}
    rewrite(run, 8, tensors=listed, digest=weights_digest(infos))
    planned = retention.plan(run, "solver", TWO, 1e12)
    assert [planned.kept[version] for version in (4, 5, 6, 7)] == [EIGHT] * 4
    assert "version 8 of solver needs the versions before it until" in caplog.text
    retention.retire(run, planned)
    run.delete(anchor_file(run, 8))
    run.put(key, body)
    assert [told_of(run, version) for version in (0, *range(4, 12))] == ["readable"] * 9


@pytest.mark.parametrize(
    ("wrong", "kept"),
    [("nothing", None), ("an entry of another file", EIGHT), ("another codec", EIGHT)],
)
def test_an_anchor_of_several_files_that_its_readers_refuse_keeps_the_versions_before(
    memory_store: ObjectStore, wrong: str, kept: str | None
) -> None:
    run = anchored(memory_store)
    folder, tensors = layout.weights("solver", 8), model(8)
    first, second = (f"{letter * 32}.model-00000.safetensors" for letter in "ab")
    metadata = {"format": "astraflow.delta", "codec": "x"} if wrong == "another codec" else {}
    bodies = {
        first: to_safetensors(tensors, metadata),
        second: to_safetensors({"x": tensors["w"]}),
    }
    files = [
        FileInfo(name=name, num_bytes=len(body), digest=file_digest(body))
        for name, body in bodies.items()
    ]
    for name, body in bodies.items():
        run.create(f"{folder}/{name}", body)
    info = manifests.read_manifest(run, "solver", 8).tensors["w"]
    entry = "x" if wrong == "an entry of another file" else "w"
    infos = {
        "w": replace(info, file=first, entry=entry),
        "x": replace(info, file=second, entry="x"),
    }
    listed = {name: asdict(info) for name, info in infos.items()}
    rewrite(run, 8, tensors=listed, digest=weights_digest(infos), files=[asdict(f) for f in files])
    planned = retention.plan(run, "solver", TWO, 1e12)
    assert [planned.kept.get(version) for version in (4, 5, 6, 7)] == [kept] * 4


def test_a_record_without_a_deletion_does_not_end_the_chain(memory_store: ObjectStore) -> None:
    """An interrupted gc has recorded versions, and has deleted nothing of them."""
    run = anchored(memory_store)
    planned = retention.plan(run, "solver", TWO, 1e12)
    for version in planned.retired:
        run.create(layout.retired("solver", version), b"{}")
    run.delete(anchor_file(run, 8))
    planned = retention.plan(run, "solver", TWO, 1e12)
    assert [planned.kept[version] for version in (4, 5, 6, 7)] == [EIGHT] * 4
    retention.retire(run, planned)
    assert [told_of(run, version) for version in (0, *range(4, 12))] == ["readable"] * 9


def test_an_interrupted_gc_is_finished_though_versions_that_lost_their_bases_are_wanted(
    memory_store: ObjectStore,
) -> None:
    run = anchored(memory_store)
    planned = retention.plan(run, "solver", TWO, 1e12)
    for version in planned.retired:
        run.create(layout.retired("solver", version), b"{}")
    for key in planned.retired[5]:
        run.delete(key)
    manifest = manifests.read_manifest(run, "solver", 4)
    assert manifest.step is not None
    run.delete(f"{layout.weights('solver', 4)}/{manifest.step.files[0].name}")
    wanted = replace(TWO, versions={"solver": [2, 4, 7]})
    planned = retention.plan(run, "solver", wanted, 1e12)
    assert list(planned.kept) == [0, 1, 2, 4, 8, 9, 10, 11]
    assert planned.returned == (1, 2, 4)  # the delta of 4 is deleted, its own tensors are not
    assert planned.lost == (7,)
    assert sorted(planned.retired) == [3, 6, 7]
    assert [
        manifests.is_retired(run, manifests.read_manifest(run, "solver", version))
        for version in (2, 5, 6, 7)
    ] == [False, True, True, True]
    retention.retire(run, planned)
    again = retention.plan(run, "solver", wanted, 1e12)
    assert (list(again.kept), again.retired, again.returned) == (list(planned.kept), {}, ())
    assert [told_of(run, version) for version in planned.kept] == ["readable"] * 8
    with pytest.raises(ConfigError, match="the data of version 7 of solver was retired"):
        tags.create(run, "best", "solver", 7)


@pytest.mark.parametrize(
    ("lost", "settings", "kept"),
    [
        ("tensors", replace(TWO, versions={"solver": [4, 6]}), [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]),
        ("tensors", replace(TWO, every=3), [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]),
        ("delta", replace(TWO, versions={"solver": [4, 6]}), [0, 4, 5, 6, 8, 9, 10, 11]),
    ],
)
def test_an_anchor_that_an_interrupted_gc_left_one_way_to_read_is_kept(
    memory_store: ObjectStore, lost: str, settings: Retention, kept: list[int]
) -> None:
    run = anchored(memory_store)
    for version in retention.plan(run, "solver", TWO, 1e12).retired:
        run.create(layout.retired("solver", version), b"{}")
    manifest = manifests.read_manifest(run, "solver", 4)
    assert manifest.step is not None
    for file in manifest.files if lost == "tensors" else manifest.step.files:
        run.delete(f"{layout.weights('solver', 4)}/{file.name}")
    assert audited(run) == []
    planned = retention.plan(run, "solver", settings, 1e12)
    assert (list(planned.kept), planned.lost) == (kept, ())
    retention.retire(run, planned)
    assert [told_of(run, version) for version in kept] == ["readable"] * len(kept)
    assert not any(run.exists(layout.retired("solver", version)) for version in kept)
    tags.create(run, "best", "solver", 4)


def test_an_anchor_that_lost_both_ways_is_retired(memory_store: ObjectStore) -> None:
    run = anchored(memory_store)
    wanted = replace(TWO, versions={"solver": [3]})
    planned = retention.plan(run, "solver", wanted, 1e12)
    assert 3 in planned.kept
    run.create(layout.retired("solver", 4), b"{}")
    for key in planned.retired[4]:
        run.delete(key)
    again = retention.plan(run, "solver", replace(TWO, versions={"solver": [3, 4]}), 1e12)
    assert (4 in again.kept, again.returned, again.lost) == (False, (), (4,))
    assert manifests.is_retired(run, manifests.read_manifest(run, "solver", 4))


def test_a_mirror_keeps_versions_that_return(memory_store: ObjectStore) -> None:
    home, mirror = anchored(memory_store.sub("home")), memory_store.sub("mirror")
    for key in home.list():
        mirror.put(key, home.get(key))
    for version in retention.plan(home, "solver", TWO, 1e12).retired:
        home.create(layout.retired("solver", version), b"{}")
    planned = retention.plan(home, "solver", replace(TWO, versions={"solver": [2]}), 1e12)
    assert planned.returned == (1, 2)
    in_mirror = retention.plan_mirror(home, mirror, planned)
    assert list(in_mirror.retired) == [3, 4, 5, 6, 7]
    retention.retire(home, planned)
    retention.retire_mirror(home, mirror, in_mirror)
    assert [told_of(mirror, version) for version in (1, 2)] == ["readable"] * 2


def test_a_delta_that_is_listed_as_an_anchor_loses_no_base(memory_store: ObjectStore) -> None:
    run = anchored(memory_store)
    delta = json.loads(run.get(layout.manifest(layout.weights("solver", 10))))
    step = {"base": 9, "tensors": delta["tensors"], "files": delta["files"]}
    infos = {
        name: {**info, "file": "", "entry": "", "source": ""}
        for name, info in delta["tensors"].items()
    }
    rewrite(run, 10, kind="anchor", base=None, tensors=infos, files=(), step=step)
    with pytest.raises(CorruptError, match=r"00000010/manifest\.json is an anchor, but lists"):
        retention.plan(run, "solver", TWO, 1e12)


def test_a_delta_that_is_listed_as_an_anchor_without_a_delta_loses_no_base(
    memory_store: ObjectStore,
) -> None:
    run = anchored(memory_store)
    key = layout.manifest(layout.weights("solver", 10))
    body = run.get(key)
    delta = json.loads(body)
    file = {**delta["files"][0], "num_bytes": 10**6}
    infos = {
        name: {**info, "file": file["name"], "entry": name, "source": ""}
        for name, info in delta["tensors"].items()
    }
    rewrite(run, 10, kind="anchor", base=None, tensors=infos, files=[file], step=None)
    planned = retention.plan(run, "solver", TWO, 1e12)
    assert sorted(planned.retired) == [1, 2, 3, 4, 5, 6, 7]
    assert planned.kept[9] == "leads to version 10, whose own tensors are damaged"
    retention.retire(run, planned)
    run.put(key, body)
    assert [told_of(run, version) for version in (0, *range(8, 12))] == ["readable"] * 5


def test_an_anchor_with_more_names_of_an_entry_than_readers_accept_keeps_the_versions_before(
    memory_store: ObjectStore,
) -> None:
    run = anchored(memory_store)
    info = manifests.read_manifest(run, "solver", 8).tensors["w"]
    for times, kept in ((4, None), (5, EIGHT)):
        infos = {"w": info} | {f"w{n}": replace(info, entry="w") for n in range(1, times)}
        listed = {name: asdict(info) for name, info in infos.items()}
        rewrite(run, 8, tensors=listed, digest=weights_digest(infos))
        planned = retention.plan(run, "solver", TWO, 1e12)
        assert [planned.kept.get(version) for version in (4, 5, 6, 7)] == [kept] * 4


class Bucket(MemoryObjects, S3Objects):
    """Objects in memory, of a store that verifies its bytes itself."""


def test_anchors_on_s3_are_not_read_and_lost_files_are_noticed() -> None:
    run = anchored(ObjectStore(url="s3://bucket", backend=Bucket("/anchors-on-s3")))
    flip_last_bit(run, anchor_file(run, 8))
    planned = retention.plan(run, "solver", TWO, 1e12)
    assert sorted(planned.retired) == [1, 2, 3, 4, 5, 6, 7]
    run.delete(anchor_file(run, 8))
    planned = retention.plan(run, "solver", TWO, 1e12)
    assert sorted(planned.retired) == [1, 2, 3]


def test_retired_versions_are_no_way_around_a_damaged_anchor(memory_store: ObjectStore) -> None:
    run = anchored(memory_store)
    retention.retire(run, retention.plan(run, "solver", TWO, 1e12))
    run.delete(anchor_file(run, 8))
    planned = retention.plan(run, "solver", TWO, 1e12)
    assert (list(planned.kept), planned.retired, planned.returned) == ([0, 8, 9, 10, 11], {}, ())


def test_an_anchor_whose_older_versions_were_deleted_is_not_read_again(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    run = anchored(memory_store)
    retention.retire(run, retention.plan(run, "solver", TWO, 1e12))
    flip_last_bit(run, anchor_file(run, 8))
    assert retention.plan(run, "solver", TWO, 1e12).retired == {}
    assert "version 8" not in caplog.text
