"""Deltas from the view of readers and writers of versions: exact for every kind of tensor, small,
and never wrong without an error.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.formats import safetensors
from storage.formats.safetensors import Digest, weights_digest
from storage.records.weights import HostTensor, Manifest
from storage.store.object_store import ObjectStore
from storage.weights import delta_store, manifests, publisher, reader
from storage.weights.codec import delta_blocks, delta_numpy, deltas
from storage.weights.delta_store import TRANSFERS_MAX
from storage.weights.manifests import LoadedWeights
from tests.support.stores.resealed import replace_blob


class Parts(Digest):
    """A digest that records its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Any] = []

    def update(self, bits: Any) -> None:
        super().update(bits)
        self.parts.append(bits.copy())


def tensor(bits: Any, dtype: str = "BF16") -> HostTensor:
    return HostTensor(dtype, bits.shape, bits)


def draw(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def trained(size: int, lr: float, seed: int = 0) -> tuple[Any, Any]:
    """bf16 bits of normal weights before and after one Adam-like step of their fp32 masters."""
    weights32 = draw(seed).standard_normal(size).astype(np.float32) * np.float32(0.02)
    step = np.clip(draw(seed + 1).standard_normal(size) * 0.6, -1.5, 1.5).astype(np.float32)
    return _bf16(weights32), _bf16(weights32 - np.float32(lr) * step)


def _bf16(values: Any) -> Any:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def entropy_bytes(old: Any, new: Any) -> float:
    """Entropy bound without the weights, in bytes per change: positions, and the distribution of
    the bit deltas.
    """
    changed = old != new
    share = changed.mean()
    positions = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    _, counts = np.unique((new - old)[changed], return_counts=True)
    steps = -(counts / counts.sum() * np.log2(counts / counts.sum())).sum()
    return float(positions + steps) / 8


@pytest.mark.parametrize("size", [1000, delta_blocks.COMPILED_FROM, delta_blocks.BLOCK_ELEMENTS])
def test_a_block_encoded_by_any_loop_decodes_to_the_new_bits(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = trained(size, 1e-6)
    block = delta_blocks.encode(3, old, new)
    monkeypatch.setattr(
        delta_blocks, "COMPILED_FROM", 0 if size < delta_blocks.COMPILED_FROM else 2**62
    )
    assert delta_blocks.encode(3, old, new) == block
    bits = old.copy()
    delta_blocks.apply(bits, memoryview(block))
    assert (bits == new).all()


@pytest.mark.parametrize(
    ("num_changed", "method"),
    [(1, delta_blocks.STEPS), (4, delta_blocks.STEPS), (5, delta_blocks.PLANES)],
)
def test_a_block_with_more_than_half_its_elements_changed_is_stored_as_planes(
    num_changed: int, method: int
) -> None:
    old = np.zeros(8, dtype=np.uint16)
    new = np.where(np.arange(8) < num_changed, 700, old).astype(np.uint16)
    block = delta_blocks.encode(0, old, new)
    assert block[8] == method
    assert delta_blocks.num_changed(block, old, new) == num_changed
    bits = old.copy()
    delta_blocks.apply(bits, memoryview(block))
    assert (bits == new).all()


def test_a_block_of_bit_deltas_can_change_at_most_every_element() -> None:
    """Foreign writers can avoid planes for such a block."""
    positions, steps = np.arange(8, dtype=np.uint32), np.ones(8, dtype=np.uint16)
    body = delta_blocks._run(delta_numpy, positions, steps, 8)
    block = (
        delta_blocks._BLOCK.pack(delta_blocks._BLOCK.size + len(body), 0, delta_blocks.STEPS, 1, 0)
        + body
    )
    bits = np.arange(8).astype(np.uint16)
    delta_blocks.apply(bits, memoryview(block))
    assert bits.tolist() == list(range(1, 9))
    with pytest.raises(CorruptError, match="8 changes of 7 elements"):
        delta_blocks.apply(bits[:7], memoryview(block))


def test_a_delta_has_the_name_of_the_new_tensor() -> None:
    base, new = (
        {"before": tensor(np.zeros(9, dtype=np.uint16))},
        {"after": tensor(np.ones(9, dtype=np.uint16))},
    )
    (change,) = deltas.encode(base, new, {"after": "before"}, threads=1)
    assert (change.name, change.num_changed) == ("after", 9)
    assert (deltas.apply(base["before"], memoryview(change.blob)).bits == 1).all()


@pytest.mark.parametrize("size", [1000, delta_blocks.COMPILED_FROM + 3])
def test_digests_of_parts_cover_changes_at_both_ends_of_each_part(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_blocks, "PART_ELEMENTS", 100)
    old = np.arange(size).astype(np.uint16)
    new = old.copy()
    new[[0, 99, 100, 199, 500, size - 1]] += 1
    for block, wanted in ((delta_blocks.encode(0, old, new), new), (b"", old)):
        for before in (None, old):
            digest = Parts()
            bits = old.copy() if before is None else np.zeros_like(old)
            if block:
                delta_blocks.apply(bits, memoryview(block), old=before, digest=digest)
            else:
                delta_blocks.unchanged(bits, before, digest)
            assert [len(part) for part in digest.parts] == [100] * (size // 100) + (
                [size % 100] if size % 100 else []
            )
            assert (np.concatenate(digest.parts) == wanted).all()
            assert (bits == wanted).all()


def test_the_size_of_a_block_is_near_the_entropy_bound() -> None:
    old, new = trained(2**21, 4.5e-7)
    num_changes = int((old != new).sum())
    assert 0.009 < num_changes / len(old) < 0.013
    assert len(delta_blocks.encode(0, old, new)) / num_changes < 1.04 * entropy_bytes(old, new)


def test_special_values_at_every_share_of_changes_are_decoded_exactly() -> None:
    special = np.array(
        [0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001], dtype=np.uint16
    )  # NaN, ±inf, −0, 0 …
    pairs = np.stack(np.meshgrid(special, special), axis=-1).reshape(-1, 2)
    for old, new in (
        (pairs[:, 0], pairs[:, 1]),
        (pairs[:, 0], pairs[:, 0]),
        (pairs[:, 0], pairs[:, 0] ^ 0xFFFF),
    ):
        block = delta_blocks.encode(0, old.copy(), new.copy())
        bits = old.copy()
        if block:
            delta_blocks.apply(bits, memoryview(block))
        assert (bits == new).all()
    assert delta_blocks.encode(0, pairs[:, 0].copy(), pairs[:, 0].copy()) == b""


def test_a_block_with_a_wrong_base_or_cut_short_is_refused_or_gives_other_bits() -> None:
    old, new = trained(5000, 1e-6)
    block = delta_blocks.encode(0, old, new)
    for end in range(0, len(block), 7):
        with pytest.raises(CorruptError):
            delta_blocks.apply(old.copy(), memoryview(block[:end]))
    twice = new.copy()
    delta_blocks.apply(twice, memoryview(block))
    assert (
        twice != new
    ).any()  # a bit delta, not a value: only the base named by the manifest gives the right result
    with pytest.raises(CorruptError, match="of 10 elements"):
        delta_blocks.apply(old[:10].copy(), memoryview(block))


def test_a_block_of_the_removed_compact_form_is_refused_with_a_remedy() -> None:
    old, new = trained(5000, 1e-6)
    block = bytearray(delta_blocks.encode(0, old, new))
    block[9] = 2  # the number of classes
    with pytest.raises(
        CorruptError,
        match=r"into 2 classes; the setting compact_deltas, .* was removed: read the version with",
    ):
        delta_blocks.apply(old.copy(), memoryview(block))


def test_an_error_in_a_delta_names_the_file_and_the_tensor(memory_store: ObjectStore) -> None:
    old, new = trained(5000, 1e-5)
    loaded = LoadedWeights(
        publisher.publish(memory_store, "solver", 0, {"w": tensor(old)}), {"w": tensor(old)}
    )
    publisher.publish(memory_store, "solver", 1, {"w": tensor(new)}, base=loaded)
    replace_blob(memory_store, 1, lambda blob: blob[:9] + b"\2" + blob[10:])
    message = r"version 1 of solver .*weights/solver/00000001/\w+\.delta-00000\.safetensors, the change of w: .* into 2 classes"
    with pytest.raises(CorruptError, match=message):
        reader.read(memory_store, "solver", 1, loaded)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("BF16", np.uint16),
        ("F16", np.uint16),
        ("F32", np.uint32),
        ("I64", np.int64),
        ("U8", np.uint8),
        ("BOOL", np.bool_),
    ],
)
@pytest.mark.parametrize("shape", [(), (0, 4), (7,), (40, 30), (3, 5, 8)])
def test_tensors_of_any_dtype_and_shape_are_decoded_exactly(
    dtype: str, kind: Any, shape: tuple[int, ...]
) -> None:
    old = draw(0).integers(0, 2, shape).astype(kind)
    new = np.where(draw(1).random(shape) < 0.3, draw(2).integers(0, 2, shape), old).astype(kind)
    base, wanted = {"w": tensor(old, dtype)}, {"w": tensor(new, dtype)}
    (change,) = deltas.encode(base, wanted, {"w": "w"}, threads=1)
    digest = Parts()
    result = deltas.apply(base["w"], memoryview(change.blob), digest=digest)
    assert (result.dtype, result.shape, result.bits.dtype) == (dtype, shape, new.dtype)
    assert (result.bits == new).all()
    assert [bits for part in digest.parts for bits in part] == deltas.flat(new).tolist()
    assert str(digest) == safetensors.digest(wanted["w"])
    assert (base["w"].bits == old).all()


