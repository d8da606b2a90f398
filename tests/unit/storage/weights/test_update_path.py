"""The update path that a reader chooses from its loaded version to another one; every path gives
the same bits.
"""

import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats.safetensors import weights_digest
from storage.records.weights import FileInfo, HostTensor, TensorInfo
from storage.store.object_store import ObjectStore
from storage.verify import weights as audit
from storage.verify.violations import Findings
from storage.verify.weights import WeightsAudit
from storage.weights import (
    compaction,
    delta_applier,
    manifests,
    publisher,
    reader,
    update_path,
)
from storage.weights.delta_applier import DeltaApplier
from storage.weights.manifests import MERGED_SPAN, LoadedWeights
from storage.weights.traffic import counted
from storage.weights.update_path import PathDelta

ANCHOR_EVERY = 20
Model = Mapping[str, HostTensor]


def bf16(bits: Any) -> HostTensor:
    return HostTensor("BF16", bits.shape, bits)


def finite_bits(random: np.random.Generator, shape: int | tuple[int, int]) -> Any:
    """Bits of numbers of both signs, which some hundred steps do not make infinite."""
    sign = random.integers(0, 2, shape) << 15
    return (sign | random.integers(0x100, 0x7E00, shape)).astype(np.uint16)


def models(number: int, *, size: int = 200_000, share: float = 0.01) -> list[dict[str, HostTensor]]:
    """Versions 0, 1, …: a `share` of a large tensor changes at each, all of a small one; one never
    changes.
    """
    random = np.random.default_rng(7)
    large = finite_bits(random, size)
    created = []
    for version in range(number):
        moved = large.copy()
        moved[random.random(size) < share] += random.choice(np.array([1, 65535], dtype=np.uint16))
        large = moved
        small = finite_bits(random, (30, 10))
        created.append(
            {
                "large": bf16(large),
                "small": bf16(small),
                "fixed": bf16(np.arange(50, dtype=np.uint16)),
            }
        )
        if version:
            created[-1]["fixed"] = created[0]["fixed"]
    return created


def publish(
    run: ObjectStore, versions: list[dict[str, HostTensor]], *, anchor_every: int = ANCHOR_EVERY
) -> list[LoadedWeights]:
    loaded: list[LoadedWeights] = []
    for version, tensors in enumerate(versions):
        base = loaded[-1] if loaded else None
        anchor = version % anchor_every == 0
        manifest = publisher.publish(run, "solver", version, tensors, base=base, anchor=anchor)
        loaded.append(LoadedWeights(manifest, tensors))
    return loaded


