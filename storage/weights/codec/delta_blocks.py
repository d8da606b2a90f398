"""One block of a delta: up to 2²² elements of one tensor, old bits → new bits, as bytes of their
own.

    block   u32 bytes of the block | u32 its number in the tensor | u8 method | u8 1 | u16 0 | body
    STEPS   u32 changes | u8 low_bits | u8 × 3 0 | 6 × u32 bytes of each stream | the streams
    streams gaps, lows, wide_gaps, trits, values, wide_steps
    PLANES  one zstd frame for each byte of an element, lowest first, behind a u32 with its size

Numbers are little-endian; `gaps`, `trits` and `values` are zstd frames, the other streams plain.
What the streams mean says `delta_numpy.Streams`; docs/format.md has the whole form. Small blocks
take the loops of NumPy, large ones the compiled ones; the bytes are the same. `apply` changes the
old bits in place: twice is wrong, so a retry starts from the base.

No stream is decompressed to more bytes than the block has elements: a few bytes of a zstd frame
could claim gigabytes.
"""

import struct
from typing import Any

import numpy as np
import pyarrow as pa

from storage.errors import CorruptError
from storage.formats.safetensors import Digest
from storage.weights.codec import delta_numpy
from storage.weights.codec.delta_numpy import TRITS_PER_BYTE, Bits, Positions, Streams

BLOCK_ELEMENTS = 2**22
COMPILED_FROM = 2**18
"""Elements from which on the compiled loops are worth loading: numba itself takes a second to
import.
"""
PART_ELEMENTS = 2**18
"""Copied, changed and told one after the other: so many elements stay in a core's own cache
meanwhile.
"""
STEPS, PLANES = 1, 2
CLASSES = 1
"""Earlier releases could divide a block's elements into more classes, by their old exponents."""
_BLOCK, _RUN = struct.Struct("<IIBBH"), struct.Struct("<IB3x6I")
_ZSTD = pa.Codec("zstd", compression_level=1)


def encode(
    number: int, old: Bits, new: Bits, *, found: tuple[Positions, Bits] | None = None
) -> bytes:
    """Block `number`, which turns `old` into `new` (flat, unsigned, of one length); empty when they
    are equal.

    `found` is what `find` would find, where that is known already.
    """
    loops = _loops(len(old))
    positions, steps = loops.find(old, new) if found is None else found
    if not len(positions):
        return b""
    if 2 * len(positions) > len(old):
        body, method = _planes(old, new), PLANES
    else:
        body, method = _run(loops, positions, steps, len(old)), STEPS
    return _BLOCK.pack(_BLOCK.size + len(body), number, method, CLASSES, 0) + body


def cut(body: memoryview) -> dict[int, memoryview]:
    """Block by number, of the blocks that follow each other in `body`. CorruptError when it ends
    within one, or one is there twice.
    """
    blocks: dict[int, memoryview] = {}
    start = 0
    while start < len(body):
        if start + _BLOCK.size > len(body):
            raise CorruptError(
                f"a delta of {len(body)} bytes ends within the block at byte {start}"
            )
        size, number, *_ = _BLOCK.unpack_from(body, start)
        if size < _BLOCK.size or start + size > len(body) or number in blocks:
            raise CorruptError(f"a delta of {len(body)} bytes has a wrong block at byte {start}")
        blocks[number] = body[start : start + size]
        start += size
    return blocks


def num_changed(block: bytes, old: Bits, new: Bits) -> int:
    """How many elements the block changes, which turns `old` into `new`."""
    if not block:
        return 0
    if _BLOCK.unpack_from(block)[2] == PLANES:
        return int(np.count_nonzero(old != new))
    return int(_RUN.unpack_from(block, _BLOCK.size)[0])


def add(bits: Bits, positions: Positions, steps: Bits) -> None:
    """bits[positions] += steps, in place, wrapping. ValueError when a position lies outside."""
    _loops(len(bits)).add(bits, positions, steps)


def apply(
    bits: Bits, block: memoryview, *, old: Bits | None = None, digest: Digest | None = None
) -> None:
    """Turn the old bits into the new ones.

    Whether the block was the right one is shown by the tensor's digest alone.

    Args:
        bits: where the new bits are written; also the old ones, where `old` is left out.
        digest: receives the new bits, part by part in their order, while they are in the cache.

    Raises:
        CorruptError: `block` cannot be a block of these elements.
    """
    try:
        _, _, method, num_classes, _ = _BLOCK.unpack_from(block)
        if num_classes != CLASSES:
            raise CorruptError(
                f"a block of a delta divides its elements into {num_classes} classes; the setting "
                "compact_deltas, which wrote "
                "such blocks, was removed: read the version with the release that wrote it, or "
                "start from the next anchor"
            )
        rest = block[_BLOCK.size :]
        if method == STEPS:
            _apply_steps(bits, rest, old, digest)
        elif method == PLANES:
            if old is not None:
                np.copyto(bits, old)
            bits += _from_planes(rest, bits)
            if digest:
                digest.add(bits)
        else:
            raise ValueError(f"unknown method {method}")
    except (ValueError, IndexError, OSError, struct.error, pa.ArrowException) as error:
        raise CorruptError(f"a block of a delta cannot be applied: {error}") from error