def test_blocks_of_one_tensor_are_decoded_on_several_threads_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        deltas, "BLOCK_ELEMENTS", 1000
    )  # for writer and reader: many blocks in a small tensor
    old, new = trained(25_500, 1e-5)
    new[3000:5000] = old[3000:5000]  # two blocks without a change
    blobs = set()
    for threads in (1, 2, 7):
        (change,) = deltas.encode(
            {"w": tensor(old)}, {"w": tensor(new)}, {"w": "w"}, threads=threads
        )
        blobs.add(change.blob)
    assert len(blobs) == 1
    for in_place in (False, True):
        digest = Parts()
        result = deltas.apply(
            tensor(old.copy()), memoryview(change.blob), in_place=in_place, digest=digest
        )
        assert (result.bits == new).all()
        assert (np.concatenate(digest.parts) == new).all()
    with pytest.raises(CorruptError, match="a block 25 of 1000 elements; the tensor has 25000"):
        deltas.apply(tensor(old[:25_000]), memoryview(change.blob))
    with pytest.raises(CorruptError, match="wrong block"):
        deltas.apply(tensor(old), memoryview(change.blob + change.blob))


def versions_of_a_model(number: int) -> list[dict[str, HostTensor]]:
    """Versions 0, 1, …: a large tensor with few changes, an unchanged one, a scalar and an empty
    one.
    """
    old, _ = trained(30_000, 0.0)
    created = []
    for version in range(number):
        bits = old.copy().reshape(300, 100)
        touched = draw(version).random(bits.shape) < 0.01 * version
        bits[touched] += 1
        created.append(
            {
                "large": tensor(bits),
                "fixed": tensor(old[:500].copy()),
                "scalar": tensor(np.array(version, dtype=np.uint32), "F32"),
                "empty": tensor(np.zeros((0, 8), dtype=np.uint16)),
            }
        )
    return created


