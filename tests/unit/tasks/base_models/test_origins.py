"""Version 0 of a run is a version of another run: its bits are those, and no tensor is copied."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError
from storage.formats import adapters
from storage.formats.json_objects import seal
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor, Manifest, Origin, StoredAdapter
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from storage.verify.violations import Findings
from storage.verify.weights import WeightsAudit
from storage.weights import manifests, publisher, reader, replication, retention, tags
from storage.weights.manifests import RUNS_MAX, LoadedWeights
from storage.weights.read_through import read_through_mirror
from storage.weights.retention import Retention
from storage.weights.traffic import counted
from tasks.base_models import origins
from tests.support.runs.adapter_versions import LORA, publish_adapters
from tests.support.runs.builders import mirror_next

NEWEST, SHARED = 5, 4
FILES = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}'}
STRICT = Retention(last=1, every=0, grace_s=0.0)


def model(version: int) -> dict[str, HostTensor]:
    """A matrix of which some elements change in each version, a tensor that is tied to it, and a
    norm that never changes.
    """
    bits = np.arange(4000, dtype=np.uint16)
    bits[: 3 * version] += 1
    norm = np.array([16256, 7], dtype=np.uint16)
    return {
        "w": HostTensor("BF16", (4000,), bits),
        "tied": HostTensor("BF16", (4000,), bits.copy()),
        "norm": HostTensor("BF16", (2,), norm),
    }


def publish_versions(
    run: ObjectStore, newest: int = NEWEST, anchors: tuple[int, ...] = (3,)
) -> None:
    loaded: LoadedWeights | None = None
    for version in range(newest + 1):
        tensors = model(version)
        manifest = publisher.publish(
            run, "solver", version, tensors, base=loaded, anchor=version in anchors,
            extra_files={} if version else FILES,
        )  # fmt: skip
        loaded = LoadedWeights(manifest, tensors)


@pytest.fixture
def store(memory_store: ObjectStore) -> ObjectStore:
    """A store with the run `one`: versions 0 to 5 of solver, of which 0 and 3 are anchors."""
    publish_versions(runs.create_run(memory_store, "one", {}))
    return memory_store


def run_one(store: ObjectStore) -> ObjectStore:
    return store.sub("runs/one")


def continued(
    store: ObjectStore, run_id: str = "two", word: str = str(SHARED), of: str = "one"
) -> ObjectStore:
    origin = origins.find(store, of, "solver", word)
    run = runs.create_run(store, run_id, {}, origins={"solver": origin})
    origins.share(run, "solver", origin)
    return run


def bits(run: ObjectStore, version: int) -> str:
    return weights_digest(reader.fetch(run, "solver", version))


def violations(run: ObjectStore, origin: Origin | None) -> list[str]:
    findings = Findings()
    WeightsAudit(run, "solver", findings, origin).audit(-1, lambda stage, share: None)
    return [f"{each.where}: {each.what}" for each in findings.violations()]


def overwrite(run: ObjectStore, manifest: Manifest, **changes: Any) -> None:
    """Replace the manifest of version 0 by one with other fields."""
    key = layout.manifest(layout.weights("solver", 0))
    run.delete(key)
    run.create(key, seal(replace(manifest, **changes)))


def test_the_new_run_has_the_origins_bits_and_files_and_no_tensor_of_its_own(store: ObjectStore):
    run = continued(store)
    assert bits(run, 0) == weights_digest(model(SHARED)) == bits(run_one(store), SHARED)
    assert reader.fetch_files(run, "solver") == FILES
    assert not [key for key in run.list() if key.endswith(".safetensors")]
    expected = Origin(
        run="one", policy="solver", version=SHARED, digest=weights_digest(model(SHARED))
    )
    assert runs.read_run(run).origins == {"solver": expected}
    manifest = manifests.read_manifest(run, "solver", 0)
    assert manifest.origin == expected
    assert {(each.file, each.entry, each.source) for each in manifest.tensors.values()} == {
        ("", "", "")
    }
    assert {file.name.partition(".")[0] for file in manifest.files} == {manifest.write_id}
    assert manifest.created_s >= runs.read_run(run).created_s
    assert violations(run, expected) == []


@pytest.mark.parametrize(
    ("word", "version"), [("latest", 5), ("0", 0), ("2", 2), ("3", 3), ("best", 4)]
)
def test_a_version_is_found_by_number_by_tag_and_as_the_latest(
    store: ObjectStore, word: str, version: int
):
    tags.create(run_one(store), "best", "solver", 4)
    origin = origins.find(store, "one", "solver", word)
    assert (origin.version, origin.digest) == (version, weights_digest(model(version)))
    assert bits(continued(store, word=word), 0) == origin.digest


@pytest.mark.parametrize(
    ("run_id", "policy", "word", "message"),
    [
        ("ones", "solver", "2", r"there is no run 'ones' in .*; did you mean one\?"),
        ("../one", "solver", "2", r"there is no run '\.\./one'"),
        ("one", "judge", "2", r"run one has no weights of a policy 'judge'; .*: solver"),
        ("one", "solver", "6", r"there is no version 6 of solver of run one; its newest is 5"),
        ("one", "solver", "good", r"'good' is no version of solver and none of its tags"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(
    store: ObjectStore, run_id: str, policy: str, word: str, message: str
):
    with pytest.raises(ConfigError, match=message):
        origins.find(store, run_id, policy, word)


def retire(run: ObjectStore) -> retention.RetirementPlan:
    planned = retention.plan(run, "solver", STRICT, now_s=4e9)
    retention.retire(run, planned)
    return planned


def test_a_version_whose_data_gc_deleted_is_refused_and_so_is_a_missing_file(store: ObjectStore):
    one = run_one(store)
    assert list(retire(one).retired) == [1, 2]
    with pytest.raises(
        ConfigError, match=r"version 2 of solver of run one .*version 2 was deleted by gc.*weights"
    ):
        origins.find(store, "one", "solver", "2")
    (file,) = manifests.read_manifest(one, "solver", 4).files
    one.delete(f"{layout.weights('solver', 4)}/{file.name}")
    with pytest.raises(
        ConfigError, match=r"version 5 of solver .* is missing; put the object back"
    ):
        origins.find(store, "one", "solver", "5")


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_version_is_accepted_that_is_read_by_the_delta_of_an_anchor(
    store: ObjectStore, is_recorded: bool
):
    """As a gc leaves it that was killed after it deleted the anchor's own tensors."""
    one = run_one(store)
    folder = layout.weights("solver", 3)
    for file in manifests.read_manifest(one, "solver", 3).files:
        one.delete(f"{folder}/{file.name}")
    if is_recorded:
        one.create(layout.retired("solver", 3), b"{}")
    assert origins.find(store, "one", "solver", "5").version == 5
    (file,) = manifests.read_manifest(one, "solver", 1).files
    one.delete(f"{layout.weights('solver', 1)}/{file.name}")
    with pytest.raises(ConfigError, match=r"weights/solver/0*1/.* is missing; put the object back"):
        origins.find(store, "one", "solver", "5")


