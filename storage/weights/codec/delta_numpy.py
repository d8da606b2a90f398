"""The loops of the delta codec in plain NumPy: used for small tensors, and the reference for
`delta_loops`.

    find     old, new bits        ──▶ positions and steps of what changed
    split    positions, steps     ──▶ streams of bytes
    join     streams of bytes     ──▶ positions, steps
    add      bits += steps, at the positions

Bits are flat arrays of unsigned integers. A step is the difference of two elements' bits; it wraps
around, so it is exact for NaN, −0.0 and everything else.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[Any]
"""Flat, of uint8, uint16, uint32 or uint64."""
Positions: TypeAlias = NDArray[np.uint32]
Bytes: TypeAlias = NDArray[np.uint8]

UP, DOWN, OTHER = 0, 1, 2
"""Trits: a step of +1, of −1, or another one, which is in `values`."""
TRITS_PER_BYTE = 5
POWERS = np.array([1, 3, 9, 27, 81], dtype=np.uint8)
TRITS = np.arange(256)[:, None] // POWERS % 3
"""[256, 5] the trits of a byte."""
NUM_OTHERS = np.count_nonzero(TRITS == OTHER, axis=1)
"""[256] how many of a byte's trits are OTHER."""
ESCAPE = 255
"""In `gaps` and `values`: the number is too large for a byte and is in the wide stream."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Changes as streams of small numbers. n changes; gap = position − position before − 1."""

    gaps: Bytes
    """[n] gap >> low_bits, or ESCAPE."""
    lows: Bytes
    """[⌈n · low_bits / 8⌉] low bits of the gaps: none, two gaps to a byte (the first one in the
    lower half), or one to a byte. 0 where escaped.
    """
    wide_gaps: Positions
    """Escaped gaps, whole."""
    trits: Bytes
    """[⌈n / 5⌉] five trits to a byte, the first one lowest: t₀ + 3 t₁ + 9 t₂ + 27 t₃ + 81 t₄."""
    values: Bytes
    """zigzag(step) − 3 of every OTHER, or ESCAPE."""
    wide_steps: Bits
    """Escaped steps."""


def find(old: Bits, new: Bits) -> tuple[Positions, Bits]:
    """Return the ascending positions of elements that differ, and new − old there, wrapping."""
    positions = np.flatnonzero(old != new)
    return positions.astype(np.uint32), new[positions] - old[positions]


def split(positions: Positions, steps: Bits, low_bits: int) -> Streams:
    """Split changes into streams; `low_bits` is 0, 4 or 8."""
    gaps: Any = np.diff(positions.astype(np.int64), prepend=-1) - 1
    high, escaped = gaps >> low_bits, gaps >> low_bits >= ESCAPE
    width = 8 * steps.dtype.itemsize
    down = steps >> steps.dtype.type(width - 1)
    zigzag = (steps << steps.dtype.type(1)) ^ (np.zeros_like(steps) - down)
    trits = np.full(-(-len(steps) // TRITS_PER_BYTE) * TRITS_PER_BYTE, UP, dtype=np.uint8)
    trits[: len(steps)] = np.where(zigzag == 2, UP, np.where(zigzag == 1, DOWN, OTHER))
    other = zigzag > 2
    values, wide = zigzag[other] - steps.dtype.type(3), zigzag[other] >= ESCAPE + 3
    return Streams(
        gaps=np.where(escaped, ESCAPE, high).astype(np.uint8),
        lows=_pack(np.where(escaped, 0, gaps & ((1 << low_bits) - 1)).astype(np.uint8), low_bits),
        wide_gaps=gaps[escaped].astype(np.uint32),
        trits=trits.reshape(-1, TRITS_PER_BYTE) @ POWERS,
        values=np.where(wide, ESCAPE, values).astype(np.uint8),
        wide_steps=steps[other][wide],
    )


def join(streams: Streams, low_bits: int) -> tuple[Positions, Bits]:
    """Undo `split`; ValueError when the streams contradict each other."""
    num_changes, kind = len(streams.gaps), streams.wide_steps.dtype.type
    gaps = streams.gaps.astype(np.int64) << low_bits | _unpack(streams.lows, low_bits, num_changes)
    gaps[_escaped_indices(streams.gaps == ESCAPE, streams.wide_gaps, "gaps")] = streams.wide_gaps
    trits = TRITS[streams.trits].reshape(-1)[:num_changes]
    zigzag = streams.values.astype(streams.wide_steps.dtype) + kind(3)
    others = (zigzag >> kind(1)) ^ (np.zeros_like(zigzag) - (zigzag & kind(1)))
    others[_escaped_indices(streams.values == ESCAPE, streams.wide_steps, "steps")] = (
        streams.wide_steps
    )
    steps = np.where(trits == UP, kind(1), np.iinfo(kind).max)  # the largest number is −1
    steps[_escaped_indices(trits == OTHER, others, "values")] = others
    positions = np.cumsum(gaps + 1) - 1
    if num_changes and positions[-1] >= 2**32:
        raise ValueError(f"the gaps add up to position {positions[-1]}")
    return positions.astype(np.uint32), steps


def add(bits: Bits, positions: Positions, steps: Bits) -> None:
    """Do bits[positions] += steps, wrapping; ValueError for a position outside."""
    if len(positions) and positions[-1] >= len(bits):
        raise ValueError(f"position {positions[-1]} of {len(bits)} elements")
    bits[positions] += steps


def _pack(lows: Bytes, low_bits: int) -> Bytes:
    if low_bits == 0:
        return lows[:0]
    if low_bits == 8:
        return lows
    padded = np.append(lows, np.zeros(len(lows) % 2, dtype=np.uint8))
    packed: Bytes = padded[::2] | padded[1::2] << np.uint8(4)
    return packed


def _unpack(lows: Bytes, low_bits: int, num_changes: int) -> NDArray[np.int64]:
    if low_bits == 0:
        return np.zeros(num_changes, dtype=np.int64)
    unpacked = lows if low_bits == 8 else np.stack([lows & 15, lows >> 4], axis=1).reshape(-1)
    return unpacked[:num_changes].astype(np.int64)


def _escaped_indices(escaped: NDArray[np.bool_], wide: Bits, what: str) -> NDArray[np.intp]:
    indices = np.flatnonzero(escaped)
    if len(indices) != len(wide):
        raise ValueError(f"{len(indices)} {what} are escaped, {len(wide)} are in the wide stream")
    return indices
