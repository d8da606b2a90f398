"""The loops of the delta codec, compiled by numba: the functions of `delta_numpy`, bit for bit.

They release the GIL, so that blocks run on as many threads as there are cores. Each is compiled on
first use for each width of elements; numba stores the machine code beside this file, or in the
user's cache.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit

from storage.weights.codec.delta_numpy import (
    ESCAPE,
    OTHER,
    TRITS_PER_BYTE,
    Bits,
    Bytes,
    Positions,
    Streams,
)

_compiled: Callable[[Any], Any] = njit(nogil=True, cache=True)
_WORD_BYTES = 8
_MISFIT = -1
"""Returned by a loop in place of a count when the streams contradict each other."""


def find(old: Bits, new: Bits) -> tuple[Positions, Bits]:
    lanes = _WORD_BYTES // old.itemsize
    old, new = np.require(old, requirements="A"), np.require(new, requirements="A")
    words = len(old) // lanes
    positions = np.empty(len(old) + lanes, dtype=np.uint32)
    steps = np.empty(len(old) + lanes, dtype=old.dtype)
    views = (bits[: words * lanes].view(np.uint64) for bits in (old, new))
    count = _find(lanes)(*views, old, new, positions, steps)
    return positions[:count].copy(), steps[:count].copy()


def split(positions: Positions, steps: Bits, low_bits: int) -> Streams:
    count = len(positions)
    gaps = np.empty(count, dtype=np.uint8)
    lows = np.zeros(-(-count * low_bits // 8), dtype=np.uint8)
    wide_gaps = np.empty(count, dtype=np.uint32)
    trits = np.zeros(-(-count // TRITS_PER_BYTE), dtype=np.uint8)
    values = np.empty(count, dtype=np.uint8)
    wide_steps = np.empty(count, dtype=steps.dtype)
    num_wide_gaps = _split_positions(positions, low_bits, gaps, lows, wide_gaps)
    num_values, num_wide_steps = _split_steps(
        steps, 8 * steps.itemsize - 1, trits, values, wide_steps
    )
    return Streams(
        gaps=gaps,
        lows=lows,
        wide_gaps=wide_gaps[:num_wide_gaps].copy(),
        trits=trits,
        values=values[:num_values].copy(),
        wide_steps=wide_steps[:num_wide_steps].copy(),
    )


def join(streams: Streams, low_bits: int) -> tuple[Positions, Bits]:
    count = len(streams.gaps)
    positions = np.empty(count, dtype=np.uint32)
    steps = np.empty(count, dtype=streams.wide_steps.dtype)
    if (
        _join_positions(streams.gaps, streams.lows, streams.wide_gaps, low_bits, positions)
        == _MISFIT
    ):
        raise ValueError("the gaps do not fit together")
    if _join_steps(streams.trits, streams.values, streams.wide_steps, steps) == _MISFIT:
        raise ValueError("the steps do not fit together")
    return positions, steps


def add(bits: Bits, positions: Positions, steps: Bits) -> None:
    if len(positions) and positions[-1] >= len(bits):
        raise ValueError(f"position {positions[-1]} of {len(bits)} elements")
    _add(bits, positions, steps)


@cache
def _find(lanes: int) -> Any:
    """Compile `find` for elements of which `lanes` make a word of 64 bits.

    Words are compared first: nearly all are equal.
    """

    @_compiled
    def find_in_words(
        old_words: Any, new_words: Any, old: Bits, new: Bits, positions: Positions, steps: Bits
    ) -> int:  # pragma: no cover  # compiled
        count = 0
        for word in range(len(old_words)):
            if old_words[word] != new_words[word]:
                for lane in range(lanes):
                    place = word * lanes + lane
                    positions[count] = place
                    steps[count] = new[place] - old[place]
                    count += old[place] != new[place]
        for place in range(len(old_words) * lanes, len(old)):
            positions[count] = place
            steps[count] = new[place] - old[place]
            count += old[place] != new[place]
        return count

    return find_in_words


@_compiled
def _split_positions(
    positions: Positions, low_bits: int, gaps: Bytes, lows: Bytes, wide: Positions
) -> int:  # pragma: no cover  # compiled
    num_wide, before = 0, -1
    for number in range(len(positions)):
        gap = int(positions[number]) - before - 1
        before = int(positions[number])
        low = gap & ((1 << low_bits) - 1)
        high = gap >> low_bits
        if high >= ESCAPE:
            wide[num_wide] = gap
            num_wide += 1
            high, low = ESCAPE, 0
        gaps[number] = high
        if low_bits == 8:
            lows[number] = low
        elif low_bits == 4:
            lows[number >> 1] |= low << (4 * (number & 1))
    return num_wide


@_compiled
def _split_steps(
    steps: Bits, sign: int, trits: Bytes, values: Bytes, wide: Bits
) -> tuple[int, int]:  # pragma: no cover  # compiled
    num_values, num_wide = 0, 0
    power, byte = 1, 0
    for number in range(len(steps)):
        step = np.uint64(steps[number])
        negative = np.uint64(steps[number]) >> np.uint64(sign)
        width_mask = (np.uint64(2) << np.uint64(sign)) - np.uint64(1)
        zigzag = ((step << np.uint64(1)) ^ (np.uint64(0) - negative)) & width_mask
        if zigzag == np.uint64(1):
            byte += power
        elif zigzag != np.uint64(2):
            byte += OTHER * power
            if zigzag >= np.uint64(ESCAPE + 3):
                values[num_values] = ESCAPE
                wide[num_wide] = steps[number]
                num_wide += 1
            else:
                values[num_values] = zigzag - np.uint64(3)
            num_values += 1
        power *= 3
        if power == 243:
            trits[number // TRITS_PER_BYTE] = byte
            power, byte = 1, 0
    if power > 1:
        trits[len(steps) // TRITS_PER_BYTE] = byte
    return num_values, num_wide


@_compiled
def _join_positions(
    gaps: Bytes, lows: Bytes, wide: Positions, low_bits: int, positions: Positions
) -> int:  # pragma: no cover  # compiled
    num_wide, place = 0, -1
    for number in range(len(gaps)):
        gap = int(gaps[number])
        if gap == ESCAPE:
            if num_wide == len(wide):
                return _MISFIT
            gap = int(wide[num_wide])
            num_wide += 1
        elif low_bits == 8:
            gap = gap << 8 | int(lows[number])
        elif low_bits == 4:
            gap = gap << 4 | (int(lows[number >> 1]) >> (4 * (number & 1)) & 15)
        place += gap + 1
        if place >= 2**32:
            return _MISFIT
        positions[number] = place
    return len(gaps) if num_wide == len(wide) else _MISFIT


@_compiled
def _join_steps(
    trits: Bytes, values: Bytes, wide: Bits, steps: Bits
) -> int:  # pragma: no cover  # compiled
    num_values, num_wide, byte = 0, 0, 0
    for number in range(len(steps)):
        if number % TRITS_PER_BYTE == 0:
            byte = int(trits[number // TRITS_PER_BYTE])
        trit = byte % 3
        byte //= 3
        if trit == OTHER:
            if num_values == len(values):
                return _MISFIT
            if values[num_values] == ESCAPE:
                if num_wide == len(wide):
                    return _MISFIT
                steps[number] = wide[num_wide]
                num_wide += 1
            else:
                zigzag = int(values[num_values]) + 3
                steps[number] = (zigzag >> 1) ^ -(zigzag & 1)
            num_values += 1
        else:
            steps[number] = 1 - 2 * trit
    return len(steps) if num_values == len(values) and num_wide == len(wide) else _MISFIT


@_compiled
def _add(bits: Bits, positions: Positions, steps: Bits) -> None:  # pragma: no cover  # compiled
    for number in range(len(positions)):
        bits[positions[number]] += steps[number]
