"""The compiled loops equal the plain ones bit for bit, and the plain ones are correct."""

from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np
import pytest

from storage.weights.codec import delta_loops, delta_numpy
from storage.weights.codec.delta_numpy import Bits, Streams

KINDS = (np.uint8, np.uint16, np.uint32, np.uint64)
SIZES = (0, 1, 3, 4, 5, 9, 1000, 20_001)
SHARES = (0.0, 0.001, 0.02, 0.4, 1.0)


def changed(kind: Any, size: int, share: float) -> tuple[Bits, Bits]:
    """Old bits of every kind, and new ones of which about `share` differ, mostly by one, some by
    any value.
    """
    draw = np.random.default_rng([size, int(1000 * share), np.dtype(kind).itemsize])
    old = draw.integers(0, np.iinfo(kind).max, size, dtype=kind, endpoint=True)
    anything = draw.integers(0, np.iinfo(kind).max, size, dtype=kind, endpoint=True)
    item = draw.choice(
        np.array([1, -1, 2, -2, 100, -100]).astype(kind), size, p=[0.4, 0.4, 0.05, 0.05, 0.05, 0.05]
    )
    steps = np.where(draw.random(size) < 0.95, item, anything)
    return old, np.where(draw.random(size) < share, old + steps, old)


def equal(item: Any, other: Any) -> bool:
    if isinstance(item, Streams):
        return all(
            equal(getattr(item, field.name), getattr(other, field.name))
            for field in fields(Streams)
        )
    if isinstance(item, tuple):
        return len(item) == len(other) and all(
            equal(*pair) for pair in zip(item, other, strict=True)
        )
    return bool(item.dtype == other.dtype and item.shape == other.shape and (item == other).all())


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_plain_loops_give_the_same_new_bits(kind: Any) -> None:
    for size, share in product(SIZES, SHARES):
        agree(*changed(kind, size, share))


def agree(old: Bits, new: Bits) -> None:
    """Check that both kinds of loops find, split, join and add the changes from `old` to `new`."""
    positions, steps = delta_numpy.find(old, new)
    assert positions.tolist() == [place for place in range(len(old)) if old[place] != new[place]]
    assert equal(delta_loops.find(old, new), (positions, steps))
    for low_bits in (0, 4, 8):
        streams = delta_numpy.split(positions, steps, low_bits)
        assert equal(delta_loops.split(positions, steps, low_bits), streams)
        for loops in (delta_numpy, delta_loops):
            assert equal(loops.join(streams, low_bits), (positions, steps))
    for loops in (delta_numpy, delta_loops):
        bits = old.copy()
        loops.add(bits, positions, steps)
        assert (bits == new).all()


@pytest.mark.parametrize("loops", [delta_numpy, delta_loops])
def test_numbers_at_the_one_byte_limit_and_above_it_are_decoded(loops: Any) -> None:
    """zigzag(step) − 3 of ±1 is a trit, of 128 is 253, of −129 is 254; 129 would be 255, the
    escape.
    """
    steps = np.array([1, -1, 2, -2, 128, -129, 129, -130, 2**15 - 1, -(2**15)]).astype(np.uint16)
    positions = np.cumsum(np.full(len(steps), 3)).astype(np.uint32)
    streams = loops.split(positions, steps, 0)
    assert streams.gaps.tolist() == [3] + [2] * 9
    assert streams.trits.tolist() == [3 + 2 * 9 + 2 * 27 + 2 * 81, 2 * (1 + 3 + 9 + 27 + 81)]
    assert streams.values.tolist() == [1, 0, 253, 254, 255, 255, 255, 255]
    assert streams.wide_steps.tolist() == steps[6:].tolist()
    assert equal(loops.join(streams, 0), (positions, steps))


@pytest.mark.parametrize("loops", [delta_numpy, delta_loops])
@pytest.mark.parametrize("low_bits", [0, 4, 8])
def test_gaps_at_the_one_byte_limit_and_above_it_are_decoded(loops: Any, low_bits: int) -> None:
    most = (255 << low_bits) - 1
    gaps = [0, 1, most, most + 1, 5 << low_bits]
    positions = (np.cumsum(np.array(gaps) + 1) - 1).astype(np.uint32)
    streams = loops.split(positions, np.ones(5, dtype=np.uint16), low_bits)
    low = (1 << low_bits) - 1
    assert streams.gaps.tolist() == [0, 1 if low_bits == 0 else 0, 254, 255, 5]
    assert streams.wide_gaps.tolist() == [most + 1]
    assert streams.lows.tolist() == {0: [], 4: [1 << 4, low, 0], 8: [0, 1, low, 0, 0]}[low_bits]
    assert loops.join(streams, low_bits)[0].tolist() == positions.tolist()


@pytest.mark.parametrize("loops", [delta_numpy, delta_loops])
def test_the_last_position_is_below_2_32_and_the_number_of_elements(loops: Any) -> None:
    def streams(gap: int) -> Streams:
        none = np.zeros(0, dtype=np.uint8)
        wide, steps = np.array([gap], np.uint32), np.zeros(0, np.uint16)
        return Streams(
            gaps=np.array([255, 0], np.uint8),
            lows=none,
            wide_gaps=wide,
            trits=np.zeros(1, np.uint8),
            values=none,
            wide_steps=steps,
        )

    assert loops.join(streams(2**32 - 2), 0)[0].tolist() == [2**32 - 2, 2**32 - 1]
    with pytest.raises(ValueError, match=r"add up to position|do not fit"):
        loops.join(streams(2**32 - 1), 0)
    bits = np.zeros(3, dtype=np.uint16)
    loops.add(bits, np.array([0, 2], dtype=np.uint32), np.array([7, 2**16 - 1], dtype=np.uint16))
    assert bits.tolist() == [7, 0, 2**16 - 1]
    with pytest.raises(ValueError, match="position 3 of 3 elements"):
        loops.add(bits, np.array([3], dtype=np.uint32), np.ones(1, dtype=np.uint16))


@pytest.mark.parametrize("loops", [delta_numpy, delta_loops])
def test_inconsistent_streams_are_refused(loops: Any) -> None:
    old, new = changed(np.uint16, 20_001, 0.02)
    streams = delta_numpy.split(*delta_numpy.find(old, new), 4)
    assert len(streams.values)
    assert len(streams.wide_steps)
    parts = {field.name: getattr(streams, field.name) for field in fields(Streams)}
    for name in ("values", "wide_steps"):
        with pytest.raises(
            ValueError, match=r"wide stream|do not fit|could not be broadcast|values"
        ):
            loops.join(Streams(**{**parts, name: parts[name][:-1]}), 4)
    with pytest.raises(ValueError, match=r"escaped|do not fit"):
        loops.join(
            Streams(**{**parts, "wide_gaps": np.append(parts["wide_gaps"], np.uint32(7))}), 4
        )
    positions, steps = delta_numpy.find(old, new)
    with pytest.raises(ValueError, match=r"position \d+ of 10 elements"):
        loops.add(np.zeros(10, dtype=np.uint16), positions, steps)