def published(run: ObjectStore, models: list[dict[str, HostTensor]]) -> list[Manifest]:
    loaded: LoadedWeights | None = None
    manifests = []
    for version, tensors in enumerate(models):
        manifest = publisher.publish(run, "solver", version, tensors, base=loaded)
        loaded = LoadedWeights(manifest, tensors)
        manifests.append(manifest)
    return manifests


def test_a_chain_of_deltas_gives_every_version_bit_for_bit(memory_store: ObjectStore) -> None:
    models = versions_of_a_model(5)
    manifests = published(memory_store, models)
    assert [(manifest.kind, manifest.base) for manifest in manifests] == [
        ("anchor", None),
        *(("delta", v) for v in range(4)),
    ]
    anchor, *others = (sum(file.num_bytes for file in manifest.files) for manifest in manifests)
    assert max(others) < anchor / 10
    for version, tensors in enumerate(models):
        loaded = reader.fetch(memory_store, "solver", version)
        assert weights_digest(loaded) == weights_digest(tensors) == manifests[version].digest


def test_a_reader_of_a_version_fetches_only_later_deltas_and_shares_unchanged_tensors(
    memory_store: ObjectStore,
) -> None:
    published(memory_store, versions_of_a_model(5))
    loaded = reader.read(memory_store, "solver", 2)
    memory_store.delete(f"{layout.weights('solver', 0)}/manifest.json")
    decoded = reader.read(memory_store, "solver", 4, loaded)
    assert (
        weights_digest(decoded.tensors) == manifests.read_manifest(memory_store, "solver", 4).digest
    )
    assert (
        reader.read(memory_store, "solver", 4, reader.read(memory_store, "solver", 3, loaded))
        .tensors["fixed"]
        .bits.base
        is None
    )
    third = reader.read(memory_store, "solver", 3, loaded)
    assert reader.read(memory_store, "solver", 4, third).tensors["fixed"] is third.tensors["fixed"]
    with pytest.raises(
        CorruptError,
        match=r"version 4 of solver cannot be read: the chain 4 ← 3 ← 2 ← 1 starts from version 0",
    ):
        reader.fetch(memory_store, "solver", 4)


