"""The cost of a refresh, when deltas are merged, and the removal of unused merged deltas."""

import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.errors import CorruptError
from storage.formats.json_objects import seal
from storage.formats.safetensors import (
    file_digest,
    from_safetensors,
    to_safetensors,
    weights_digest,
)
from storage.records.weights import FileInfo, HostTensor, MergedDelta, StoredDelta
from storage.store.object_store import ObjectStore
from storage.weights import compaction, delta_store, manifests, publisher, reader, update_path
from storage.weights.codec import deltas
from storage.weights.manifests import LoadedWeights
from storage.weights.traffic import counted
from tests.support.checkout import ROOT
from tests.support.stores.resealed import replace_file
from tests.unit.storage.weights.codec.test_deltas import draw, tensor
from tests.unit.storage.weights.test_update_path import bf16, models, publish


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge small models too."""
    monkeypatch.setattr(compaction, "BYTES_MIN", 0)


def merged_files(run: ObjectStore, version: int) -> list[str]:
    """Data files in the version's folder that its manifest does not list."""
    folder, manifest = (
        layout.weights("solver", version),
        manifests.read_manifest(run, "solver", version),
    )
    listed = {file.name for file in manifest.files + (manifest.step.files if manifest.step else ())}
    names = [key.rpartition("/")[2] for key in run.list(folder)]
    return [name for name in names if name.endswith(".safetensors") and name not in listed]


def test_each_refresh_over_a_chain_reads_one_merged_delta_and_shares_unchanged_tensors(
    memory_store: ObjectStore,
) -> None:
    published = publish(memory_store, models(10))
    loaded = reader.read(memory_store, "solver", 0)
    for version in range(1, 10):
        store, counting = counted(memory_store)
        decoded = reader.read(store, "solver", version, loaded)
        manifest = memory_store.get(layout.manifest(layout.weights("solver", version)))
        assert counting.weights()["solver"] == len(manifest) + sum(
            file.num_bytes for file in published[version].manifest.files
        )
        assert weights_digest(decoded.tensors) == published[version].manifest.digest
        if version > 1:
            assert decoded.tensors["fixed"] is loaded.tensors["fixed"]
        assert decoded.tensors["large"] is not loaded.tensors["large"]
        loaded = decoded


@pytest.mark.usefixtures("pays")
def test_merging_stops_at_an_anchor_without_changes_to_the_version_before(
    memory_store: ObjectStore,
) -> None:
    loaded: LoadedWeights | None = None
    for version, tensors in enumerate(models(17)):
        base = None if version == 5 else loaded
        loaded = LoadedWeights(
            publisher.publish(memory_store, "solver", version, tensors, base=base), tensors
        )
    assert manifests.read_manifest(memory_store, "solver", 5).step is None
    assert not compaction.merge(memory_store, "solver", 8, 0)
    assert merged_files(memory_store, 8) == []
    assert compaction.merge(memory_store, "solver", 16, 8)


@pytest.mark.usefixtures("pays")
def test_tensors_that_swap_their_names_repeatedly_are_merged(
    memory_store: ObjectStore,
) -> None:
    item, other = (
        bf16(draw(seed).integers(0, 2**16, 200_000).astype(np.uint16)) for seed in (5, 6)
    )
    pairs = ({"one": item, "other": other}, {"one": other, "other": item})
    loaded = publish(
        memory_store,
        [{**tensors, **pairs[version % 3 % 2]} for version, tensors in enumerate(models(9))],
    )
    assert compaction.merge(memory_store, "solver", 8, 0)
    delta = update_path.merged_path_delta(manifests.read_merged(memory_store, "solver", 8, 0))
    assert (
        weights_digest(
            update_path.apply_path(memory_store, loaded[8].manifest, [delta], loaded[0]).tensors
        )
        == loaded[8].manifest.digest
    )


