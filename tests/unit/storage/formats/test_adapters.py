import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.formats import adapters
from storage.formats.json_objects import seal
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor, StoredAdapter, TensorInfo
from storage.store.object_store import ObjectStore
from storage.verify.violations import Findings
from storage.verify.weights import WeightsAudit
from storage.weights import compaction, manifests, publisher, reader
from tests.support.runs.adapter_versions import LORA, A, B, W, drawn, publish_adapters
from tests.support.stores.stranger import sealed
from trainer.engines.torch.host_tensors import to_host, to_torch


def test_the_scale_is_alpha_by_the_rank_or_by_its_root() -> None:
    assert StoredAdapter(kind="lora", rank=16, alpha=32.0).scale == 2.0
    assert StoredAdapter(kind="lora", rank=16, alpha=32.0, rslora=True).scale == 8.0


def test_a_merged_weight_is_w_plus_scale_times_b_times_a() -> None:
    w, a, b = ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 10.0]], [[2.0], [0.0]])
    expected = [[1 + 0.5 * 2 * 1, 2 + 0.5 * 2 * 10], [3.0, 4.0]]
    with_numpy = adapters.merge(*(np.array(each, np.float32) for each in (w, a, b)), 0.5)
    assert with_numpy.tolist() == expected
    assert with_numpy.dtype == np.float32
    assert adapters.merge(*map(torch.tensor, (w, a, b)), 0.5).tolist() == expected


def test_where_b_is_0_the_weight_keeps_its_bits() -> None:
    w, a, b = torch.tensor([[-0.0, 1.0]]), torch.ones(1, 2), torch.zeros(1, 1)
    assert math.copysign(1, float(adapters.merge(w, a, b, 2.0)[0, 0])) == -1
    given = drawn()
    given[B] = HostTensor("BF16", (64, 2), np.full((64, 2), 0x8000, np.uint16))  # −0
    assert adapters.merged(LORA, given).tensors[W] is given[W]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_merged_tensor_is_rounded_to_the_dtype_of_its_weight(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "BLOCK_ELEMENTS", 37)  # 7 rows of 64: the last block has 1
    given = drawn(dtype)
    made = adapters.merged(LORA, given).tensors
    w, a, b = (to_torch(given[name]).double() for name in (W, A, B))
    exact = w + 1.5 * (b @ a)
    expected = to_torch(to_host(exact.float(), dtype))
    assert made.keys() == {W, "norm.weight"}
    assert made["norm.weight"] is given["norm.weight"]
    assert (made[W].dtype, made[W].shape) == (dtype, (64, 5))
    differing = (to_torch(made[W]).float() - expected.float()).abs() > 1e-6
    assert int(differing.sum()) <= (0 if dtype == "F32" else 1)  # float32 sums may be beyond a tie
    assert (made[W].bits != given[W].bits).mean() > 0.9


def test_bf16_is_rounded_to_nearest_even_and_nan_stays_nan() -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F800000, 0xFF7FFFFF, 0x7F800001]
    values = np.array(bits, np.uint32).view(np.float32)
    made = adapters._bits(values, "BF16").tolist()
    assert made == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFF80, 0x7FC0]
    assert made[:6] == to_host(torch.from_numpy(values[:6].copy()), "BF16").bits.tolist()


def test_without_an_adapter_the_tensors_are_those_that_are_given() -> None:
    given = drawn()
    assert adapters.merged(None, given).tensors is given


def test_only_layers_whose_matrices_are_other_objects_are_merged_again() -> None:
    other = {f"m.{name[2:]}": tensor for name, tensor in drawn(seed=5).items() if name[0] == "l"}
    given = drawn() | other
    first = adapters.merged(LORA, given)
    changed = given | {A: drawn(seed=9)[A]}
    second = adapters.merged(LORA, changed, first)
    assert second.tensors["m.weight"] is first.tensors["m.weight"]
    assert second.tensors["norm.weight"] is given["norm.weight"]
    assert weights_digest(second.tensors) == weights_digest(adapters.merged(LORA, changed).tensors)
    assert second.tensors[W].bits.tolist() != first.tensors[W].bits.tolist()
    wider = adapters.merged(replace(LORA, alpha=6.0), given, first)
    assert wider.tensors["m.weight"].bits.tolist() != first.tensors["m.weight"].bits.tolist()


def test_a_tensor_with_the_name_of_a_layer_is_not_merged() -> None:
    layer = W.removesuffix(".weight")
    given = drawn() | {layer: drawn()["norm.weight"]}
    assert not adapters.fault(LORA, given)
    made = adapters.merged(LORA, given).tensors
    assert made[layer] is given[layer]
    assert weights_digest(made) == weights_digest(
        adapters.merged(LORA, drawn()).tensors | {layer: given[layer]}
    )


def test_a_version_with_an_adapter_stores_no_bytes_of_unchanged_tensors(
    memory_store: ObjectStore,
) -> None:
    base = publish_adapters(memory_store)
    for version in (1, 2):
        manifest = manifests.read_manifest(memory_store, "solver", version)
        assert (manifest.kind, manifest.adapter) == ("delta", LORA)
        assert {name for name, info in manifest.tensors.items() if info.file} == {A, B}
        read = reader.read(memory_store, "solver", version)
        assert read.tensors[W].bits.tolist() == base[W].bits.tolist()
        assert read.tensors[A].bits.tolist() == drawn(seed=version)[A].bits.tolist()
    assert manifests.read_manifest(memory_store, "solver", 0).adapter is None


