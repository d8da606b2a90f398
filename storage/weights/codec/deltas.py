"""Tensors of one version as changes to those of another: which tensors changed, and each change as
a blob of blocks.

    base tensors, new tensors ──encode──▶ Change per tensor        base tensor, blob ──apply──▶ new tensor

Tensors are cut into blocks, which are encoded on as many threads as there are cores; only a bounded
number of blocks is in work at once. A tensor's blocks are applied one after the other, so that
whoever digests it sees each while it is in the cache: what runs side by side are tensors. This
module knows neither stores nor manifests; what a block's bytes mean stands in `delta_blocks.py`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
"""Blocks for each thread that are in work or wait, encoded, for those before them."""
BLOCK_BYTES = 2**25
"""What encoding takes of memory for each thread."""

X = TypeVar("X")
Y = TypeVar("Y")


@dataclass(frozen=True)
class Change:
    """How one tensor comes from a tensor of the base: `blob` is empty when the bits are the
    same.
    """

    name: str
    blob: bytes
    num_changed: int
    """Elements that differ."""


def encode(
    base: Mapping[str, HostTensor],
    tensors: Mapping[str, HostTensor],
    sources: Mapping[str, str],
    *,
    threads: int,
) -> Iterator[Change]:
    """The change of every tensor in `sources` (name → name in the base, of the same dtype and
    shape), in that order.

    Tensors are compared unless their maker did so already, with the base's very own: the changes
    are the same.
    """
    cuts = [
        (name, number)
        for name in sources
        for number in range(
            max(1, -(-tensors[name].bits.size // BLOCK_ELEMENTS))
        )  # one for a tensor without elements, too
    ]

    def encode_block(cut: tuple[str, int]) -> tuple[bytes, int]:
        name, number = cut
        new = _block(flat(tensors[name].bits), number)
        old = _block(flat(base[sources[name]].bits), number)
        found = _found(tensors[name].difference, base[sources[name]], number)
        block = delta_blocks.encode(number, old, new, found=found)
        return block, delta_blocks.num_changed(block, old, new)

    encoded = _mapped(encode_block, cuts, threads)
    for name, found in groupby(zip(cuts, encoded, strict=True), key=lambda one: one[0][0]):
        blocks, counts = zip(*(block for _, block in found), strict=True)
        yield Change(name, b"".join(blocks), sum(counts))


def moved(
    base: HostTensor, positions: NDArray[np.uint64], steps: Bits, *, threads: int
) -> HostTensor:
    """A new tensor: the base with `steps` added at `positions`, as `Difference` has them, which it
    remembers.
    """
    made = HostTensor(
        base.dtype, base.shape, np.empty_like(base.bits), Difference(ref(base), positions, steps)
    )
    old, new = flat(base.bits), flat(made.bits)

    def move_block(number: int) -> None:
        block = _block(new, number)
        block[:] = _block(old, number)
        delta_blocks.add(block, *_within(positions, steps, number))

    for _ in _mapped(move_block, range(-(-len(new) // BLOCK_ELEMENTS)), threads):
        pass
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
    """One blob that does what `blobs` do one after the other, and the number of elements it
    changes.

    Steps add up, whatever they are added to: the blocks are applied to zeros and the sum is encoded
    as a step from zeros. CorruptError for what is no change of so many elements. Empty when
    everything returns to what it was.
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

    merged = list(_mapped(merge_block, numbers, threads))
    return b"".join(block for block, _ in merged), sum(count for _, count in merged)


def _block(bits: Bits, number: int) -> Bits:
    return bits[number * BLOCK_ELEMENTS : (number + 1) * BLOCK_ELEMENTS]


def _found(
    known: Difference | None, base: HostTensor, number: int
) -> tuple[Positions, Bits] | None:
    """What is known of a block; None when that is nothing, or when it is about another base."""
    return _within(known.positions, known.steps, number) if known and known.base() is base else None


def _within(positions: NDArray[np.uint64], steps: Bits, number: int) -> tuple[Positions, Bits]:
    """The part of a difference that lies in a block, its positions counted from the block's
    start.
    """
    start = number * BLOCK_ELEMENTS
    # Bounds of the positions' own type: with Python's numbers NumPy would turn all positions into
    # floats first.
    first, end = np.searchsorted(
        positions, np.array([start, start + BLOCK_ELEMENTS], dtype=np.uint64)
    )
    return (positions[first:end] - np.uint64(start)).astype(np.uint32), steps[first:end]


def _mapped(work: Callable[[X], Y], inputs: Collection[X], threads: int) -> Iterator[Y]:
    """The results in order; without threads where they would not help."""
    if threads == 1 or len(inputs) < 2:
        return map(work, inputs)
    return ordered_map(work, inputs, threads=threads, budget=BLOCKS_AHEAD * threads)


def flat(bits: Bits) -> Bits:
    """The elements as unsigned integers of their width, without a copy where they lie together."""
    return np.ascontiguousarray(bits).reshape(-1).view(f"u{bits.itemsize}")
