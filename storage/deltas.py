"""Tensors of one version as changes to those of another: which tensors changed, and each change as a blob of blocks.

    base tensors, new tensors ──encode──▶ Change per tensor        base tensor, blob ──apply──▶ new tensor

Tensors are cut into blocks, which run on as many threads as there are cores; only a bounded number of blocks is in work at
once. This module knows neither stores nor manifests; what a block's bytes mean stands in `delta_blocks.py`.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np

from storage import delta_blocks
from storage.delta_blocks import BLOCK_ELEMENTS
from storage.delta_numpy import Bits
from storage.errors import CorruptError
from storage.records import HostTensor

EXPONENTS: Mapping[str, tuple[int, int]] = {"BF16": (7, 8), "F16": (10, 5), "F32": (23, 8), "F64": (52, 11)}
"""dtype → shift and width in bits of the exponent."""
BLOCKS_AHEAD = 2
"""Blocks in work for each thread: what encoding holds beyond the two versions is at most this times 30 MB a thread."""

X = TypeVar("X")
Y = TypeVar("Y")


@dataclass(frozen=True)
class Change:
    """How one tensor comes from a tensor of the base: `blob` is empty when the bits are the same."""

    name: str
    source: str
    blob: bytes


def encode(
    base: Mapping[str, HostTensor],
    tensors: Mapping[str, HostTensor],
    sources: Mapping[str, str],
    *,
    compact: bool,
    threads: int,
) -> Iterator[Change]:
    """The change of every tensor in `sources` (name → name in the base, of the same dtype and shape), in that order."""
    cuts = [
        (name, number)
        for name in sources
        for number in range(max(1, -(-tensors[name].bits.size // BLOCK_ELEMENTS)))  # one for a tensor without elements, too
    ]

    def encode_block(cut: tuple[str, int]) -> bytes:
        name, number = cut
        new = _block(flat(tensors[name].bits), number)
        old = _block(flat(base[sources[name]].bits), number)
        return delta_blocks.encode(number, old, new, EXPONENTS.get(tensors[name].dtype), compact=compact)

    encoded = _mapped(encode_block, cuts, threads)
    for name, blocks in groupby(zip(cuts, encoded, strict=True), key=lambda one: one[0][0]):
        yield Change(name, sources[name], b"".join(block for _, block in blocks))


def apply(base: HostTensor, blob: memoryview, *, threads: int) -> HostTensor:
    """The new tensor; the base's bits stay as they are. CorruptError when `blob` is no change of such a tensor."""
    made = HostTensor(base.dtype, base.shape, base.bits.copy())
    apply_in_place(flat(made.bits), base.dtype, blob, threads=threads)
    return made


def apply_in_place(bits: Bits, dtype: str, blob: memoryview, *, threads: int) -> None:
    """The same on flat unsigned bits, which are neither old nor new when it fails."""
    exponents, blocks = EXPONENTS.get(dtype), delta_blocks.cut(blob)
    if blocks and max(blocks) * BLOCK_ELEMENTS >= len(bits):
        raise CorruptError(f"a delta has a block {max(blocks)} of {BLOCK_ELEMENTS} elements; the tensor has {len(bits)}")
    for _ in _mapped(lambda one: delta_blocks.apply(_block(bits, one[0]), one[1], exponents), blocks.items(), threads):
        pass


def _block(bits: Bits, number: int) -> Bits:
    return bits[number * BLOCK_ELEMENTS : (number + 1) * BLOCK_ELEMENTS]


def _mapped(work: Callable[[X], Y], inputs: Collection[X], threads: int) -> Iterator[Y]:
    """The results in order, a bounded number of them ahead of who takes them."""
    if threads == 1 or len(inputs) < 2:
        yield from map(work, inputs)
        return
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[Y]] = deque()
        for one in inputs:
            ahead.append(pool.submit(work, one))
            if len(ahead) == BLOCKS_AHEAD * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def flat(bits: Bits) -> Bits:
    """The elements as unsigned integers of their width, without a copy where they lie together."""
    return np.ascontiguousarray(bits).reshape(-1).view(f"u{bits.itemsize}")
