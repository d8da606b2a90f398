"""Copies of changed elements to the host. All tests run on the CPU device, which uses the same code
as any other.
"""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from storage.errors import CorruptError
from storage.formats.safetensors import weights_digest
from storage.records.weights import HostTensor
from storage.store.object_store import ObjectStore
from storage.weights import publisher, reader
from storage.weights.codec import deltas
from storage.weights.manifests import LoadedWeights
from tests.contract.test_train_engine import EngineCallsContract
from tests.support.models.trainer_cases import (
    MODEL_CONFIG,
    base_weights,
    reference_model,
    sampled_batch,
)
from trainer.config import TrainConfig
from trainer.engines.torch import changed_elements, engine
from trainer.engines.torch.changed_elements import DeviceScan
from trainer.engines.torch.engine import TorchTrainEngine
from trainer.engines.torch.host_tensors import to_host

SPECIAL = [0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0000, 0x0001, 0x8001, 0x7FFF, 0xFFFF]
"""bf16: NaNs, ±infinity, −0.0, 0.0, the smallest numbers."""


def bf16(patterns: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(patterns, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


def same(item: HostTensor, other: HostTensor) -> bool:
    kinds = [(each.dtype, each.shape, each.bits.dtype, each.bits.shape) for each in (item, other)]
    return kinds[0] == kinds[1] and item.bits.tobytes() == other.bits.tobytes()


def masters(size: int, seed: int = 0) -> torch.Tensor:
    return 0.02 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_only_positions_and_bit_deltas_are_copied_after_the_first_version() -> None:
    scan, tensor = DeviceScan(), masters(1000).reshape(20, 50)
    first = scan.to_host("w", tensor, "BF16")
    assert scan.num_bytes == 2000
    tensor[3, 7] *= 2
    tensor[19, 49] *= -1
    second = scan.to_host("w", tensor, "BF16")
    assert scan.num_bytes == 2000 + 2 * (4 + 2)
    assert same(second, to_host(tensor, "BF16"))
    assert second.difference is not None
    assert second.difference.base() is first
    assert second.difference.positions.tolist() == [3 * 50 + 7, 19 * 50 + 49]
    assert second.difference.bit_deltas.tolist() == [
        1 << 7,
        1 << 15,
    ]  # the exponent plus one; the sign
    assert (second.difference.positions.dtype, second.difference.bit_deltas.dtype) == (
        np.uint64,
        np.uint16,
    )


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_for_any_chunk_and_block_size_the_host_has_the_rounded_masters(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_elements, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(deltas, "BLOCK_ELEMENTS", 50)
    scan, tensor = DeviceScan(), masters(640)
    for step in range(5):
        host = scan.to_host("w", tensor, "BF16")
        assert same(host, to_host(tensor, "BF16"))
        assert (host.difference is None) == (step == 0)
        tensor += torch.where(
            torch.rand(640, generator=torch.Generator().manual_seed(step)) < 0.2, 1e-3, 0.0
        )


def test_each_bit_pattern_can_change_into_each_other_one() -> None:
    pairs = np.stack(np.meshgrid(SPECIAL, SPECIAL), axis=-1).reshape(-1, 2)
    plain = np.full(
        (len(pairs), 3), 0x3F80
    )  # equal before and after, so that the changes are few enough
    scan = DeviceScan()
    tensor = bf16(np.column_stack([pairs[:, 0], plain]).reshape(-1))
    scan.to_host("w", tensor)
    wanted = bf16(np.column_stack([pairs[:, 1], plain]).reshape(-1))
    tensor.copy_(wanted)
    host = scan.to_host("w", tensor)
    assert same(host, to_host(wanted))
    assert host.difference is not None
    assert len(host.difference.positions) == np.count_nonzero(pairs[:, 0] != pairs[:, 1])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("shape", [(), (0, 4), (30,), (3, 5, 8)])
def test_tensors_of_any_dtype_and_shape_are_copied_exactly(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    scan, tensor = DeviceScan(), torch.zeros(shape, dtype=dtype)
    for value in (0, 1, 0, 0):
        if tensor.numel():
            tensor.view(-1)[-1] = value
        assert same(scan.to_host("w", tensor), to_host(tensor))


def test_a_transposed_tensor_is_compared_row_by_row() -> None:
    scan, tensor = DeviceScan(), masters(60).reshape(6, 10).T
    scan.to_host("w", tensor, "BF16")
    tensor[1, 4] += 1
    host = scan.to_host("w", tensor, "BF16")
    assert same(host, to_host(tensor, "BF16"))
    assert host.difference is not None
    assert host.difference.positions.tolist() == [1 * 6 + 4]


def test_a_tensor_is_copied_whole_where_its_changes_would_take_more_bytes() -> None:
    scan, tensor = DeviceScan(), masters(300)
    scan.to_host("w", tensor, "BF16")
    tensor[:100] += 1  # 100 × 6 bytes equal 300 × 2: just within the limit
    assert scan.to_host("w", tensor, "BF16").difference is not None
    tensor[:101] += 1
    host = scan.to_host("w", tensor, "BF16")
    assert host.difference is None
    assert same(host, to_host(tensor, "BF16"))
    tensor[5] += 1
    after = scan.to_host("w", tensor, "BF16")
    assert after.difference is not None
    assert after.difference.base() is host
    assert same(after, to_host(tensor, "BF16"))


def test_changes_that_exceed_the_limit_in_a_later_chunk_are_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changed_elements, "CHUNK_ELEMENTS", 10)
    scan, tensor = DeviceScan(), masters(300)
    scan.to_host("w", tensor, "BF16")
    tensor += 1
    assert same(scan.to_host("w", tensor, "BF16"), to_host(tensor, "BF16"))
    assert (
        600 < scan.num_bytes - 600 <= 1200
    )  # the changes copied before there were too many, and the whole tensor


def test_a_tensor_of_another_shape_dtype_or_name_is_copied_whole() -> None:
    scan, tensor = DeviceScan(), masters(24)
    scan.to_host("w", tensor, "BF16")
    given = [
        ("w", tensor.reshape(4, 6), "BF16"),
        ("w", tensor.reshape(4, 6), "F32"),
        ("v", tensor, "F32"),
    ]
    for name, each, dtype in given:
        host = scan.to_host(name, each, dtype)
        assert host.difference is None
        assert same(host, to_host(each, dtype))


def test_without_a_change_the_last_read_only_tensor_is_returned() -> None:
    scan, tensor = DeviceScan(), masters(24)
    first = scan.to_host("w", tensor, "BF16")
    tensor += 1e-9  # below the precision of bf16
    assert scan.to_host("w", tensor, "BF16") is first
    with pytest.raises(ValueError, match="read-only"):
        first.bits[0] = 0
    tensor[0] += 1
    with pytest.raises(ValueError, match="read-only"):
        scan.to_host("w", tensor, "BF16").bits[0] = 0


def test_a_caller_that_modifies_its_tensor_changes_no_published_one() -> None:
    scan, tensor = DeviceScan(), torch.ones(8)
    host = scan.to_host(
        "w", tensor
    )  # of the published dtype already: nothing is rounded, but it is still a copy
    tensor.zero_()
    assert host.bits.view(np.float32).tolist() == [1.0] * 8
    assert same(scan.to_host("w", tensor), to_host(torch.zeros(8)))


def test_old_versions_are_freed() -> None:
    scan, tensor = DeviceScan(), masters(24)
    hosts = [weakref.ref(scan.to_host("w", tensor, "BF16"))]
    for _ in range(3):
        tensor[3] += 1
        hosts.append(weakref.ref(scan.to_host("w", tensor, "BF16")))
    gc.collect()
    assert [host() is None for host in hosts] == [True, True, True, False]


def test_after_a_failed_comparison_the_tensor_is_copied_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scan, tensor = DeviceScan(), masters(24)
    scan.to_host("w", tensor, "BF16")
    tensor[3] += 1
    with monkeypatch.context() as broken:
        broken.setattr(deltas, "moved", _out_of_memory)
        with pytest.raises(MemoryError):
            scan.to_host("w", tensor, "BF16")
    host = scan.to_host("w", tensor, "BF16")
    assert same(host, to_host(tensor, "BF16"))
    assert host.difference is None


def _out_of_memory(*_: Any, **__: Any) -> HostTensor:
    raise MemoryError


CONFIG = TrainConfig(lr=2e-4)


def started(given: Mapping[str, HostTensor]) -> TorchTrainEngine:
    engine = TorchTrainEngine(CONFIG, MODEL_CONFIG, seed=3)
    engine.set_weights(given)
    return engine


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> TorchTrainEngine:
    """An engine that scans as on a GPU."""
    monkeypatch.setattr(engine, "_is_remote", lambda _: True)
    return started(base_weights())


def test_an_engine_with_the_scan_publishes_the_same_bits_and_deltas_as_one_without(
    scanned: TorchTrainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    plain = started(base_weights())
    given = sampled_batch(reference_model(base_weights()), noise=0.3)
    old, old_plain = scanned.weights(), plain.weights()
    changed = set()
    for step in range(1, 5):
        assert scanned.step(replace(given, step=step)) == plain.step(replace(given, step=step))
        new, new_plain = scanned.weights(), plain.weights()
        assert all(same(new[name], new_plain[name]) for name in new_plain)
        names = {name: name for name in new}
        ours, theirs = (
            list(deltas.encode(*pair, names, threads=1))
            for pair in ((old, new), (old_plain, new_plain))
        )
        assert ours == theirs
        changed |= {
            name
            for name, tensor in new.items()
            if tensor.difference and tensor.difference.base() is old[name]
        }
        old, old_plain = new, new_plain
    assert len(changed) > 10


def test_a_version_published_from_a_scan_is_read_bit_for_bit(
    scanned: TorchTrainEngine, memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sampled_batch(reference_model(base_weights()), noise=0.3)
    loaded: LoadedWeights | None = None
    for version in range(4):
        if version:
            scanned.step(replace(given, step=version))
        tensors = scanned.weights()
        loaded = LoadedWeights(
            publisher.publish(memory_store, "solver", version, tensors, base=loaded), tensors
        )
        assert weights_digest(reader.fetch(memory_store, "solver", version)) == weights_digest(
            tensors
        )
    assert loaded is not None
    assert loaded.manifest.kind == "delta"


def test_an_engine_with_new_weights_copies_all_tensors_again(
    scanned: TorchTrainEngine,
) -> None:
    given = sampled_batch(reference_model(base_weights()), noise=0.3)
    scanned.weights()
    saved = scanned.save()
    for restart in (lambda: scanned.set_weights(base_weights()), lambda: scanned.load(*saved)):
        restart()
        assert all(tensor.difference is None for tensor in scanned.weights().values())
        scanned.step(given)
        assert any(tensor.difference for tensor in scanned.weights().values())
    with pytest.raises(CorruptError):
        scanned.set_weights({})


class TestScanningEngine(EngineCallsContract):
    """The scan is a part of `weights`: it has no effect on what a step computes."""

    engine_name = "torch"

    @pytest.fixture(autouse=True)
    def _scans(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "_is_remote", lambda _: True)


def test_an_engine_on_a_cpu_does_not_scan() -> None:
    assert started(base_weights())._scan is None
    assert engine._is_remote(torch.device("cuda:1"))
