"""What changed since the last publication, found on the device that holds the weights: only the
changes cross to the host.

    weights, rounded ──┐
                       ├─ compare, chunk by chunk ─▶ positions, steps ──PCIe──▶ last host tensor + steps = new host tensor
    bits last published┘◀─ the new bits take their place

The device keeps the bits of what was last published, in the dtype it was published in. They are
compared as integers, so that NaN and −0.0 are bits like others. The host tensors remember their
`Difference`, so nobody compares them again on the CPU. Knows nothing of models or versions; runs on
any device of torch.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from storage.records.weights import HostTensor
from storage.weights.codec import deltas
from trainer.engines.torch.host_tensors import DTYPES, NAMES, to_host

CHUNK_ELEMENTS = 2**25
"""Elements that are compared at once: `torch.nonzero` refuses 2³¹ of them, and places in a chunk
cross in 4 bytes. While that lasts, each takes about 3 bytes on the device (published as BF16), and
each that changed some 20 more.
"""
PLACE_BYTES = 4
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → what its bits are compared and subtracted as; both wrap around as unsigned
ones do.
"""


@dataclass(frozen=True, eq=False)
class _Published:
    """A tensor as it was last published."""

    host: HostTensor
    bits: Tensor
    """[elements] the same bits, on the device."""


class DeviceScan:
    """Copies tensors to the host, and remembers what it copied under each name."""

    def __init__(self) -> None:
        self._published: dict[str, _Published] = {}
        self.num_bytes = 0
        """Crossed to the host so far."""

    def to_host(self, name: str, tensor: Tensor, dtype: str | None = None) -> HostTensor:
        """As `bits.to_host`, but what it gives is read-only, and without a change the very tensor
        of the last time.

        The whole tensor crosses where nothing is known of it, or where its changes would take more
        bytes.
        """
        wanted = tensor.dtype if dtype is None else DTYPES[dtype]
        # Popped: the bits of a comparison that failed halfway must not be believed the next time.
        last = self._published.pop(name, None)
        if last is None or (last.host.dtype, last.host.shape, last.bits.device) != (
            NAMES[wanted],
            tensor.shape,
            tensor.device,
        ):
            bits = torch.empty(
                tensor.numel(), dtype=_INTEGERS[wanted.itemsize], device=tensor.device
            )
            for chunk, new in _rounded(tensor, wanted):
                bits[chunk] = new
            host = self._whole(bits, wanted, tensor.shape)
        else:
            bits = last.bits
            host = self._changed(tensor, wanted, last)
        host.bits.flags.writeable = False  # the next time builds on them
        self._published[name] = _Published(host, bits)
        return host

    def _whole(self, bits: Tensor, dtype: torch.dtype, shape: torch.Size) -> HostTensor:
        self.num_bytes += bits.nbytes
        return to_host(bits.view(dtype).reshape(shape))

    def _changed(self, tensor: Tensor, dtype: torch.dtype, last: _Published) -> HostTensor:
        num_changed, num_bytes = 0, 0
        found: list[tuple[Any, Any]] = []
        for start, places, steps in changes(tensor, dtype, last.bits):
            num_changed += len(places)
            num_bytes = num_changed * (PLACE_BYTES + dtype.itemsize)
            if (
                num_bytes <= last.bits.nbytes
            ):  # else the whole tensor will cross: the loop goes on for the bits' sake
                found.append(
                    (places.cpu().numpy().astype(np.uint64) + np.uint64(start), steps.cpu().numpy())
                )
        self.num_bytes += sum(len(part) for part, _ in found) * (PLACE_BYTES + dtype.itemsize)
        if num_bytes > last.bits.nbytes:
            return self._whole(last.bits, dtype, tensor.shape)
        if not num_changed:
            return last.host
        positions, moves = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return deltas.moved(
            last.host, positions, moves.view(f"u{dtype.itemsize}"), threads=os.cpu_count() or 1
        )


def changes(
    tensor: Tensor, dtype: torch.dtype, bits: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Compare `tensor`, rounded to `dtype`, with `bits`, which become its own.

    Of each chunk: where it starts; the places in it of what differs, int32 [n], ascending; the
    steps [n], new − old, wrapping.
    """
    for chunk, new in _rounded(tensor, dtype):
        old = bits[chunk]
        places = torch.nonzero(new != old).flatten()
        steps = new[places] - old[places]
        old.copy_(new)
        yield chunk.start, places.int(), steps


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Chunk by chunk the bits of the tensor in `dtype`, as integers."""
    flat = tensor.detach().reshape(-1)
    for start in range(0, len(flat), CHUNK_ELEMENTS):
        chunk = slice(start, min(start + CHUNK_ELEMENTS, len(flat)))
        yield chunk, flat[chunk].to(dtype).view(_INTEGERS[dtype.itemsize])