def test_versions_of_the_new_run_are_deltas_to_the_shared_one(store: ObjectStore):
    run = continued(store)
    loaded = reader.read(run, "solver", 0)
    after = {**loaded.tensors, "norm": HostTensor("BF16", (2,), np.array([9, 7], dtype=np.uint16))}
    manifest = publisher.publish(run, "solver", 1, after, base=loaded)
    assert manifest.kind == "delta"
    assert bits(run, 1) == weights_digest(after)
    assert reader.read(run, "solver", 1, loaded).tensors["w"] is loaded.tensors["w"]
    (found,) = violations(run, runs.read_run(run).origins["solver"])
    assert found.startswith("batches/solver/00000001.arrow")  # of which this test has none


def test_gc_keeps_the_origin_as_long_as_the_new_run_exists(store: ObjectStore):
    one, run = run_one(store), continued(store, word="2")
    planned = retire(one)
    assert planned.kept[2] == "run two continues from it"
    assert planned.kept[1] == "leads to version 2"
    assert bits(run, 0) == weights_digest(model(2))
    run.delete(layout.RUN)
    assert list(retire(one).retired) == [1, 2]
    with pytest.raises(CorruptError, match=r"version 0 of solver in .*/two is solver@2 of run one"):
        reader.read(run, "solver", 0)


def test_a_run_that_continues_after_the_plan_stops_the_deletion(store: ObjectStore):
    one = run_one(store)
    planned = retention.plan(one, "solver", STRICT, now_s=4e9)
    run = continued(store, word="2")
    with pytest.raises(ConfigError, match="solver@2 was tagged continued-by-two while"):
        retention.retire(one, planned)
    assert bits(run, 0) == weights_digest(model(2))


