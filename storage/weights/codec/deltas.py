"""Changes of tensors from one version to another, each a blob of blocks.

    base tensors, new tensors ──encode──▶ Change per tensor
    base tensor, blob ──apply──▶ new tensor

Tensors are cut into blocks, which are encoded on as many threads as there are cores, a bounded
number at once. The blocks of a tensor are applied one after the other, so that its digest is
computed while they are in the cache; the caller may apply several tensors in parallel.
`delta_blocks` defines the bytes of a block.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptError
from storage.formats.safetensors import BITS, Digest
from storage.records.weights import Difference, HostTensor
from storage.store.ordered_map import ordered_map
from storage.weights.codec import delta_blocks
from storage.weights.codec.delta_blocks import BLOCK_ELEMENTS
from storage.weights.codec.delta_numpy import Bits, Positions

BLOCKS_AHEAD = 2
"""Blocks for each thread that are being encoded or wait for those before them."""
BLOCK_BYTES = 2**25
"""Memory for encoding in each thread."""

X = TypeVar("X")
Y = TypeVar("Y")


@dataclass(frozen=True)
class Change:
    """The change of one tensor."""

    name: str
    """Of the new tensor."""
    blob: bytes
    """Empty when the bits are the same."""
    num_changed: int
    """Elements that differ."""


def encode(
    base: Mapping[str, HostTensor],
    tensors: Mapping[str, HostTensor],
    sources: Mapping[str, str],
    *,
    threads: int,
) -> Iterator[Change]:
    """Encode the change of every tensor in `sources`, in that order.

    Tensors are compared, except where `HostTensor.difference` has the result for this very base.

    Args:
        sources: name → name in the base, of a tensor with the same dtype and shape.
    """
    cuts = [
        (name, number)
        for name in sources
        for number in range(
            max(1, -(-tensors[name].bits.size // BLOCK_ELEMENTS))
        )  # also one for a tensor without elements
    ]

    def encode_block(cut: tuple[str, int]) -> tuple[bytes, int]:
        name, number = cut
        new = _block(flat(tensors[name].bits), number)
        old = _block(flat(base[sources[name]].bits), number)
        changes = _known_changes(tensors[name].difference, base[sources[name]], number)
        block = delta_blocks.encode(number, old, new, changes=changes)
        return block, delta_blocks.num_changed(block, old, new)

    with _mapped(encode_block, cuts, threads) as encoded:
        placed = zip(cuts, encoded, strict=True)
        for name, of_tensor in groupby(placed, key=lambda each: each[0][0]):
            blocks, counts = zip(*(block for _, block in of_tensor), strict=True)
            yield Change(name, b"".join(blocks), sum(counts))


def moved(
    base: HostTensor, positions: NDArray[np.uint64], steps: Bits, *, threads: int
) -> HostTensor:
    """Return the base with `steps` added at `positions`, as a new tensor with this `Difference`."""
    made = HostTensor(
        base.dtype, base.shape, np.empty_like(base.bits), Difference(ref(base), positions, steps)
    )
    old, new = flat(base.bits), flat(made.bits)

    def move_block(number: int) -> None:
        block = _block(new, number)
        block[:] = _block(old, number)
        delta_blocks.add(block, *_within(positions, steps, number))

    with _mapped(move_block, range(-(-len(new) // BLOCK_ELEMENTS)), threads) as done:
        deque(done, maxlen=0)
    return made


def apply(
    base: HostTensor,
    blob: memoryview,
    *,
    in_place: bool = False,
    into: Bits | None = None,
    digest: Digest | None = None,
) -> HostTensor:
    """Apply a tensor's change to its base and return the new tensor.

    Args:
        in_place: write to the base's own bits, where its memory allows that; after an error they
            are neither old nor new. Otherwise the base's bits stay as they are.
        into: memory for the new tensor; left out, it is allocated.
        digest: receives the new bits, part by part in their order, while they are in the cache.

    Raises:
        CorruptError: `blob` is no change of such a tensor.
    """
    if in_place and base.bits.flags.writeable and base.bits.flags.c_contiguous:
        made, old = base, None
    else:
        made = HostTensor(
            base.dtype,
            base.shape,
            np.empty(base.bits.shape, base.bits.dtype) if into is None else into,
        )
        old = flat(base.bits)
    bits, blocks = flat(made.bits), delta_blocks.cut(blob)
    if blocks and max(blocks) * BLOCK_ELEMENTS >= len(bits):
        raise CorruptError(
            f"a delta has a block {max(blocks)} of {BLOCK_ELEMENTS} elements; the tensor has "
            f"{len(bits)}"
        )
    for number in range(-(-len(bits) // BLOCK_ELEMENTS)):
        new, before = _block(bits, number), None if old is None else _block(old, number)
        if number in blocks:
            delta_blocks.apply(new, blocks[number], old=before, digest=digest)
        else:
            delta_blocks.unchanged(new, before, digest)
    return made


def merge(
    blobs: Sequence[memoryview], dtype: str, num_elements: int, *, threads: int
) -> tuple[bytes, int]:
    """Merge changes that are applied one after the other; return the blob and its changed elements.

    Steps add up, whatever they are added to: the blocks are applied to zeros, and the sum is
    encoded as a change from zeros. The blob is empty when the changes cancel.

    Raises:
        CorruptError: a blob is no change of a tensor with `num_elements`.
    """
    by_number = [delta_blocks.cut(blob) for blob in blobs]
    numbers = sorted({number for blocks in by_number for number in blocks})
    if numbers and numbers[-1] * BLOCK_ELEMENTS >= num_elements:
        raise CorruptError(
            f"a delta has a block {numbers[-1]} of {BLOCK_ELEMENTS} elements; the tensor has "
            f"{num_elements}"
        )

    def merge_block(number: int) -> tuple[bytes, int]:
        parts = [blocks[number] for blocks in by_number if number in blocks]
        size = min(BLOCK_ELEMENTS, num_elements - number * BLOCK_ELEMENTS)
        zeros = np.zeros(size, dtype=flat(np.empty(0, dtype=BITS[dtype])).dtype)
        total = zeros.copy()
        for part in parts:
            delta_blocks.apply(total, part)
        return delta_blocks.encode(number, zeros, total), int(np.count_nonzero(total))

    with _mapped(merge_block, numbers, threads) as blocks:
        merged = list(blocks)
    return b"".join(block for block, _ in merged), sum(count for _, count in merged)


def _block(bits: Bits, number: int) -> Bits:
    return bits[number * BLOCK_ELEMENTS : (number + 1) * BLOCK_ELEMENTS]


def _known_changes(
    difference: Difference | None, base: HostTensor, number: int
) -> tuple[Positions, Bits] | None:
    """The changes of a block by a known difference; None where there is none to this base."""
    if difference is None or difference.base() is not base:
        return None
    return _within(difference.positions, difference.bit_deltas, number)


def _within(positions: NDArray[np.uint64], steps: Bits, number: int) -> tuple[Positions, Bits]:
    """The part of a difference in a block, with positions from the block's start."""
    start = number * BLOCK_ELEMENTS
    # Bounds of the positions' own type: with Python's numbers NumPy would turn all positions into
    # floats first.
    first, end = np.searchsorted(
        positions, np.array([start, start + BLOCK_ELEMENTS], dtype=np.uint64)
    )
    return (positions[first:end] - np.uint64(start)).astype(np.uint32), steps[first:end]


def _mapped(
    work: Callable[[X], Y], inputs: Collection[X], threads: int
) -> AbstractContextManager[Iterator[Y]]:
    """Iterate over the results in order; without threads where they would not help."""
    if threads == 1 or len(inputs) < 2:
        return nullcontext(map(work, inputs))
    return ordered_map(work, inputs, threads=threads, budget=BLOCKS_AHEAD * threads)


def flat(bits: Bits) -> Bits:
    """Return the elements as unsigned integers of their width, without a copy if contiguous."""
    return np.ascontiguousarray(bits).reshape(-1).view(f"u{bits.itemsize}")
