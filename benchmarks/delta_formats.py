"""Formats of two papers in NumPy, with which the delta codec is compared, and one program's update.

All take flat uint16 arrays of one tensor. `encode` returns the transferred bytes, `apply` changes
`bits` in place.
"""

import hashlib
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from storage.formats.safetensors import from_safetensors, to_safetensors
from storage.records.weights import HostTensor
from storage.weights.codec.delta_numpy import Bits

ROW = 4096
"""Elements of a row in PULSE's format: the width of a typical matrix."""
_ZSTD = pa.Codec("zstd", compression_level=1)


class AstraFlowFormat:
    """Format of AstraFlow's paper (arXiv 2605.15565): u32 index, u16 value of every change."""

    def encode(self, old: Bits, new: Bits) -> list[bytes]:
        indices = np.flatnonzero(old != new).astype(np.uint32)
        return [indices.tobytes(), new[indices].tobytes()]

    def apply(self, bits: Bits, blob: list[bytes]) -> None:
        bits[np.frombuffer(blob[0], dtype=np.uint32)] = np.frombuffer(blob[1], dtype=np.uint16)


class AstraFlowWorker:
    """Update of AstraFlow's program, after its public code of 2026 (apply_delta_worker.py).

    The model is a safetensors file in memory. Indices and values are read from one file, sorted and
    scattered, two bytes a change, into the mapped model.
    """

    HEADER = struct.Struct("<QHHi")
    """Number of changes, bytes of an element, flags, padding."""

    def __init__(self, folder: Path) -> None:
        self._change, self._model = folder / "change.bin", folder / "model.safetensors"

    def encode(self, old: Bits, new: Bits) -> list[bytes]:
        indices = np.flatnonzero(old != new).astype(np.uint32)
        return [
            self.HEADER.pack(len(indices), old.itemsize, 0, 0)
            + indices.tobytes()
            + new[indices].tobytes()
        ]

    def store(self, bits: Bits, blob: list[bytes]) -> None:
        """Write the model and the change as files, the input of `update`."""
        self._model.write_bytes(to_safetensors({"w": HostTensor("BF16", bits.shape, bits)}))
        self._change.write_bytes(blob[0])

    def update(self) -> None:
        """Apply the change to the model's file; this is measured."""
        change = self._change.read_bytes()
        count, width, _, _ = self.HEADER.unpack_from(change)
        middle = self.HEADER.size + 4 * count
        indices = np.frombuffer(change[self.HEADER.size : middle], dtype=np.uint32)
        values = np.frombuffer(change[middle : middle + width * count], dtype=np.uint8).reshape(
            count, width
        )
        with self._model.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            start = 8 + int.from_bytes(mapped[:8], "little")
            rows = np.frombuffer(mapped, dtype=np.uint8, offset=start).reshape(-1, width)
            order = np.argsort(indices)
            rows[indices[order]] = values[order]
            del rows  # the file can be unmapped only then

    def updated(self) -> Bits:
        """Read the model from its file."""
        return from_safetensors(self._model.read_bytes())["w"].bits

    def apply(self, bits: Bits, blob: list[bytes]) -> None:
        self.store(bits, blob)
        self.update()
        bits[:] = self.updated()


class PulseFormat:
    """PULSE: index deltas within each row (u8 or u16 by row) and raw values under zstd, SHA-256."""

    def encode(self, old: Bits, new: Bits) -> list[bytes]:
        positions = np.flatnonzero(old != new)
        rows, columns = np.divmod(positions, ROW)
        first = np.append(True, rows[1:] != rows[:-1])[: len(rows)]
        deltas = np.where(first, columns, np.diff(columns, prepend=0))
        counts = np.bincount(rows, minlength=-(-len(old) // ROW)).astype(np.uint16)
        wide = np.zeros(len(counts), dtype=bool)
        wide[rows[deltas > 255]] = True
        is_wide = wide[rows]
        streams: tuple[Any, ...] = (
            counts,
            np.packbits(wide),
            deltas[~is_wide].astype(np.uint8),
            deltas[is_wide].astype(np.uint16),
            new[positions],
        )
        packed = [_ZSTD.compress(stream.tobytes(), asbytes=True) for stream in streams]
        return [
            *packed,
            hashlib.sha256(new.data).digest(),
            np.array([len(stream) for stream in streams]).tobytes(),
        ]

    def apply(self, bits: Bits, blob: list[bytes]) -> None:
        sizes = np.frombuffer(blob[6], dtype=np.int64)
        kinds: tuple[Any, ...] = (np.uint16, np.uint8, np.uint8, np.uint16, np.uint16)
        counts, flags, narrow, broad, values = (
            np.frombuffer(
                _ZSTD.decompress(part, decompressed_size=int(size) * np.dtype(kind).itemsize),
                dtype=kind,
            )
            for part, size, kind in zip(blob[:5], sizes, kinds, strict=True)
        )
        per_row = counts.astype(np.int64)
        rows = np.repeat(np.arange(len(per_row)), per_row)
        is_wide = np.unpackbits(flags, count=len(counts)).astype(bool)[rows]
        deltas = np.empty(len(rows), dtype=np.int64)
        deltas[~is_wide], deltas[is_wide] = narrow, broad
        summed = np.cumsum(deltas)
        starts = np.append(0, np.cumsum(per_row)[:-1])
        before = np.append(0, summed)[starts]
        bits[rows * ROW + summed - before[rows]] = values
        if hashlib.sha256(bits.data).digest() != blob[5]:
            raise ValueError("the tensor has another SHA-256")