def test_a_run_of_a_deleted_name_that_continues_again_stops_the_deletion(store: ObjectStore):
    """Its tag is there already, and held nothing when the plan was made."""
    one, run = run_one(store), continued(store, word="2")
    for key in run.list():
        run.delete(key)
    planned = retention.plan(one, "solver", STRICT, now_s=4e9)
    assert 2 in planned.retired
    again = continued(store, word="2")
    with pytest.raises(ConfigError, match="continued-by-two"):
        retention.retire(one, planned)
    assert bits(again, 0) == weights_digest(model(2))


def test_a_version_that_gc_retires_meanwhile_is_not_shared(store: ObjectStore):
    """The record of the retirement exists, and gc has not deleted the data yet."""
    one = run_one(store)
    origin = origins.find(store, "one", "solver", "2")
    run = runs.create_run(store, "two", {}, origins={"solver": origin})
    one.create(layout.retired("solver", 2), b"{}")
    with pytest.raises(ConfigError, match="data of version 2 of solver was retired"):
        origins.share(run, "solver", origin)
    assert not manifests.exists(run, "solver", 0)
    assert tags.read_all(one).readable == ()


def test_an_older_tag_of_the_run_is_no_proof_that_the_data_is_kept(store: ObjectStore):
    """It held nothing when gc planned to retire the version."""
    one, run = run_one(store), continued(store, word="2")
    origin = runs.read_run(run).origins["solver"]
    for key in run.list():
        run.delete(key)
    one.create(layout.retired("solver", 2), b"{}")
    again = runs.create_run(store, "two", {}, origins={"solver": origin})
    with pytest.raises(ConfigError, match="data of version 2 of solver was retired"):
        origins.share(again, "solver", origin)
    assert not manifests.exists(again, "solver", 0)


def test_the_tag_of_a_run_that_exists_cannot_be_removed(store: ObjectStore):
    one, run = run_one(store), continued(store)
    (tag,) = tags.read_all(one).readable
    assert (tag.run, tag.policy, tag.version) == ("two", "solver", SHARED)
    with pytest.raises(ConfigError, match=r"keeps solver@4 for the run two.*delete that run first"):
        tags.delete(one, tag.name)
    run.delete(layout.RUN)
    tags.delete(one, tag.name)
    assert tags.read_all(one).readable == ()


def test_a_second_publisher_of_the_same_version_zero_loses(store: ObjectStore):
    run = continued(store)
    with pytest.raises(ConflictError):
        origins.share(run, "solver", runs.read_run(run).origins["solver"])
    assert len(run.list("weights")) == 1 + len(FILES)


def test_an_origin_that_changed_since_the_run_was_created_is_refused(store: ObjectStore):
    origin = origins.find(store, "one", "solver", "2")
    other = replace(origin, digest=weights_digest(model(1)))
    run = runs.create_run(store, "two", {}, origins={"solver": other})
    with pytest.raises(ConfigError, match="when this run was created; start a new run"):
        origins.share(run, "solver", other)


@pytest.mark.parametrize("lost", ["runs/one/run.json", "manifest.json", ".safetensors"])
def test_a_run_whose_origin_is_lost_says_which_and_a_lost_run_json_does_no_harm(
    store: ObjectStore, lost: str
):
    run = continued(store)
    origin = runs.read_run(run).origins["solver"]
    for key in store.list("runs/one"):
        if key.endswith(lost):
            store.delete(key)
    if lost.endswith("run.json"):
        assert bits(run, 0) == origin.digest
        return
    with pytest.raises(CorruptError, match=r"is solver@4 of run one, which cannot be read: .*put"):
        reader.read(run, "solver", 0)
    (found,) = violations(run, origin)
    assert "solver@4 of run one" in found


def test_a_damaged_origin_is_a_violation_of_the_new_run(store: ObjectStore):
    run = continued(store)
    origin = runs.read_run(run).origins["solver"]
    (file,) = manifests.read_manifest(run_one(store), "solver", SHARED).files
    key = f"{layout.weights('solver', SHARED)}/{file.name}"
    body = bytearray(run_one(store).get(key))
    body[-1] ^= 1
    run_one(store).put(key, bytes(body))
    (found,) = violations(run, origin)
    assert found.startswith("weights/solver/00000000: version 0 of solver")