def test_an_adapter_that_appears_after_version_0_is_verified_in_every_way(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_adapters(memory_store, 9)
    monkeypatch.setattr(compaction, "BYTES_MIN", 0)
    assert compaction.merge(memory_store, "solver", 8, 0)
    for version in range(1, 9):  # its content is not read
        memory_store.put(layout.batch("solver", version), b"")
    findings = Findings()
    digests = WeightsAudit(memory_store, "solver", findings).audit(8, lambda stage, share: None)
    assert len(digests) == 9
    assert findings.violations() == ()


def test_a_version_without_the_matrices_of_its_adapter_is_not_published(
    memory_store: ObjectStore,
) -> None:
    tensors = {name: tensor for name, tensor in drawn().items() if name != B}
    with pytest.raises(ConfigError, match=r"version 1 of solver would .* lacks one of the tensors"):
        publisher.publish(memory_store, "solver", 1, tensors, adapter=LORA)
    assert not manifests.exists(memory_store, "solver", 1)


def test_a_manifest_without_the_field_is_read_as_before(memory_store: ObjectStore) -> None:
    publish_adapters(memory_store)
    key = layout.manifest(layout.weights("solver", 2))
    fields = _fields(memory_store, key)
    del fields["adapter"]
    memory_store.put(key, sealed(fields))
    assert manifests.read_manifest(memory_store, "solver", 2).adapter is None


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"kind": "dora"}, "adapter.kind: Input should be 'lora'"),
        ({"rank": 0}, "adapter.rank: Input should be greater than or equal to 1"),
        ({"rank": 2**40}, "adapter.rank: Input should be less than or equal to 65536"),
        ({"rank": 2.0}, "adapter.rank: Input should be a valid integer"),
        ({"alpha": 0.0}, "adapter.alpha: Input should be greater than 0"),
        ({"alpha": 1e300}, "adapter.alpha: Input should be less than or equal to"),
        ({"alpha": "NaN"}, "adapter.alpha: Input should be a valid number"),
        ({"rslora": 1}, "adapter.rslora: Input should be a valid boolean"),
        ({"rank": 3}, "names an adapter of rank 3, but has matrices of l that do not fit"),
    ],
)  # fmt: skip
def test_an_adapter_of_another_form_is_refused(
    memory_store: ObjectStore, field: dict[str, Any], message: str
) -> None:
    publish_adapters(memory_store)
    key = layout.manifest(layout.weights("solver", 2))
    fields = _fields(memory_store, key)
    fields["adapter"] |= field
    memory_store.put(key, sealed(fields))
    with pytest.raises(CorruptError) as caught:
        manifests.read_manifest(memory_store, "solver", 2)
    assert message in str(caught.value)


def _fields(run: ObjectStore, key: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(run.get(key))
    return fields


def info(*shape: int, dtype: str = "BF16") -> TensorInfo:
    return TensorInfo(dtype=dtype, shape=shape, digest="", file="")


FITTING = {W: info(6, 5), A: info(2, 5), B: info(6, 2)}


@pytest.mark.parametrize(
    ("infos", "reason"),
    [
        (FITTING, ""),
        ({W: info(6, 3), A: info(2, 3), B: info(6, 2)}, ""),  # 18 elements, and 18
        ({W: info(3, 5), A: info(2, 5), B: info(3, 2)}, "has 16 elements in A and B, more than"),
        (FITTING | {"m" + W[1:]: info(2, 2), "m" + A[1:]: info(2, 2), "m" + B[1:]: info(2, 2)}, ""),
        ({W: info(3, 5)}, "has no tensors of an adapter"),
        ({W: info(3, 5), A: info(2, 5)}, "lacks one of the tensors l{"),
        ({W: info(3, 5), B: info(3, 2)}, "lacks one of the tensors l{"),
        ({A: info(2, 5), B: info(3, 2)}, "lacks one of the tensors l{"),
        (FITTING | {A: info(2, 4)}, "has matrices of l that do not fit"),
        (FITTING | {A: info(3, 5)}, "has matrices of l that do not fit"),
        (FITTING | {B: info(2, 2)}, "has matrices of l that do not fit"),
        (FITTING | {B: info(3, 3)}, "has matrices of l that do not fit"),
        (FITTING | {W: info(6, 5, 1)}, "has matrices of l that do not fit"),
        (FITTING | {W: info(6, 5, dtype="I8")}, "has other dtypes than"),
        (FITTING | {B: info(6, 2, dtype="F8_E4M3")}, "has other dtypes than"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_their_adapter_have_a_fault(
    infos: dict[str, TensorInfo], reason: str
) -> None:
    found = adapters.fault(LORA, infos)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_sealed_manifest_has_the_fields_of_its_adapter(memory_store: ObjectStore) -> None:
    publish_adapters(memory_store, 2)
    manifest = manifests.read_manifest(memory_store, "solver", 1)
    assert b'"adapter":{"kind":"lora","rank":2,"alpha":3.0,"rslora":false}' in seal(manifest)
