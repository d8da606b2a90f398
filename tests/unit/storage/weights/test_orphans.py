import json
import os
import time
from pathlib import Path

import pytest

from storage import layout
from storage.records.control import Stop
from storage.run import checkpoints, runs
from storage.run.checkpoints import CheckpointState
from storage.store.object_store import ObjectStore, open_store
from storage.weights import manifests, orphans, publisher, reader
from tests.support.runs import builders
from tests.support.stores.stranger import sealed

NOW_S = time.time()
LATER_S = NOW_S + 2 * orphans.AGE_S  # the suite may take hours from its import to a test
NEWEST = orphans.NEWEST
NEXT = NEWEST + 1
STRAY = "0" * 32 + ".model-00000.safetensors"


def weight(version: int, name: str = STRAY) -> str:
    return f"{layout.weights('solver', version)}/{name}"


def checkpoint(step: int, name: str = STRAY) -> str:
    return f"{layout.checkpoint('solver', step)}/{name}"


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """Versions 0 to `NEWEST`, checkpoints 5 and 9, and files of a killed writer beside some of them
    and after the newest.
    """
    for version in range(NEWEST + 1):
        publisher.publish(memory_store, "solver", version, builders.tensors(version))
    for step in (5, 9):
        checkpoints.save(
            memory_store, "solver", step, builders.tensors(step), CheckpointState({}, 0.0)
        )
    for key in (weight(0), weight(1), weight(NEXT), checkpoint(5), checkpoint(9), checkpoint(12)):
        memory_store.put(key, b"killed")
    return memory_store


def test_an_unlisted_file_is_an_orphan_when_the_manifest_is_a_day_old(
    run: ObjectStore,
) -> None:
    assert orphans.orphans(run, "solver", NOW_S) == []
    assert orphans.orphans(run, "solver", LATER_S) == [weight(0), checkpoint(5), checkpoint(9)]
    assert orphans.orphans(run, "verifier", LATER_S) == []


def test_unlisted_files_of_the_newest_version_stay_until_a_day_after_the_runs_end(
    run: ObjectStore,
) -> None:
    runs.request_stop(run, Stop("cancelled", "enough", LATER_S - 60.0))
    assert orphans.orphans(run, "solver", LATER_S) == [weight(0), checkpoint(5), checkpoint(9)]
    runs.clear_stop(run)
    runs.request_stop(run, Stop("cancelled", "enough", NOW_S))
    assert {weight(1), weight(NEXT), checkpoint(12)} <= set(orphans.orphans(run, "solver", LATER_S))
    runs.clear_stop(run)  # it was resumed
    assert {weight(1), weight(NEXT), checkpoint(12)}.isdisjoint(
        orphans.orphans(run, "solver", LATER_S)
    )


@pytest.mark.parametrize(
    "folder",
    [
        "weights/solver/backup",
        "weights/solver/00000003/copy",
        "weights/solver/0000000003",
        "checkpoints/solver/5",
    ],
)
def test_a_file_in_a_folder_of_another_name_is_no_orphan(run: ObjectStore, folder: str) -> None:
    run.put(f"{folder}/{STRAY}", b"a copy that a person made")
    runs.request_stop(run, Stop("cancelled", "enough", NOW_S))
    found = orphans.orphans(run, "solver", LATER_S)
    assert weight(NEXT) in found
    assert f"{folder}/{STRAY}" not in found


def test_the_age_of_a_day_is_inclusive(run: ObjectStore) -> None:
    created_s = checkpoints.read_manifest(run, "solver", 5).created_s
    day_s = 24 * 3600.0
    assert checkpoint(5) not in orphans.orphans(run, "solver", created_s + day_s - 0.01)
    assert checkpoint(5) in orphans.orphans(run, "solver", created_s + day_s)
    runs.request_stop(run, Stop("cancelled", "enough", 1e9))
    assert checkpoint(12) not in orphans.orphans(run, "solver", 1e9 + day_s)
    assert checkpoint(12) in orphans.orphans(run, "solver", 1e9 + day_s + 1)


def test_a_file_listed_by_another_record_of_the_version_is_no_orphan(run: ObjectStore) -> None:
    run.put(weight(0, "since-00000000.json"), f'{{"files": [{{"name": "{STRAY}"}}]}}'.encode())
    assert weight(0) not in orphans.orphans(run, "solver", LATER_S)


def test_a_manifest_that_names_no_file_of_its_folder_makes_no_orphans(run: ObjectStore) -> None:
    """A resealed one: the files may be of the manifest that was published."""
    key = weight(0, "manifest.json")
    run.put(key, sealed({**json.loads(run.get(key)), "tensors": {}, "files": []}))
    run.put(weight(0, "since-00000000.json"), f'{{"files": [{{"name": "{STRAY}"}}]}}'.encode())
    assert orphans.orphans(run, "solver", LATER_S) == [checkpoint(5), checkpoint(9)]