def unchanged(bits: Bits, old: Bits | None, digest: Digest | None) -> None:
    """Do what `apply` does, for a block that the delta lacks because nothing changed."""
    for start in range(0, len(bits), PART_ELEMENTS):
        part = slice(start, start + PART_ELEMENTS)
        if old is not None:
            np.copyto(bits[part], old[part])
        if digest:
            digest.add(bits[part])


def _apply_steps(bits: Bits, body: memoryview, old: Bits | None, digest: Digest | None) -> None:
    loops = _loops(len(bits))
    positions, steps = _read_run(loops, body, bits)
    if len(positions) and positions[-1] >= len(bits):
        raise ValueError(f"position {positions[-1]} of {len(bits)} elements")
    for start in range(0, len(bits), PART_ELEMENTS):
        part = slice(start, start + PART_ELEMENTS)
        # Bounds of the positions' own type: with Python's numbers NumPy would convert all positions
        # first.
        first, end = np.searchsorted(
            positions, np.array([start, start + PART_ELEMENTS], dtype=positions.dtype)
        )
        if old is not None:
            np.copyto(bits[part], old[part])
        loops.add(bits, positions[first:end], steps[first:end])
        if digest:
            digest.add(bits[part])


def _loops(num_elements: int) -> Any:
    if num_elements < COMPILED_FROM:
        return delta_numpy
    from storage.weights.codec import delta_loops

    return delta_loops


def _run(loops: Any, positions: Positions, steps: Bits, num_elements: int) -> bytes:
    """`positions` among `num_elements`."""
    low_bits = _low_bits(num_elements / max(1, len(positions)))
    streams: Streams = loops.split(positions, steps, low_bits)
    packed = (
        _compressed(streams.gaps),
        streams.lows.tobytes(),
        streams.wide_gaps.tobytes(),
        _compressed(streams.trits),
        _compressed(streams.values),
        streams.wide_steps.tobytes(),
    )
    return b"".join((_RUN.pack(len(positions), low_bits, *map(len, packed)), *packed))


def _read_run(loops: Any, body: memoryview, bits: Bits) -> tuple[Positions, Bits]:
    count, low_bits, *sizes = _RUN.unpack_from(body)
    if count > len(bits):
        raise ValueError(f"{count} changes of {len(bits)} elements")
    if low_bits not in (0, 4, 8):
        raise ValueError(f"{low_bits} low bits")
    parts, start = [], _RUN.size
    for size in sizes:
        parts.append(body[start : start + size])
        start += size
    if start != len(body):
        raise ValueError(f"the streams have {start} bytes, the block {len(body)}")
    trits = _plain(parts[3], -(-count // TRITS_PER_BYTE))
    if len(parts[1]) != -(-count * low_bits // 8):
        raise ValueError(f"{len(parts[1])} bytes of low bits for {count} changes")
    num_others = int(delta_numpy.NUM_OTHERS[trits].sum())
    streams = Streams(
        gaps=_plain(parts[0], count),
        lows=np.frombuffer(parts[1], dtype=np.uint8),
        wide_gaps=np.frombuffer(parts[2], dtype=np.uint32),
        trits=trits,
        values=_plain(parts[4], num_others),
        wide_steps=np.frombuffer(parts[5], dtype=bits.dtype),
    )
    joined: tuple[Positions, Bits] = loops.join(streams, low_bits)
    return joined


def _low_bits(mean_gap: float) -> int:
    """The high part should need most of a byte's range and no more: gaps are geometric, and low
    bits do not compress.
    """
    if mean_gap < 32:
        return 0
    return 4 if mean_gap < 512 else 8


def _planes(old: Bits, new: Bits) -> bytes:
    """Every step as zigzag, byte by byte: for weights of which most elements change."""
    steps = new - old
    one, sign = steps.dtype.type(1), steps.dtype.type(8 * steps.itemsize - 1)
    zigzag = (steps << one) ^ (np.zeros_like(steps) - (steps >> sign))
    frames = [
        _compressed(np.ascontiguousarray(plane))
        for plane in zigzag.view(np.uint8).reshape(-1, steps.itemsize).T
    ]
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


def _from_planes(body: memoryview, bits: Bits) -> Bits:
    planes = np.empty((bits.itemsize, len(bits)), dtype=np.uint8)
    start = 0
    for plane in planes:
        end = start + 4 + int.from_bytes(body[start : start + 4], "little")
        plane[:] = _plain(body[start + 4 : end], len(bits))
        start = end
    if start != len(body):
        raise ValueError(f"planes of {start} bytes in {len(body)}")
    zigzag = np.ascontiguousarray(planes.T).view(bits.dtype).reshape(-1)
    one = bits.dtype.type(1)
    steps: Bits = (zigzag >> one) ^ (np.zeros_like(zigzag) - (zigzag & one))
    return steps


def _compressed(stream: Any) -> bytes:
    frame: bytes = _ZSTD.compress(stream, asbytes=True) if len(stream) else b""
    return frame


def _plain(frame: memoryview, size: int) -> Any:
    if not size:
        return np.zeros(0, dtype=np.uint8)
    return np.frombuffer(_ZSTD.decompress(frame, decompressed_size=size), dtype=np.uint8)
