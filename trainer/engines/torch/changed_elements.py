"""Find the elements that changed since the last publication on the device that holds the weights.

Only the changes cross to the host:

    weights, rounded ─────┐
                          ├─ compare chunks ─▶ positions, bit deltas ──PCIe──▶ applied to the
    bits published last ──┘                                                    last host tensor

The device keeps the bits that were published last, in the published dtype, and overwrites them with
the new ones. Bits are compared as integers, so NaN and −0.0 need no exception. A host tensor keeps
its `Difference`, so publishing does not compare it again. Runs on any torch device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from storage.machine.cpus import num_cpus
from storage.records.weights import HostTensor
from storage.weights.codec import deltas
from trainer.engines.torch.host_tensors import DTYPES, NAMES, to_host

CHUNK_ELEMENTS = 2**25
"""Elements compared at once: `torch.nonzero` refuses 2³¹, and positions in a chunk take 4 bytes.

An element takes about 3 bytes of temporary device memory (published as BF16), a changed one about
20 more.
"""
POSITION_BYTES = 4
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → signed integer for its bits; differences wrap as unsigned ones do."""


@dataclass(frozen=True, eq=False)
class _Published:
    """A tensor as it was published last."""

    host: HostTensor
    bits: Tensor
    """[E] the same bits on the device, E elements."""


class DeviceScan:
    """Copies tensors to the host and keeps the copied bits of each name on the device."""

    def __init__(self) -> None:
        self._published: dict[str, _Published] = {}
        self.num_bytes = 0
        """Total bytes copied to the host."""

    def to_host(self, name: str, tensor: Tensor, dtype: str | None = None) -> HostTensor:
        """Copy `tensor` to the host as `host_tensors.to_host` does, read-only.

        Without a change, returns the object of the last call. The whole tensor crosses the first
        time, and where its changes would take more bytes.
        """
        target = tensor.dtype if dtype is None else DTYPES[dtype]
        # Popped: after a comparison that failed halfway, the bits must not be used again.
        last = self._published.pop(name, None)
        if last is None or (last.host.dtype, last.host.shape, last.bits.device) != (
            NAMES[target],
            tensor.shape,
            tensor.device,
        ):
            bits = torch.empty(
                tensor.numel(), dtype=_INTEGERS[target.itemsize], device=tensor.device
            )
            for chunk, new in _rounded(tensor, target):
                bits[chunk] = new
            host = self._whole(bits, target, tensor.shape)
        else:
            bits = last.bits
            host = self._changed(tensor, target, last)
        host.bits.flags.writeable = False  # the next call starts from them
        self._published[name] = _Published(host, bits)
        return host

    def _whole(self, bits: Tensor, dtype: torch.dtype, shape: torch.Size) -> HostTensor:
        self.num_bytes += bits.nbytes
        return to_host(bits.view(dtype).reshape(shape))

    def _changed(self, tensor: Tensor, dtype: torch.dtype, last: _Published) -> HostTensor:
        num_changed, num_bytes = 0, 0
        chunks: list[tuple[Any, Any]] = []
        for start, places, bit_deltas in changes(tensor, dtype, last.bits):
            num_changed += len(places)
            num_bytes = num_changed * (POSITION_BYTES + dtype.itemsize)
            # Above this limit the whole tensor will cross; the loop still updates the bits.
            if num_bytes <= last.bits.nbytes:
                positions = places.cpu().numpy().astype(np.uint64) + np.uint64(start)
                chunks.append((positions, bit_deltas.cpu().numpy()))
        num_copied = sum(len(positions) for positions, _ in chunks)
        self.num_bytes += num_copied * (POSITION_BYTES + dtype.itemsize)
        if num_bytes > last.bits.nbytes:
            return self._whole(last.bits, dtype, tensor.shape)
        if not num_changed:
            return last.host
        all_positions, all_deltas = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
        unsigned = all_deltas.view(f"u{dtype.itemsize}")
        return deltas.moved(last.host, all_positions, unsigned, threads=num_cpus())


def changes(
    tensor: Tensor, dtype: torch.dtype, bits: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Compare `tensor`, rounded to `dtype`, with `bits`, and overwrite them with its bits.

    Yields for each chunk its start, the places of its changed elements (int32 [K], ascending), and
    their bit deltas (new − old, wrapping, [K]).
    """
    for chunk, new in _rounded(tensor, dtype):
        old = bits[chunk]
        places = torch.nonzero(new != old).flatten()
        bit_deltas = new[places] - old[places]
        old.copy_(new)
        yield chunk.start, places.int(), bit_deltas


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the bits of the tensor in `dtype` as integers, chunk by chunk."""
    flat = tensor.detach().reshape(-1)
    for start in range(0, len(flat), CHUNK_ELEMENTS):
        chunk = slice(start, min(start + CHUNK_ELEMENTS, len(flat)))
        yield chunk, flat[chunk].to(dtype).view(_INTEGERS[dtype.itemsize])