def test_renamed_tied_and_reshaped_tensors_are_matched(memory_store: ObjectStore) -> None:
    base = versions_of_a_model(2)[1]
    new: Mapping[str, HostTensor] = {
        "renamed": base["large"],
        "fixed": base["fixed"],
        "tied": base["fixed"],
        "scalar": tensor(base["scalar"].bits.reshape(1), "F32"),
    }
    first = publisher.publish(memory_store, "solver", 0, base)
    manifest = publisher.publish(memory_store, "solver", 1, new, base=LoadedWeights(first, base))
    assert manifest.kind == "delta"
    assert {name: (bool(info.file), info.source) for name, info in manifest.tensors.items()} == {
        "renamed": (False, "large"),
        "fixed": (False, "fixed"),
        "tied": (False, "fixed"),
        "scalar": (True, ""),
    }
    assert weights_digest(reader.fetch(memory_store, "solver", 1)) == weights_digest(new)


def test_tensors_that_swap_their_names_need_no_file(memory_store: ObjectStore) -> None:
    bits = draw(0).integers(0, 2**16, (3, 40, 50)).astype(np.uint16)
    base = {
        "a": tensor(bits[0]),
        "b": tensor(bits[1]),
        "c": tensor(bits[2]),
        "same": tensor(bits[0].copy()),
    }
    changed = bits[2].copy()
    changed[0, 0] += 1
    new = {
        "a": base["b"],
        "b": base["a"],
        "c": tensor(changed),
        "same": base["same"],
        "late": base["c"],
    }
    loaded = LoadedWeights(publisher.publish(memory_store, "solver", 0, base), base)
    manifest = publisher.publish(memory_store, "solver", 1, new, base=loaded)
    assert manifest.kind == "delta"
    result = {name: (bool(info.file), info.source) for name, info in manifest.tensors.items()}
    assert {name: result[name] for name in ("a", "c", "late", "same")} == {
        "a": (False, "b"),
        "c": (True, "c"),
        "late": (False, "c"),
        "same": (False, "same"),
    }
    assert result["b"] in ((False, "a"), (False, "same"))  # equal bits
    assert len(manifest.files) == 1
    assert weights_digest(reader.read(memory_store, "solver", 1, loaded).tensors) == manifest.digest
    assert weights_digest(reader.fetch(memory_store, "solver", 1)) == weights_digest(new)


def test_tied_tensors_that_change_share_one_entry(memory_store: ObjectStore) -> None:
    bits = versions_of_a_model(1)[0]["large"].bits
    moved = bits.copy()
    moved[::7, ::11] += 1
    base = {"embed": tensor(bits), "head": tensor(bits)}
    new = {"embed": tensor(moved), "head": tensor(moved)}
    first = publisher.publish(memory_store, "solver", 0, base)
    manifest = publisher.publish(memory_store, "solver", 1, new, base=LoadedWeights(first, base))
    assert (manifest.tensors["head"].entry, manifest.tensors["head"].file) == (
        "embed",
        manifest.tensors["embed"].file,
    )
    assert weights_digest(reader.fetch(memory_store, "solver", 1)) == weights_digest(new)