def bytes_read(
    run: ObjectStore, version: int, loaded: LoadedWeights | None
) -> tuple[int, LoadedWeights]:
    store, counting = counted(run)
    decoded = reader.read(store, "solver", version, loaded)
    return counting.weights()["solver"], decoded


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge small models too."""
    monkeypatch.setattr(compaction, "BYTES_MIN", 0)


def audited(run: ObjectStore) -> list[tuple[int, str]]:
    """Invariant and object of each violation that the audit finds, without the missing batches."""
    findings = Findings()
    WeightsAudit(run, "solver", findings).audit(-1, lambda what, share: None)
    return [
        (violation.invariant, violation.where)
        for violation in findings.violations()
        if "batch" not in violation.what
    ]


def path_delta(version: int, base: int | None, num_bytes: int) -> PathDelta:
    tensors = {
        "w": TensorInfo(
            dtype="BF16",
            shape=(1,),
            digest="xxh3_128:0",
            file="file",
            source="" if base is None else "w",
        )
    }
    return PathDelta(
        policy="solver",
        version=version,
        base=base,
        tensors=tensors,
        files=(FileInfo("file", num_bytes, "sha256:0"),),
    )


def test_the_path_over_thousands_of_versions_is_kept_once() -> None:
    deltas = [path_delta(version, version - 1, 10) for version in range(1, 3_001)]
    tracemalloc.start()
    path = update_path.cheapest(deltas, 0, 3_000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path == deltas
    assert peak_bytes < 4_000_000


def test_the_path_with_the_fewest_bytes_is_taken() -> None:
    deltas = [path_delta(version, version - 1, 10) for version in range(1, 21)]
    anchors = [path_delta(0, None, 400), path_delta(20, None, 400)]
    merged = [path_delta(8, 0, 50), path_delta(16, 8, 75)]

    def path(start: int | None, version: int, *given: PathDelta) -> list[tuple[int | None, int]]:
        result = update_path.cheapest(given, start, version)
        assert result is not None
        return [(each.base, each.version) for each in result]

    assert path(3, 6, *deltas, *anchors) == [(3, 4), (4, 5), (5, 6)]
    assert path(6, 17, *deltas, *anchors, *merged) == [(6, 7), (7, 8), (8, 16), (16, 17)]
    assert path(None, 2, *deltas, *anchors) == [(None, 0), (0, 1), (1, 2)]
    assert path(None, 20, *deltas, *anchors) == [(None, 20)]
    assert path(
        0, 20, *(path_delta(version, version - 1, 30) for version in range(1, 21)), *anchors
    ) == [(None, 20)]
    assert update_path.cheapest(deltas, None, 5) is None
    assert update_path.cheapest([*deltas[:3], *deltas[4:]], 1, 6) is None


def test_the_reader_of_an_anchors_predecessor_does_not_fetch_the_anchor(
    memory_store: ObjectStore,
) -> None:
    loaded = publish(memory_store, models(22))
    anchor = loaded[20].manifest
    assert (anchor.kind, anchor.base, anchor.step and anchor.step.base) == ("anchor", None, 19)
    whole, fresh = bytes_read(memory_store, 20, None)
    little, stepped = bytes_read(memory_store, 20, loaded[19])
    assert little < whole / 10
    assert weights_digest(fresh.tensors) == weights_digest(stepped.tensors) == anchor.digest
    assert bytes_read(memory_store, 21, loaded[18])[0] < whole / 10


@pytest.mark.usefixtures("pays")
def test_a_merged_delta_gives_the_same_bits_in_fewer_bytes(memory_store: ObjectStore) -> None:
    loaded = publish(memory_store, models(20))
    single, result = bytes_read(memory_store, 19, loaded[7])
    assert weights_digest(result.tensors) == loaded[19].manifest.digest
    assert compaction.merge(memory_store, "solver", 16, 8)
    assert not compaction.merge(memory_store, "solver", 16, 8)  # they are unchanged
    merged, result = bytes_read(memory_store, 19, loaded[7])
    assert weights_digest(result.tensors) == loaded[19].manifest.digest
    assert merged < 0.9 * single
    for other in (6, 8, 9, 15):
        assert (
            weights_digest(reader.read(memory_store, "solver", 18, loaded[other]).tensors)
            == loaded[18].manifest.digest
        )


@pytest.mark.usefixtures("pays")
def test_a_merged_delta_can_span_an_anchor(memory_store: ObjectStore) -> None:
    loaded = publish(memory_store, models(25))
    assert compaction.merge(memory_store, "solver", 24, 16)
    merged = manifests.read_merged(memory_store, "solver", 24, 16)
    decoded = update_path.apply_path(
        memory_store, loaded[24].manifest, [update_path.merged_path_delta(merged)], loaded[16]
    )
    assert weights_digest(decoded.tensors) == loaded[24].manifest.digest


@pytest.mark.usefixtures("pays")
def test_renamed_tied_untied_whole_and_returning_tensors_are_merged(
    memory_store: ObjectStore,
) -> None:
    random = np.random.default_rng(1)
    start = random.integers(0, 2**16, 3000).astype(np.uint16)
    up = start.copy()
    up[::50] += 1
    other = random.integers(0, 2**16, (20, 5)).astype(np.uint16)
    moved = other.copy()
    moved[3] -= 2
    steps: list[dict[str, HostTensor]] = [
        {"a": bf16(start), "b": bf16(start), "back": bf16(start.copy()), "old": bf16(start[:2000])},
        {
            "a": bf16(up),
            "b": bf16(up),
            "back": bf16(up),
            "old": bf16(start[:2000]),
        },  # tied, and changed
        {
            "a": bf16(up),
            "b": bf16(start),
            "back": bf16(up),
            "new": bf16(start[:2000]),
        },  # untied, renamed
        {
            "a": bf16(up),
            "b": bf16(start),
            "back": bf16(up),
            "new": bf16(start[:2000]),
            "late": bf16(other),
        },  # stored whole
        {
            "a": bf16(up),
            "b": bf16(start),
            "back": bf16(start),
            "new": bf16(up[:2000]),
            "late": bf16(moved),
        },  # and changed
    ]
    steps += [steps[-1]] * (MERGED_SPAN + 1 - len(steps))
    loaded = publish(memory_store, steps)
    for version in range(1, MERGED_SPAN + 1):
        for base in range(version):
            decoded = reader.read(memory_store, "solver", version, loaded[base])
            assert weights_digest(decoded.tensors) == loaded[version].manifest.digest
            assert (
                weights_digest(loaded[base].tensors) == loaded[base].manifest.digest
            )  # the loaded arrays are unchanged
    assert compaction.merge(memory_store, "solver", MERGED_SPAN, 0)
    merged = manifests.read_merged(memory_store, "solver", MERGED_SPAN, 0)
    decoded = update_path.apply_path(
        memory_store, loaded[-1].manifest, [update_path.merged_path_delta(merged)], loaded[0]
    )
    assert weights_digest(decoded.tensors) == loaded[-1].manifest.digest
    files = {name: bool(info.file) for name, info in merged.step.tensors.items()}
    assert files == {"a": True, "b": False, "back": False, "new": True, "late": True}


@pytest.mark.usefixtures("pays")
def test_deltas_that_change_most_elements_are_merged(memory_store: ObjectStore) -> None:
    random = np.random.default_rng(3)
    bits, crowded = random.integers(2**14, 2**15, 50_000).astype(np.uint16), []
    for _ in range(9):
        bits = bits + random.integers(0, 3, 50_000).astype(
            np.uint16
        )  # most elements change, by small values
        crowded.append({"w": bf16(bits)})
    loaded = publish(memory_store, crowded)
    assert [item.manifest.kind for item in loaded[1:]] == ["delta"] * 8
    assert compaction.merge(memory_store, "solver", 8, 0)
    delta = update_path.merged_path_delta(manifests.read_merged(memory_store, "solver", 8, 0))
    assert (
        weights_digest(
            update_path.apply_path(memory_store, loaded[8].manifest, [delta], loaded[0]).tensors
        )
        == loaded[8].manifest.digest
    )


def test_small_deltas_are_not_merged(memory_store: ObjectStore) -> None:
    publish(memory_store, models(9))
    assert not compaction.merge(memory_store, "solver", 8, 0)
    assert not [key for key in memory_store.list() if "since-" in key]


@pytest.mark.usefixtures("pays")
def test_invalid_merged_deltas_are_skipped_and_reported_by_the_audit(
    memory_store: ObjectStore,
) -> None:
    loaded = publish(memory_store, models(18))
    assert compaction.merge(memory_store, "solver", 16, 8)
    merged = manifests.read_merged(memory_store, "solver", 16, 8)
    key = f"{layout.weights('solver', 16)}/{merged.step.files[0].name}"
    body = bytearray(memory_store.get(key))
    body[-50] ^= 1
    memory_store.put(key, bytes(body))
    assert (
        weights_digest(reader.read(memory_store, "solver", 17, loaded[6]).tensors)
        == loaded[17].manifest.digest
    )
    assert [place for _, place in audited(memory_store)] == [layout.weights("solver", 16)]
    memory_store.put(layout.merged_delta("solver", 16, 8), b"{}")
    assert (
        weights_digest(reader.read(memory_store, "solver", 17, loaded[6]).tensors)
        == loaded[17].manifest.digest
    )
    assert [place for _, place in audited(memory_store)] == [layout.weights("solver", 16)]


@pytest.mark.usefixtures("pays")
def test_the_audit_checks_every_merged_delta(
    memory_store: ObjectStore,
) -> None:
    publish(memory_store, models(17))
    damaged = []
    for version in (8, 16):
        assert compaction.merge(memory_store, "solver", version, version - 8)
        damaged.append(layout.weights("solver", version))
        key = f"{damaged[-1]}/{manifests.read_merged(memory_store, 'solver', version, version - 8).step.files[0].name}"
        body = bytearray(memory_store.get(key))
        body[-50] ^= 1
        memory_store.put(key, bytes(body))
    assert [place for _, place in audited(memory_store)] == damaged


@pytest.mark.usefixtures("pays")
def test_the_audit_checks_every_update_path_to_a_version(memory_store: ObjectStore) -> None:
    loaded = publish(memory_store, models(25))
    assert compaction.merge(memory_store, "solver", 24, 16)
    assert compaction.merge(memory_store, "solver", 8, 0)
    assert audited(memory_store) == []
    anchor = loaded[20].manifest
    assert anchor.step is not None
    for file in (anchor.files[0], anchor.step.files[0]):
        key = f"{layout.weights('solver', 20)}/{file.name}"
        body = memory_store.get(key)
        memory_store.put(key, body[:-60] + bytes([body[-60] ^ 1]) + body[-59:])
        assert [place for _, place in audited(memory_store)] == [layout.weights("solver", 20)]
        memory_store.put(key, body)


def test_the_audit_reads_no_merged_deltas_that_no_reader_uses(memory_store: ObjectStore) -> None:
    """Each would keep its base in memory up to the last version."""
    publish(memory_store, models(18, size=2000))
    for base in range(16):
        if base != 8:
            memory_store.put(layout.merged_delta("solver", 16, base), b"{}")
        memory_store.put(layout.merged_delta("solver", 17, base), b"{}")
    assert audited(memory_store) == []


def test_the_audit_follows_a_long_chain_once_though_its_first_delta_is_damaged(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(memory_store, models(40, size=2000), anchor_every=40)[1].manifest
    memory_store.put(f"{layout.weights('solver', 1)}/{first.files[0].name}", b"")
    read, versions = reader.read, []

    def counted_read(run: ObjectStore, policy: str, version: int) -> LoadedWeights:
        versions.append(version)
        return read(run, policy, version)

    monkeypatch.setattr(reader, "read", counted_read)
    assert [place for _, place in audited(memory_store)] == [
        layout.weights("solver", version) for version in range(1, 40)
    ]
    assert versions == []


def test_the_audit_reads_few_versions_from_their_anchors(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = publish(memory_store, models(36, size=2000), anchor_every=10)
    for version in (10, 20, 30):
        memory_store.put(layout.retired("solver", version), b"{}")
        for file in loaded[version].manifest.files:
            memory_store.delete(f"{layout.weights('solver', version)}/{file.name}")
    assert audited(memory_store) == []  # read by the deltas that the anchors carry
    monkeypatch.setattr(audit, "READS_FROM_ANCHOR_MAX", 1)
    assert [place for _, place in audited(memory_store)] == [
        layout.weights("solver", version) for version in (*range(21, 30), *range(31, 36))
    ]


def test_a_reader_goes_back_over_at_most_eight_damaged_anchors(memory_store: ObjectStore) -> None:
    loaded = publish(memory_store, models(12, size=2000), anchor_every=1)
    for version in range(3, 12):
        for file in loaded[version].manifest.files:
            memory_store.delete(f"{layout.weights('solver', version)}/{file.name}")
    read = reader.read(memory_store, "solver", 10)
    assert weights_digest(read.tensors) == loaded[10].manifest.digest
    with pytest.raises(CorruptError, match="version 11 of solver cannot be read, whose chain is"):
        reader.read(memory_store, "solver", 11)


def test_a_worker_far_behind_starts_from_an_anchor(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = publish(memory_store, models(6, size=2000))
    monkeypatch.setattr(reader, "LAG_VERSIONS_MAX", 3)
    assert (
        weights_digest(reader.read(memory_store, "solver", 5, loaded[0]).tensors)
        == loaded[5].manifest.digest
    )
    assert reader.read(memory_store, "solver", 5, loaded[5]) is loaded[5]


def test_a_missing_version_leads_to_the_anchor_or_to_a_clear_error(
    memory_store: ObjectStore,
) -> None:
    loaded = publish(memory_store, models(24))
    memory_store.delete(layout.manifest(layout.weights("solver", 19)))
    assert (
        weights_digest(reader.read(memory_store, "solver", 22, loaded[17]).tensors)
        == loaded[22].manifest.digest
    )
    memory_store.delete(layout.manifest(layout.weights("solver", 20)))
    with pytest.raises(
        CorruptError,
        match=r"version 22 of solver .* the chain 22 ← 21 starts from version 20, which does not",
    ):
        reader.read(memory_store, "solver", 22)
    with pytest.raises(NotFoundError):
        reader.read(memory_store, "solver", 24, loaded[23])


def test_the_newest_version_is_found_from_any_older_one(memory_store: ObjectStore) -> None:
    loaded = publish(memory_store, models(12, size=100))
    for than in range(11):
        assert manifests.newer(memory_store, "solver", than) == loaded[-1].manifest
    assert manifests.newer(memory_store, "solver", 11) is None


def test_only_unused_memory_of_a_version_is_reused(
    memory_store: ObjectStore,
) -> None:
    """As in a worker: every loaded version stays intact while the next one reuses the memory of the
    previous one.
    """
    published = publish(memory_store, models(25, size=5000))
    loaded, spare = reader.read(memory_store, "solver", 0), None
    places: set[int] = set()
    for version in [*range(1, 9), 11, 15, 16, 17, 18, 19, 20, 21, 24]:
        read = reader.read(
            memory_store,
            "solver",
            version,
            loaded,
            manifest=published[version].manifest,
            spare=spare,
        )
        assert weights_digest(read.tensors) == published[version].manifest.digest
        assert weights_digest(loaded.tensors) == loaded.manifest.digest
        loaded, spare = read, loaded
        places.add(read.tensors["large"].bits.ctypes.data)
    assert len(places) == 2


def test_tensors_that_share_memory_do_not_get_the_same_buffer_twice(
    memory_store: ObjectStore,
) -> None:
    start = np.arange(1000, dtype=np.uint16)
    tied = bf16(start)
    steps = [{"a": tied, "b": tied}, {"a": bf16(start + 1), "b": bf16(start + 1)}]
    steps += [
        {"a": bf16(start + 2 + number), "b": bf16(start + 7)} for number in range(5)
    ]  # untied, b unchanged
    published = publish(memory_store, steps)
    loaded, spare = reader.read(memory_store, "solver", 0), None
    for version in range(1, len(steps)):
        loaded, spare = reader.read(memory_store, "solver", version, loaded, spare=spare), loaded
        assert weights_digest(loaded.tensors) == published[version].manifest.digest
        assert weights_digest(spare.tensors) == spare.manifest.digest


def spoil(run: ObjectStore, key: str) -> None:
    body = run.get(key)
    run.put(key, body[:-60] + bytes([body[-60] ^ 1]) + body[-59:])


def full(number: int) -> HostTensor:
    return bf16(np.full((60, 50), number, dtype=np.uint16))


def bumped(tensors: Model) -> dict[str, HostTensor]:
    made = {name: tensor.bits.copy() for name, tensor in tensors.items()}
    for bits in made.values():
        bits[0, :5] += 1
    return {name: bf16(bits) for name, bits in made.items()}


@pytest.mark.parametrize("which", ["held", "spare"])
def test_non_contiguous_memory_is_read_correctly_and_not_reused(
    memory_store: ObjectStore, which: str
) -> None:
    tensors = {"a": full(1)}
    loaded = LoadedWeights(publisher.publish(memory_store, "solver", 0, tensors), tensors)
    publisher.publish(memory_store, "solver", 1, bumped(tensors), base=loaded)
    turned = LoadedWeights(loaded.manifest, {"a": bf16(np.asfortranarray(full(1).bits))})
    decoded = reader.read(
        memory_store, "solver", 1, *([turned] if which == "held" else [loaded]), spare=turned
    )
    assert weights_digest(decoded.tensors) == decoded.manifest.digest
    assert (turned.tensors["a"].bits == 1).all()


def test_an_array_that_is_spare_twice_or_in_use_is_not_reused_twice(
    memory_store: ObjectStore,
) -> None:
    tensors = {name: full(number) for number, name in enumerate("abc")}
    loaded = LoadedWeights(publisher.publish(memory_store, "solver", 0, tensors), tensors)
    publisher.publish(memory_store, "solver", 1, bumped(tensors), base=loaded)
    array = np.empty((60, 50), dtype=np.uint16)
    for bits in ([array] * 3, [tensor.bits for tensor in loaded.tensors.values()]):
        spare = LoadedWeights(loaded.manifest, dict(zip("abc", map(bf16, bits), strict=True)))
        decoded = reader.read(memory_store, "solver", 1, loaded, spare=spare)
        assert weights_digest(decoded.tensors) == decoded.manifest.digest
        assert weights_digest(loaded.tensors) == loaded.manifest.digest


def test_only_missing_digests_are_computed(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (loaded,) = publish(memory_store, models(1, size=100))
    digests = {name: info.digest for name, info in loaded.manifest.tensors.items()}
    monkeypatch.setattr(delta_applier, "digest", lambda tensor: "computed")
    applier = DeltaApplier(loaded.tensors, digests)
    assert applier.digests() == digests
    whole = FileInfo("whole", 0, ""), {"new": bf16(np.arange(3, dtype=np.uint16))}
    infos = {
        "small": replace(loaded.manifest.tensors["small"], file="", source="small"),
        "new": TensorInfo(dtype="BF16", shape=(3,), digest="", file="whole"),
    }
    applier.apply("here", infos, [whole], with_digests=True)
    assert applier.digests() == {"small": digests["small"], "new": "computed"}


def test_a_missing_version_does_not_hide_later_ones(memory_store: ObjectStore) -> None:
    loaded = publish(memory_store, models(43, size=2000))
    for key in memory_store.list(layout.weights("solver", 21)):
        memory_store.delete(key)
    assert manifests.newer(memory_store, "solver", 20) == loaded[42].manifest
    assert (
        weights_digest(reader.read(memory_store, "solver", 42, loaded[20]).tensors)
        == loaded[42].manifest.digest
    )


@pytest.mark.usefixtures("pays")
def test_an_intact_update_path_is_found_around_any_damage(memory_store: ObjectStore) -> None:
    loaded = publish(memory_store, models(24))
    assert compaction.merge(memory_store, "solver", 16, 8)
    merged = manifests.read_merged(memory_store, "solver", 16, 8)
    anchor = loaded[20].manifest
    spoil(
        memory_store, f"{layout.weights('solver', 20)}/{anchor.files[0].name}"
    )  # an older anchor and this one's delta are intact
    assert (
        weights_digest(reader.read(memory_store, "solver", 22).tensors)
        == loaded[22].manifest.digest
    )
    spoil(memory_store, f"{layout.weights('solver', 0)}/{loaded[0].manifest.files[0].name}")
    assert (
        weights_digest(reader.read(memory_store, "solver", 22, loaded[21]).tensors)
        == loaded[22].manifest.digest
    )
    merged_key = f"{layout.weights('solver', 16)}/{merged.step.files[0].name}"
    spoil(memory_store, merged_key)  # and no anchor is left: the single deltas are
    assert (
        weights_digest(reader.read(memory_store, "solver", 17, loaded[7]).tensors)
        == loaded[17].manifest.digest
    )
    spoil(memory_store, merged_key)  # repaired
    memory_store.put(layout.manifest(layout.weights("solver", 12)), b"{}")
    assert (
        weights_digest(reader.read(memory_store, "solver", 17, loaded[7]).tensors)
        == loaded[17].manifest.digest
    )
    message = r"version 22 of solver cannot be read, whose chain is 22 ← 21 ← 20: .*00000020.*put the object back"
    with pytest.raises(CorruptError, match=message):
        reader.read(memory_store, "solver", 22)


def test_an_anchor_with_whole_tensors_in_its_delta_is_correct_on_both_paths(
    memory_store: ObjectStore,
) -> None:
    versions = models(21, size=3000)
    versions[20] = {**versions[20], "new": bf16(np.arange(7, dtype=np.uint16))}
    loaded = publish(memory_store, versions)
    assert loaded[20].manifest.step is not None
    assert (
        weights_digest(reader.read(memory_store, "solver", 20).tensors)
        == loaded[20].manifest.digest
    )
    little, read = bytes_read(memory_store, 20, loaded[19])
    assert weights_digest(read.tensors) == loaded[20].manifest.digest
    assert little < bytes_read(memory_store, 20, None)[0]
    assert audited(memory_store) == []


@pytest.mark.usefixtures("pays")
def test_deltas_that_exceed_the_memory_limit_together_are_not_merged(
    memory_store: ObjectStore,
) -> None:
    publish(memory_store, models(9))
    for key in memory_store.list(layout.WEIGHTS):
        if key.endswith(".safetensors"):
            memory_store.delete(key)  # it would be missed: no delta is fetched
    assert not compaction.merge(memory_store, "solver", 8, 0, memory_bytes=1000)
