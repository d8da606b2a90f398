"""The compiled loops do what the plain ones do, bit for bit, and the plain ones do what they promise."""

from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np
import pytest

from storage.codec import delta_loops, delta_numpy
from storage.codec.delta_numpy import Bits, Streams

KINDS = (np.uint8, np.uint16, np.uint32, np.uint64)
SIZES = (0, 1, 3, 4, 5, 9, 1000, 20_001)
SHARES = (0.0, 0.001, 0.02, 0.4, 1.0)


def changed(kind: Any, size: int, share: float) -> tuple[Bits, Bits]:
    """Old bits of every kind, and new ones of which about `share` differ, mostly by one, some by anything."""
    draw = np.random.default_rng([size, int(1000 * share), np.dtype(kind).itemsize])
    old = draw.integers(0, np.iinfo(kind).max, size, dtype=kind, endpoint=True)
    anything = draw.integers(0, np.iinfo(kind).max, size, dtype=kind, endpoint=True)
    one = draw.choice(np.array([1, -1, 2, -2, 100, -100]).astype(kind), size, p=[0.4, 0.4, 0.05, 0.05, 0.05, 0.05])
    steps = np.where(draw.random(size) < 0.95, one, anything)
    return old, np.where(draw.random(size) < share, old + steps, old)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Streams):
        return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(Streams))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_and_plain_loops_agree_and_give_the_new_bits(kind: Any) -> None:
    for size, share in product(SIZES, SHARES):
        agree(*changed(kind, size, share))


def agree(old: Bits, new: Bits) -> None:
    """Both kinds of loops find, split, join and add what turns `old` into `new`."""
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
def test_streams_that_do_not_fit_together_are_refused(loops: Any) -> None:
    old, new = changed(np.uint16, 20_001, 0.02)
    streams = delta_numpy.split(*delta_numpy.find(old, new), 4)
    assert len(streams.values)
    assert len(streams.wide_steps)
    parts = {field.name: getattr(streams, field.name) for field in fields(Streams)}
    for name in ("values", "wide_steps"):
        with pytest.raises(ValueError, match=r"wide stream|do not fit|could not be broadcast|values"):
            loops.join(Streams(**{**parts, name: parts[name][:-1]}), 4)
    with pytest.raises(ValueError, match=r"escaped|do not fit"):
        loops.join(Streams(**{**parts, "wide_gaps": np.append(parts["wide_gaps"], np.uint32(7))}), 4)
    positions, steps = delta_numpy.find(old, new)
    with pytest.raises(ValueError, match=r"position \d+ of 10 elements"):
        loops.add(np.zeros(10, dtype=np.uint16), positions, steps)