def test_an_adapter_whose_first_step_changed_nothing_is_read(memory_store: ObjectStore) -> None:
    """All B are 0 and share one entry; together they may be much larger than all A."""
    random = draw(2)

    def drawn(*shape: int) -> HostTensor:
        return tensor(random.integers(1, 2**15, shape).astype(np.uint16))

    base = {f"{layer}.weight": drawn(640, 32) for layer in range(24)}
    adapter = {
        f"{layer}.lora_{name}.weight": part
        for layer in range(24)
        for name, part in (("A", drawn(2, 32)), ("B", tensor(np.zeros((640, 2), np.uint16))))
    }
    first = publisher.publish(memory_store, "solver", 0, base)
    loaded = LoadedWeights(first, base)
    manifest = publisher.publish(memory_store, "solver", 1, {**base, **adapter}, base=loaded)
    assert manifest.kind == "delta"
    assert len({info.entry for name, info in manifest.tensors.items() if "lora_B" in name}) == 2
    assert weights_digest(reader.fetch(memory_store, "solver", 1)) == manifest.digest


def test_a_delta_that_is_not_small_becomes_an_anchor_and_leaves_no_files(
    memory_store: ObjectStore,
) -> None:
    old = draw(0).integers(0, 2**16, (300, 100)).astype(np.uint16)
    new = draw(1).integers(0, 2**16, (300, 100)).astype(np.uint16)
    first = publisher.publish(memory_store, "solver", 0, {"w": tensor(old)})
    manifest = publisher.publish(
        memory_store, "solver", 1, {"w": tensor(new)}, base=LoadedWeights(first, {"w": tensor(old)})
    )
    assert (manifest.kind, manifest.base) == ("anchor", None)
    assert len(memory_store.list(layout.weights("solver", 1))) == 2  # the data and the manifest


def damaged(run: ObjectStore, version: int, change: Any) -> None:
    folder = layout.weights("solver", version)
    (key,) = (key for key in run.list(folder) if ".delta-" in key)
    run.put(key, change(bytearray(run.get(key))))


def _flipped(body: bytearray) -> bytes:
    body[-40] ^= 4
    return bytes(body)


@pytest.mark.parametrize(
    "change", [_flipped, lambda body: bytes(body[:-9])], ids=["flipped", "truncated"]
)
def test_a_damaged_delta_is_never_applied(memory_store: ObjectStore, change: Any) -> None:
    published(memory_store, versions_of_a_model(4))
    loaded = reader.read(memory_store, "solver", 1)
    damaged(memory_store, 2, change)
    for known in (None, loaded):
        with pytest.raises(
            CorruptError, match=r"weights/solver/00000002/.*is not what its manifest lists"
        ):
            reader.read(memory_store, "solver", 3, known)


def test_a_wrong_base_is_detected_by_the_digests_of_the_result(memory_store: ObjectStore) -> None:
    models = versions_of_a_model(4)
    published(memory_store, models)
    false = LoadedWeights(
        manifests.read_manifest(memory_store, "solver", 2), models[1]
    )  # bits of version 1 under the name of version 2
    assert weights_digest(reader.read(memory_store, "solver", 3, false).tensors) == weights_digest(
        models[3]
    )  # from the anchor


def test_a_publication_is_a_delta_to_the_version_before(memory_store: ObjectStore) -> None:
    models = versions_of_a_model(3)
    first = publisher.publish(memory_store, "solver", 0, models[0])
    with pytest.raises(ValueError, match="version 2 of solver is no step from solver 0"):
        publisher.publish(
            memory_store, "solver", 2, models[2], base=LoadedWeights(first, models[0])
        )