def test_a_version_zero_that_is_not_the_origin_of_run_json_is_a_violation(store: ObjectStore):
    run = continued(store)
    origin = runs.read_run(run).origins["solver"]
    (found,) = violations(run, replace(origin, version=3))
    assert "names solver@4 of run one" in found
    assert "solver@3 of run one" in found
    (found,) = violations(run, None)
    assert found.endswith("run.json none")


def _with(origin: Origin, **changes: Any) -> Callable[[Manifest], Mapping[str, Any]]:
    return lambda manifest: {"origin": replace(manifest.origin or origin, **changes)}


def _with_a_file(manifest: Manifest) -> Mapping[str, Any]:
    (first, *_) = manifest.tensors
    file = f"{'0' * 32}.model-00000.safetensors"
    return {"tensors": {**manifest.tensors, first: replace(manifest.tensors[first], file=file)}}


OTHER = Origin(run="one", policy="solver", version=1, digest="")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with(OTHER, run="../one"), r"run id"),
        (_with(OTHER, run="a/b"), r"run id"),
        (_with(OTHER, policy="../solver"), r"is not a name"),
        (_with(OTHER, version=-1), r"version"),
        (_with(OTHER, digest="sha256:0"), r"whose digest is not its own"),
        (lambda manifest: {"kind": "delta", "base": 0}, "version 0 of solver is a delta"),
        (_with_a_file, "shares some tensors"),
    ],
)
def test_a_manifest_with_an_invalid_origin_is_corrupt(
    store: ObjectStore, change: Callable[[Manifest], Mapping[str, Any]], message: str
):
    run = continued(store)
    overwrite(run, manifests.read_manifest(run, "solver", 0), **change(_manifest(run)))
    with pytest.raises(CorruptError, match=message):
        reader.read(run, "solver", 0)


def _manifest(run: ObjectStore) -> Manifest:
    return manifests.read_manifest(run, "solver", 0)


def test_a_later_version_with_an_origin_is_corrupt(store: ObjectStore):
    one = run_one(store)
    manifest = manifests.read_manifest(one, "solver", 3)
    key = layout.manifest(layout.weights("solver", 3))
    one.delete(key)
    one.create(key, seal(replace(manifest, origin=OTHER)))
    with pytest.raises(CorruptError, match="only version 0"):
        manifests.read_manifest(one, "solver", 3)


def test_runs_that_refer_to_one_another_are_corrupt(store: ObjectStore):
    two = continued(store, "two", "0")
    three = continued(store, "three", "0", of="two")
    manifest = _manifest(two)
    assert manifest.origin is not None
    overwrite(two, manifest, origin=replace(manifest.origin, run="three"))
    for run in (two, three):
        with pytest.raises(CorruptError, match=f"more than {RUNS_MAX} runs refer to one another"):
            reader.read(run, "solver", 0)
    with pytest.raises(ConfigError, match="refer to one another"):
        origins.find(store, "two", "solver", "0")


def test_a_chain_of_runs_shares_until_it_would_have_too_many_and_then_stores_its_own(
    store: ObjectStore,
):
    names = ["one", *(f"next-{number}" for number in range(RUNS_MAX + 2))]
    stored = []
    for before, name in pairwise(names):
        run = continued(store, name, "latest", of=before)
        stored.append(any(key.endswith(".safetensors") for key in run.list("weights")))
        assert bits(run, 0) == weights_digest(model(NEWEST))
        assert reader.fetch_files(run, "solver") == FILES
        assert violations(run, runs.read_run(run).origins["solver"]) == []
    assert stored == [*[False] * (RUNS_MAX - 1), True, False, False]


def test_an_adapter_of_the_same_form_is_shared_and_another_one_is_merged(memory_store: ObjectStore):
    one = runs.create_run(memory_store, "one", {})
    publish_adapters(one)
    expected = reader.read(one, "solver", 2)
    origin = origins.find(memory_store, "one", "solver", "2")
    two = runs.create_run(memory_store, "two", {}, origins={"solver": origin})
    assert origins.share(two, "solver", origin, LORA).adapter == LORA
    assert bits(two, 0) == expected.manifest.digest
    merged = adapters.merged(LORA, expected.tensors).tensors
    other = StoredAdapter(kind="lora", rank=4, alpha=3.0)
    for name, form in (("three", None), ("four", other)):
        run = runs.create_run(memory_store, name, {}, origins={"solver": origin})
        manifest = origins.share(run, "solver", origin, form)
        assert (manifest.adapter, manifest.origin, manifest.shared) == (None, origin, None)
        assert bits(run, 0) == weights_digest(merged) != expected.manifest.digest
        assert violations(run, origin) == []


