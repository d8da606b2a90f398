"""Buffers that are used again for the tensors of a later version."""

import numpy as np

from storage.records.weights import HostTensor
from storage.weights.delta_applier import BufferPool


def tensor(bits: np.ndarray) -> HostTensor:  # type: ignore[type-arg]
    return HostTensor("F32", bits.shape, bits)


def zeros() -> HostTensor:
    return tensor(np.zeros((2, 3), np.uint32))


def test_a_buffer_is_given_once_and_to_a_tensor_of_its_dtype_and_shape_only() -> None:
    old = zeros()
    pool = BufferPool([old, old])
    assert pool.take(tensor(np.zeros((3, 2), np.uint32))) is None
    assert pool.take(HostTensor("I32", (2, 3), np.zeros((2, 3), np.int32))) is None
    assert pool.take(zeros()) is old.bits
    assert pool.take(zeros()) is None


def test_buffers_that_are_in_use_or_not_the_pools_to_write_are_left_alone() -> None:
    used, read_only = zeros(), zeros()
    read_only.bits.flags.writeable = False
    whole = np.zeros((4, 3), np.uint32)
    view, transposed = tensor(whole[:2]), tensor(np.asfortranarray(np.zeros((2, 3), np.uint32)))
    pool = BufferPool([used, read_only, view, transposed], in_use=[used])
    assert pool.take(zeros()) is None