def test_a_failing_store_stops_a_publication_at_the_first_file(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [
        {f"w{part}": tensor(trained(3000, lr, part)[version]) for part in range(40)}
        for version, lr in ((0, 0.0), (1, 1e-5))
    ]
    first = publisher.publish(memory_store, "solver", 0, models[0])
    monkeypatch.setattr(delta_store, "FILE_BYTES_MAX", 1)  # one file per tensor
    tries: list[str] = []

    class Away:
        def __getattr__(self, verb: str) -> Any:
            return getattr(memory_store.backend, verb)

        def write(self, key: str, body: bytes) -> None:
            tries.append(key)
            raise ConfigError("the disk is full")

    with pytest.raises(ConfigError, match="the disk is full"):
        publisher.publish(
            replace(memory_store, backend=Away()),
            "solver",
            1,
            models[1],
            base=LoadedWeights(first, models[0]),
        )
    assert len(tries) <= 2 * TRANSFERS_MAX


def known(old: HostTensor, new: Any) -> HostTensor:
    """`new` as a tensor with its given changes from `old`."""
    before, after = deltas.flat(old.bits), deltas.flat(new)
    positions = np.flatnonzero(before != after).astype(np.uint64)
    return deltas.moved(old, positions, (after - before)[positions], threads=2)


@pytest.mark.parametrize("size", [1000, delta_blocks.COMPILED_FROM])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9])
def test_given_changes_produce_the_same_bytes_as_a_comparison(
    size: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "BLOCK_ELEMENTS", size)
    old = trained(3 * size + 77, 0.0)[0]
    new = old + np.where(
        draw(1).random(len(old)) < share, draw(2).choice([1, 2**16 - 1, 700], len(old)), 0
    ).astype(np.uint16)
    new[size : 2 * size] = old[size : 2 * size]  # a block without a change
    base = tensor(old)
    told = known(base, new)
    assert (told.bits == new).all()
    (compared,) = deltas.encode({"w": base}, {"w": tensor(new)}, {"w": "w"}, threads=1)
    (result,) = deltas.encode({"w": base}, {"w": told}, {"w": "w"}, threads=2)
    assert result == compared


def test_given_changes_replace_the_comparison_only_for_their_own_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = trained(5000, 1e-5)
    base = tensor(old)
    told = known(base, new)
    (wanted,) = deltas.encode({"w": base}, {"w": tensor(new)}, {"w": "w"}, threads=1)
    twin, other = tensor(old.copy()), tensor(new[::-1].copy())
    (moved,) = deltas.encode({"w": other}, {"w": told}, {"w": "w"}, threads=1)
    assert (deltas.apply(other, memoryview(moved.blob)).bits == new).all()
    monkeypatch.setattr(delta_numpy, "find", None)
    assert list(deltas.encode({"w": base}, {"w": told}, {"w": "w"}, threads=1)) == [wanted]
    with pytest.raises(TypeError, match="not callable"):
        list(deltas.encode({"w": twin}, {"w": told}, {"w": "w"}, threads=1))


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int64, np.float64])
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5, 8)])
def test_a_renamed_tensor_has_the_shape_of_its_base_which_is_not_changed(
    kind: Any, shape: tuple[int, ...]
) -> None:
    old = draw(0).integers(0, 2, shape).astype(kind)
    new = np.where(draw(1).random(shape) < 0.3, 1, old).astype(kind)
    base = tensor(old.copy(), "any")
    result = known(base, new)
    assert (result.dtype, result.shape, result.bits.dtype, result.bits.shape) == (
        "any",
        shape,
        new.dtype,
        shape,
    )
    assert (result.bits == new).all()
    assert (base.bits == old).all()


def test_positions_beyond_32_bits_are_distinguished() -> None:
    """The positions of a tensor of more than 2³² elements, of which only the requested block is
    read.
    """
    positions = np.array([5, 2**32 + 5, 2**33 + 1], dtype=np.uint64)
    steps = np.array([1, 2, 3], dtype=np.uint16)
    blocks = 2**32 // delta_blocks.BLOCK_ELEMENTS
    for number, wanted in (
        (0, ([5], [1])),
        (blocks, ([5], [2])),
        (2 * blocks, ([1], [3])),
        (1, ([], [])),
    ):
        result = deltas._within(positions, steps, number)
        assert (result[0].tolist(), result[1].tolist()) == wanted
        assert result[0].dtype == np.uint32


class CountedBytes(bytes):
    """Bytes that count how often their length is asked for."""

    asked = 0

    def __len__(self) -> int:
        CountedBytes.asked += 1
        return super().__len__()


def test_the_work_for_many_small_changes_grows_with_their_number(
    memory_store: ObjectStore,
) -> None:
    changes = [deltas.Change(f"w{number}", CountedBytes(), 0) for number in range(1000)]
    CountedBytes.asked = 0
    written = delta_store.write_changes(
        memory_store, {}, changes, {}, "0" * 32, bytes_max=2**20, memory_bytes=2**20
    )
    assert written
    assert (written.contents.files, written.num_changed) == ((), 0)
    assert CountedBytes.asked < 10_000