def test_an_adapter_that_is_stored_again_remains_an_adapter(memory_store: ObjectStore):
    publish_adapters(runs.create_run(memory_store, "next-0", {}))
    for number in range(1, RUNS_MAX + 1):
        origin = origins.find(memory_store, f"next-{number - 1}", "solver", "latest")
        run = runs.create_run(memory_store, f"next-{number}", {}, origins={"solver": origin})
        manifest = origins.share(run, "solver", origin, LORA)
    assert (manifest.shared, manifest.adapter, manifest.digest) == (None, LORA, origin.digest)


def test_a_mirror_has_the_origins_files_before_it_shows_version_zero(store: ObjectStore):
    run = continued(store)
    far = replace(open_store(f"memory://{uuid4().hex}"), patience_s=1e-6)
    mirror = far.sub("runs/two")
    copied = mirror_next(run, mirror)
    needed = [
        f"runs/one/weights/solver/{version:08d}/{file.name}"
        for version in (3, 4)
        for file in manifests.read_manifest(run_one(store), "solver", version).files
    ]
    own = [f"runs/two/{key}" for key in run.list("weights")]
    assert sorted(far.list()) == sorted(needed + own)
    assert copied is not None
    assert copied.num_bytes == sum(len(store.get(key)) for key in needed + own)
    home, at_home = counted(run)
    near, at_mirror = counted(mirror)
    read = reader.read(read_through_mirror(home, near), "solver", 0)
    assert read.manifest.digest == weights_digest(model(SHARED))
    listed = [len(store.get(key)) for key in needed if "-00000" in key]
    assert at_mirror.weights() == {"solver": sum(listed)}
    only_manifests = [key for key in store.list("runs") if key.endswith("manifest.json")]
    assert at_home.weights()["solver"] <= sum(len(store.get(key)) for key in only_manifests)


def test_a_mirror_writes_nothing_into_the_home_of_a_run_with_the_origins_name(store: ObjectStore):
    """The mirror is a store with a run of its own under this name."""
    run = continued(store)
    far = replace(open_store(f"memory://{uuid4().hex}"), patience_s=1e-6)
    runs.create_run(far, "one", {"its": "own"})
    before = far.list("runs/one")
    mirror = far.sub("runs/two")
    own = sum(len(run.get(key)) for key in run.list("weights"))
    copied = mirror_next(run, mirror)
    assert copied is not None
    assert copied.num_bytes == own, "its own objects alone"
    assert far.list("runs/one") == before
    read = reader.read(read_through_mirror(run, mirror), "solver", 0)
    assert read.manifest.digest == weights_digest(model(SHARED))


def test_a_mirror_that_is_a_copy_of_the_origins_run_gets_its_files(store: ObjectStore):
    run = continued(store)
    far = replace(open_store(f"memory://{uuid4().hex}"), patience_s=1e-6)
    far.create("runs/one/run.json", store.get("runs/one/run.json"))
    assert mirror_next(run, far.sub("runs/two")) is not None
    files = manifests.read_manifest(run_one(store), "solver", SHARED).files
    copied = {key.rpartition("/")[2] for key in far.list("runs/one/weights")}
    assert {file.name for file in files} <= copied


def test_the_mirror_of_a_mirrored_origin_copies_nothing_twice(store: ObjectStore):
    far = replace(open_store(f"memory://{uuid4().hex}"), patience_s=1e-6)
    replication.copy_version(run_one(store), far.sub("runs/one"), "solver", 3)
    run = continued(store, word="3")
    first = manifests.read_manifest(run_one(store), "solver", 3)
    replication.copy_files(run_one(store), far.sub("runs/one"), "solver", 3, first.files)
    copied = mirror_next(run, far.sub("runs/two"))
    own = sum(len(run.get(key)) for key in run.list("weights"))
    assert copied is not None
    assert copied.num_bytes == own