@pytest.mark.usefixtures("pays")
def test_a_merged_delta_lists_each_tensor_and_its_base_tensor(
    memory_store: ObjectStore,
) -> None:
    random, start = draw(3), draw(4).integers(0, 2**16, 50_000).astype(np.uint16)
    first, fixed = bf16(start), bf16(np.arange(70, dtype=np.uint16))
    versions = [{"first": first, "fixed": fixed}]
    for version in range(1, 9):
        bits = versions[-1][
            "first" if version < 5 else "renamed" if version > 5 else "first"
        ].bits.copy()
        bits[random.integers(0, len(bits), 20)] += 1
        moved = bf16(bits)
        versions.append(
            {"first" if version < 5 else "renamed": moved, "tied": moved, "fixed": fixed}
        )
    versions[5]["renamed"] = versions[5]["tied"] = versions[4][
        "first"
    ]  # it gets its new name unchanged
    loaded = publish(memory_store, versions)
    assert all(item.manifest.kind == "delta" for item in loaded[1:])
    assert compaction.merge(memory_store, "solver", 8, 0)
    merged = manifests.read_merged(memory_store, "solver", 8, 0)
    infos, listed = merged.step.tensors, loaded[8].manifest.tensors
    assert {name: (item.dtype, item.shape, item.digest) for name, item in infos.items()} == {
        name: (item.dtype, item.shape, item.digest) for name, item in listed.items()
    }
    (file,) = merged.step.files
    assert {name: (item.source, item.entry, item.file) for name, item in infos.items()} == {
        "renamed": ("first", "", file.name),
        "tied": ("first", "renamed", file.name),
        "fixed": ("fixed", "", ""),
    }
    decoded = update_path.apply_path(
        memory_store, loaded[8].manifest, [update_path.merged_path_delta(merged)], loaded[0]
    )
    assert weights_digest(decoded.tensors) == loaded[8].manifest.digest


@pytest.mark.usefixtures("pays")
def test_deltas_stored_under_other_names_than_their_tensors_are_merged(
    memory_store: ObjectStore,
) -> None:
    loaded = publish(memory_store, models(9))

    def renamed(body: bytes) -> bytes:
        return to_safetensors(
            {f"of {name}": entry for name, entry in from_safetensors(body).items()},
            delta_store.CODEC,
        )

    manifest = replace_file(memory_store, "solver", 8, renamed)
    tensors = {
        name: replace(info, entry=f"of {name}" if info.file else "")
        for name, info in manifest.tensors.items()
    }
    memory_store.put(
        layout.manifest(layout.weights("solver", 8)), seal(replace(manifest, tensors=tensors))
    )
    assert compaction.merge(memory_store, "solver", 8, 0)
    merged = manifests.read_merged(memory_store, "solver", 8, 0)
    assert {info.entry for info in merged.step.tensors.values()} == {""}
    decoded = update_path.apply_path(
        memory_store, loaded[8].manifest, [update_path.merged_path_delta(merged)], loaded[0]
    )
    assert weights_digest(decoded.tensors) == loaded[8].manifest.digest


@pytest.mark.usefixtures("pays")
def test_a_tensor_missing_in_an_intermediate_version_is_named(memory_store: ObjectStore) -> None:
    message = "weights/solver/00000005 does not hold the tensor small, which a later version needs"
    loaded = publish(memory_store, models(9))
    manifest, key = loaded[5].manifest, layout.manifest(layout.weights("solver", 5))

    def without(entries: dict[str, HostTensor]) -> dict[str, HostTensor]:
        return {name: entry for name, entry in entries.items() if name != "small"}

    fewer = {name: info for name, info in manifest.tensors.items() if name != "small"}
    memory_store.put(key, seal(replace(manifest, tensors=fewer, digest=weights_digest(fewer))))
    with pytest.raises(CorruptError, match=message):
        compaction.merge(memory_store, "solver", 8, 0)
    memory_store.put(key, seal(manifest))
    replace_file(
        memory_store,
        "solver",
        5,
        lambda body: to_safetensors(without(from_safetensors(body)), delta_store.CODEC),
    )
    with pytest.raises(CorruptError, match=message):
        compaction.merge(memory_store, "solver", 8, 0)
    assert merged_files(memory_store, 8) == []


@pytest.mark.usefixtures("pays")
def test_a_complete_span_is_merged_once_in_the_background_and_close_waits_for_it(
    memory_store: ObjectStore,
) -> None:
    publish(memory_store, models(18))
    merger = compaction.BackgroundMerger(memory_store)
    merger.merge_up_to("solver", 7)
    merger.close()
    assert not memory_store.exists(layout.merged_delta("solver", 8, 0))
    for version, wanted in ((8, 8), (15, 8), (16, 16), (17, 16)):
        for key in memory_store.list(layout.WEIGHTS):
            if "since-" in key:
                memory_store.delete(key)
        merger = compaction.BackgroundMerger(memory_store)
        merger.merge_up_to("solver", version)
        merger.close()
        (merged,) = (key for key in memory_store.list(layout.WEIGHTS) if "since-" in key)
        assert merged == layout.merged_delta("solver", wanted, wanted - 8)