ESCAPED = "größe \U0001f600.json"


def test_a_file_whose_name_is_escaped_in_the_manifest_is_no_orphan(
    run: ObjectStore,
) -> None:
    files = {ESCAPED: b"{}", "config.json": b"{ }"}
    run.delete(weight(0, "manifest.json"))
    publisher.publish(run, "solver", 0, builders.tensors(), extra_files=files)
    escaped = sealed(json.loads(run.get(weight(0, "manifest.json"))))
    assert rb"gr\u00f6\u00dfe \ud83d\ude00.json" in escaped
    run.put(weight(0, "manifest.json"), escaped)
    found = orphans.orphans(run, "solver", LATER_S)
    listed = {file.name for file in manifests.read_manifest(run, "solver", 0).files}
    assert [key for key in found if key.rpartition("/")[2] in listed] == []
    assert weight(0) in found
    for key in found:
        run.delete(key)
    assert reader.fetch_files(run, "solver", 0) == files


def test_a_file_that_an_object_of_another_kind_names_is_no_orphan(run: ObjectStore) -> None:
    run.put(weight(0, "index.arrow"), b"ARROW1" + STRAY.encode())
    assert orphans.orphans(run, "solver", LATER_S) == [checkpoint(5), checkpoint(9)]


def test_a_version_with_a_damaged_manifest_has_no_orphans(run: ObjectStore) -> None:
    run.put(checkpoint(5, "manifest.json"), b"torn")
    assert orphans.orphans(run, "solver", LATER_S) == [weight(0), checkpoint(9)]


def test_a_version_with_a_damaged_merged_delta_record_has_no_orphans(run: ObjectStore) -> None:
    run.put(weight(0, "since-00000000.json"), b'{"files": [{"name": "00')
    run.put(weight(0, ".DS_Store"), b"no object of the run")
    assert orphans.orphans(run, "solver", LATER_S) == [checkpoint(5), checkpoint(9)]
    run.delete(weight(0, "since-00000000.json"))
    assert weight(0) in orphans.orphans(run, "solver", LATER_S)


def test_data_of_a_version_that_lost_its_manifest_are_no_orphans(
    run: ObjectStore,
) -> None:
    lost = {}
    for version in (0, 3):
        lost[version] = run.get(weight(version, "manifest.json"))
        run.delete(weight(version, "manifest.json"))
    runs.request_stop(run, Stop("completed", "all steps done", NOW_S))
    keys = orphans.orphans(run, "solver", LATER_S)
    assert [
        key
        for key in keys
        if key.startswith((layout.weights("solver", 0), layout.weights("solver", 3)))
    ] == []
    assert {weight(1), weight(NEXT)} <= set(keys)  # the next version was never written
    for key in keys:
        run.delete(key)
    for version, body in lost.items():
        run.put(weight(version, "manifest.json"), body)
        assert set(reader.fetch(run, "solver", version)) == set(builders.tensors(version))


def test_other_versions_are_readable_after_orphans_are_deleted(run: ObjectStore) -> None:
    runs.request_stop(run, Stop("completed", "all steps done", NOW_S))
    for key in orphans.orphans(run, "solver", LATER_S):
        run.delete(key)
    for version in range(NEWEST + 1):
        assert set(reader.fetch(run, "solver", version)) == set(builders.tensors(version))
    newest = checkpoints.newest(run, "solver")
    assert newest is not None
    assert newest.step == 9


def test_unfinished_files_of_a_local_store_are_deleted_after_a_day(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    run, other = store.sub("runs/one"), store.sub("runs/two")
    run.put("orders/00000000.json", b"whole")
    other.put("orders/00000000.json", b"whole")
    old, young = tmp_path / "runs/one/orders/.tmp-old", tmp_path / "runs/one/.tmp-young"
    elsewhere = tmp_path / "runs/two/orders/.tmp-old"
    for path in (old, young, elsewhere):
        path.write_bytes(b"half")
    for path in (old, elsewhere):
        os.utime(path, (NOW_S, NOW_S - orphans.AGE_S - 60.0))
    keys = orphans.unfinished(run, NOW_S)
    assert keys == {"runs/one/orders/.tmp-old": 4}
    assert old.exists()
    orphans.remove_unfinished(run, keys)
    assert (old.exists(), young.exists(), elsewhere.exists()) == (False, True, True)
    assert run.get("orders/00000000.json") == b"whole"


def test_other_stores_have_no_unfinished_files(memory_store: ObjectStore) -> None:
    assert orphans.unfinished(memory_store, NOW_S) == {}
