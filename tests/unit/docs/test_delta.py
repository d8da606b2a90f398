"""An independent decoder of deltas, written from docs/format.md with NumPy and a Zstandard library;
it imports nothing of this project.
"""

import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage.weights.codec import delta_blocks, deltas
from tests.unit.storage.weights.codec.test_deltas import draw, tensor, trained


def decode(old: Any, blob: bytes) -> Any:
    """Return the new elements. `old`: a tensor's elements as flat unsigned integers."""
    new, at = old.copy(), 0
    while at < len(blob):
        size, number, method, item, zero = struct.unpack_from("<IIBBH", blob, at)
        assert (item, zero) == (1, 0)
        block = new[number * 2**22 : (number + 1) * 2**22]
        body, at = blob[at + 12 : at + size], at + size
        if method == 2:
            planes = []
            for _ in range(block.itemsize):
                (length,) = struct.unpack_from("<I", body)
                planes.append(unzstd(body[4 : 4 + length], len(block)))
                body = body[4 + length :]
            block += unzigzag(np.stack(planes, axis=1).reshape(-1).view(block.dtype))
            continue
        count, low_bits, *sizes = struct.unpack_from("<IB3x6I", body)
        ends = np.cumsum([32, *sizes])
        gaps, lows, wide, trits, values, wide_steps = (body[a:b] for a, b in pairwise(ends))
        assert len(body) == ends[-1]
        gap = unzstd(gaps, count).astype(np.int64)
        low = np.frombuffer(lows, np.uint8)
        low = {
            0: np.zeros(count, np.uint8),
            4: np.stack([low & 15, low >> 4], 1).reshape(-1)[:count],
            8: low,
        }[low_bits]
        full = gap << low_bits | low
        full[gap == 255] = np.frombuffer(wide, "<u4")
        trit = (unzstd(trits, -(-count // 5))[:, None] // [1, 3, 9, 27, 81] % 3).reshape(-1)[:count]
        value = unzstd(values, int((trit == 2).sum()))
        others = unzigzag(value.astype(block.dtype) + block.dtype.type(3))
        others[value == 255] = np.frombuffer(wide_steps, block.dtype)
        step = np.where(trit == 0, 1, -1).astype(np.int64).astype(block.dtype)
        step[trit == 2] = others
        block[np.cumsum(full + 1) - 1] += step
    return new


def unzstd(frame: bytes, size: int) -> Any:
    return np.frombuffer(
        pa.decompress(frame, size, "zstd", asbytes=True) if size else b"", np.uint8
    )


def unzigzag(values: Any) -> Any:
    item = values.dtype.type(1)
    return (values >> item) ^ (~(values & item) + item)


@pytest.mark.parametrize("lr", [1e-7, 1e-6, 5e-6, 1e-3])
def test_an_independent_reader_decodes_a_training_step(lr: float) -> None:
    old, new = trained(400_000, lr)
    (change,) = deltas.encode({"w": tensor(old)}, {"w": tensor(new)}, {"w": "w"}, threads=1)
    assert (decode(old, change.blob) == new).all()


def test_an_independent_reader_decodes_a_tensor_of_several_blocks() -> None:
    old, new = trained(2 * delta_blocks.BLOCK_ELEMENTS + 1000, 1e-6)
    (change,) = deltas.encode({"w": tensor(old)}, {"w": tensor(new)}, {"w": "w"}, threads=2)
    assert (decode(old, change.blob) == new).all()


@pytest.mark.parametrize(
    ("dtype", "kind"), [("F32", np.uint32), ("F64", np.uint64), ("U8", np.uint8)]
)
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.3, 1.0])
def test_an_independent_reader_decodes_other_dtypes(dtype: str, kind: Any, share: float) -> None:
    old = draw(0).integers(0, np.iinfo(kind).max, 50_000, dtype=kind)
    steps = draw(1).integers(-400, 400, 50_000).astype(kind)
    new = np.where(draw(2).random(50_000) < share, old + steps, old)
    bits = old.view(np.float64) if dtype == "F64" else old
    (change,) = deltas.encode(
        {"w": tensor(bits, dtype)},
        {"w": tensor(new.view(bits.dtype), dtype)},
        {"w": "w"},
        threads=1,
    )
    assert (decode(old, change.blob) == new).all()