def test_no_second_merge_begins_while_one_is_running(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()
    ends: list[int] = []

    def merge(run: ObjectStore, policy: str, end: int, *_: object) -> bool:
        ends.append(end)
        began.set()
        return may_end.wait()

    monkeypatch.setattr(compaction, "merge", merge)
    merger = compaction.BackgroundMerger(memory_store)
    merger.merge_up_to("solver", 8)
    began.wait()
    merger.merge_up_to("solver", 16)
    merger.merge_up_to("verifier", 8)
    may_end.set()
    merger.close()
    assert ends == [8]


def test_a_span_that_was_not_worth_merging_is_not_tried_again(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []

    def merge(run: ObjectStore, policy: str, end: int, *_: object) -> bool:
        ends.append(end)
        return False

    monkeypatch.setattr(compaction, "merge", merge)
    merger = compaction.BackgroundMerger(memory_store)
    for version in (8, 9, 15, 16, 17):
        merger.merge_up_to("solver", version)
        if merger._running:
            merger._running.result()
    merger.close()
    assert ends == [8, 16]


def test_merging_has_a_minimum_size_and_a_maximum_share_of_the_single_deltas(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = publish(memory_store, models(9))
    single = sum(
        delta.num_bytes for item in loaded[1:] for delta in update_path.path_deltas(item.manifest)
    )
    monkeypatch.setattr(compaction, "BYTES_MIN", single + 1)
    assert not compaction.merge(memory_store, "solver", 8, 0)
    monkeypatch.setattr(compaction, "BYTES_MIN", single)
    monkeypatch.setattr(compaction, "SHARE_MAX", 0.01)
    assert not compaction.merge(memory_store, "solver", 8, 0)
    assert merged_files(memory_store, 8) == []
    assert not memory_store.exists(layout.merged_delta("solver", 8, 0))
    monkeypatch.undo()
    monkeypatch.setattr(compaction, "BYTES_MIN", single)
    assert compaction.merge(memory_store, "solver", 8, 0)
    merged = manifests.read_merged(memory_store, "solver", 8, 0)
    assert sorted(merged_files(memory_store, 8)) == sorted(file.name for file in merged.step.files)
    assert sum(file.num_bytes for file in merged.step.files) <= compaction.SHARE_MAX * single


@pytest.mark.usefixtures("pays")
def test_single_deltas_that_exceed_the_memory_limit_together_are_not_merged(
    memory_store: ObjectStore,
) -> None:
    loaded = publish(memory_store, models(9))
    single = sum(
        delta.num_bytes for item in loaded[1:] for delta in update_path.path_deltas(item.manifest)
    )
    assert not compaction.merge(memory_store, "solver", 8, 0, memory_bytes=single - 1)
    assert merged_files(memory_store, 8) == []
    assert compaction.merge(memory_store, "solver", 8, 0, memory_bytes=single)
    assert not compaction.merge(memory_store, "solver", 8, 0), "it exists"


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize(
    "claim",
    [
        "thirty names of one change",
        "a tensor of 2^40 elements",
        "of 2^10 bytes for each byte",
        "the first of two names with 2^40 elements",
    ],
)
def test_a_merge_that_would_multiply_what_is_stored_is_not_begun(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    loaded = publish(memory_store, models(9))
    manifest = loaded[8].manifest
    infos = dict(manifest.tensors)
    single = sum(
        delta.num_bytes for item in loaded[1:] for delta in update_path.path_deltas(item.manifest)
    )
    if claim.startswith("thirty"):
        names = [f"large{number}" for number in range(30)]
        file = manifest.files[0].name
        infos |= {name: replace(infos["large"], file=file, entry="") for name in names}
        key = f"{layout.weights('solver', 8)}/{file}"
        entries = from_safetensors(memory_store.get(key))
        none = HostTensor("U8", (0,), np.zeros(0, dtype=np.uint8))
        body = to_safetensors({**entries, **dict.fromkeys(names, none)}, delta_store.CODEC)
        memory_store.put(key, body)
        info = FileInfo(file, len(body), file_digest(body))
        manifest = replace(manifest, files=(info, *manifest.files[1:]))
    elif claim.startswith("the first"):
        stored_as = infos["large"].entry or "large"
        true = replace(infos.pop("large"), entry=stored_as)
        first = replace(true, shape=(2**40,))
        infos |= {"!large": first, "large": true}
    else:
        num_elements = 2**40 if "2^40" in claim else 2**10 * single // 2
        infos["large"] = replace(infos["large"], shape=(num_elements,))
    manifest = replace(manifest, tensors=infos, digest=weights_digest(infos))
    memory_store.put(layout.manifest(layout.weights("solver", 8)), seal(manifest))

    stored = memory_store.list()

    def merge(*_: object, **__: object) -> None:
        raise AssertionError("changes are merged, which takes gigabytes")

    monkeypatch.setattr(deltas, "merge", merge)
    assert not compaction.merge(memory_store, "solver", 8, 0)
    assert memory_store.list() == stored


@pytest.mark.usefixtures("pays")
def test_the_second_merger_deletes_only_its_own_files(
    memory_store: ObjectStore,
) -> None:
    publish(memory_store, models(9))
    competitor = seal(
        MergedDelta(policy="solver", version=8, step=StoredDelta(0, {}, ()), created_s=0.0)
    )

    class RivalIsFirst:
        def __getattr__(self, verb: str) -> Any:
            return getattr(memory_store.backend, verb)

        def create(self, key: str, body: bytes) -> bool:
            if "since-" in key:
                memory_store.put(layout.merged_delta("solver", 8, 0), competitor)
            return memory_store.backend.create(key, body)

    before = memory_store.list()
    assert compaction.merge(replace(memory_store, backend=RivalIsFirst()), "solver", 8, 0)
    assert memory_store.list() == sorted([*before, layout.merged_delta("solver", 8, 0)])
    assert memory_store.get(layout.merged_delta("solver", 8, 0)) == competitor


@pytest.mark.usefixtures("pays")
def test_whole_tensors_that_exceed_the_memory_limit_are_not_merged(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new tensor is stored whole once; three more begin as copies of it, and then differ."""
    monkeypatch.setattr(compaction, "SHARE_MAX", 100.0)
    late = np.arange(30_000, dtype=np.uint16)
    versions = models(9, size=400_000)
    for version in range(1, 9):
        for copy in range(1 if version < 2 else 4):
            bits = late.copy()
            bits[copy] += version > 2
            versions[version] = {**versions[version], f"late{copy}": bf16(bits)}
    loaded = publish(memory_store, versions)
    single = sum(
        delta.num_bytes for item in loaded[1:] for delta in update_path.path_deltas(item.manifest)
    )
    assert 60_000 < single < 4 * 60_000
    assert not compaction.merge(memory_store, "solver", 8, 0, memory_bytes=4 * 60_000 - 1)
    assert merged_files(memory_store, 8) == []
    assert compaction.merge(memory_store, "solver", 8, 0, memory_bytes=4 * 60_000)


def test_tensors_that_the_manifest_does_not_list_are_refused(memory_store: ObjectStore) -> None:
    (loaded,) = publish(memory_store, models(1, size=100))
    digests = {name: info.digest for name, info in loaded.manifest.tensors.items()}
    more = {**loaded.tensors, "extra": bf16(np.zeros(3, dtype=np.uint16))}
    with pytest.raises(
        CorruptError, match="00000000: what is stored gives extra, which its manifest does not list"
    ):
        update_path.check(loaded.manifest, more, digests)
    fewer = {name: item for name, item in loaded.tensors.items() if name != "small"}
    with pytest.raises(
        CorruptError, match="does not give the tensor small that its manifest lists"
    ):
        update_path.check(loaded.manifest, fewer, digests)


def test_a_merged_delta_that_grows_too_large_deletes_its_files(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_store, "FILE_BYTES_MIN", 1)
    monkeypatch.setattr(delta_store, "FILE_BYTES_MAX", 1)  # one file per tensor
    old = {
        f"w{part}": tensor(draw(part).integers(0, 2**16, 3000).astype(np.uint16))
        for part in range(8)
    }
    new = {
        name: tensor(draw(part + 50).integers(0, 2**16, 3000).astype(np.uint16))
        for part, name in enumerate(old)
    }
    stored: list[str] = []

    class Noting:
        def __getattr__(self, verb: str) -> Any:
            return getattr(memory_store.backend, verb)

        def write(self, key: str, body: bytes) -> None:
            stored.append(key)
            memory_store.backend.write(key, body)

    loaded = LoadedWeights(publisher.publish(memory_store, "solver", 0, old), old)
    noting = replace(memory_store, backend=Noting())
    manifest = publisher.publish(noting, "solver", 1, new, base=loaded)
    assert (manifest.kind, manifest.step) == ("anchor", None)
    assert sum(".delta-" in key for key in stored) > 1
    names = [key.rpartition("/")[2] for key in memory_store.list(layout.weights("solver", 1))]
    assert sorted(names) == sorted(["manifest.json", *(file.name for file in manifest.files)])


def test_a_small_model_is_published_merged_and_read_without_a_compiler() -> None:
    code = (
        "import sys; from storage.weights import compaction, reader; from "
        "storage.store.object_store import open_store;"
        "from tests.unit.storage.weights.test_update_path import models, publish; "
        "compaction.BYTES_MIN = 0;"
        "run = open_store('memory://x');"
        "held = publish(run, models(9)); assert compaction.merge(run, 'solver', 8, 0);"
        "reader.read(run, 'solver', 8, held[0]); reader.fetch(run, 'solver', 7); print('numba' in "
        "sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_a_delta_tensor_with_another_dtype_than_bytes_is_refused(memory_store: ObjectStore) -> None:
    wide = HostTensor("F32", (3,), np.zeros(3, dtype=np.uint32))
    with pytest.raises(CorruptError, match=r"the entry is F32 \[3\]; a change is bytes"):
        delta_store.blob_of(wide)
