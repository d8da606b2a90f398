import numpy as np
import pytest
import torch

from storage.errors import CorruptError
from storage.records.weights import HostTensor
from trainer.engines.torch.host_tensors import to_host, to_torch


def test_bf16_is_stored_as_its_bit_pattern() -> None:
    host = to_host(torch.tensor([[1.0, -2.0, -0.0]]), "BF16")
    assert (host.dtype, host.shape, host.bits.dtype) == ("BF16", (1, 3), np.dtype(np.uint16))
    assert host.bits.tolist() == [[0x3F80, 0xC000, 0x8000]]


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    # Between 1 and the next BF16, 1 + 2⁻⁷: the middle 1 + 2⁻⁸ goes down to even, 1 + 3·2⁻⁸ goes up
    # to even.
    host = to_host(torch.tensor([1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8]), "BF16")
    assert host.bits.tolist() == [0x3F80, 0x3F81, 0x3F82]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_each_pattern_of_nan_zero_and_infinity_survives_the_round_trip(dtype: str) -> None:
    wide = np.uint32 if dtype == "F32" else np.uint16
    patterns = np.array([0, 1, 0x7C00, 0x7F80, 0x7FC1, 0x8000, 0xFFFF], dtype=wide)
    assert to_host(to_torch(HostTensor(dtype, (7,), patterns))).bits.tolist() == patterns.tolist()


@pytest.mark.parametrize(
    ("dtype", "array"),
    [
        ("I64", np.array([-(2**60)])),
        ("U8", np.array([255], dtype=np.uint8)),
        ("BOOL", np.array([True, False])),
    ],
)
def test_integers_are_stored_unchanged(dtype: str, array: np.ndarray) -> None:
    back = to_host(to_torch(HostTensor(dtype, array.shape, array)))
    assert (back.dtype, back.bits.tolist(), back.bits.dtype) == (dtype, array.tolist(), array.dtype)


def test_scalars_and_empty_tensors_keep_their_shape() -> None:
    assert to_host(torch.tensor(2.5)).shape == ()
    assert to_torch(to_host(torch.tensor(2.5))).item() == 2.5
    assert to_host(torch.zeros(0, 3), "BF16").bits.shape == (0, 3)


def test_a_host_tensor_is_a_copy_in_either_direction() -> None:
    source = torch.zeros(2)
    host = to_host(source)
    source += 1
    assert host.bits.tolist() == [0, 0]
    read_only = np.zeros(2, dtype=np.uint32)
    read_only.flags.writeable = False
    back = to_torch(HostTensor("F32", (2,), read_only))
    back += 1
    assert read_only.tolist() == [0, 0]


def test_a_transposed_tensor_is_laid_out_row_by_row() -> None:
    host = to_host(torch.tensor([[1, 2], [3, 4]]).T)
    assert host.bits.flags.c_contiguous
    assert host.bits.tolist() == [[1, 3], [2, 4]]


def test_an_unknown_dtype_is_corrupt() -> None:
    with pytest.raises(CorruptError, match="F8_E4M3"):
        to_torch(HostTensor("F8_E4M3", (1,), np.zeros(1, dtype=np.uint8)))
