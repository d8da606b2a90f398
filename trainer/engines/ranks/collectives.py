"""What the ranks of a training step exchange beside weights and gradients: a few small tensors.

Shape legend: K kinds of values, N loss tokens of a rank, A those of all ranks.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Collectives(Protocol):
    """The place of this process among the ranks. All ranks make the same calls in one order."""

    @property
    def rank(self) -> int:
        """From 0 to `num_ranks` − 1."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""

    def gather(self, own_KN: Tensor) -> tuple[Tensor, int]:
        """Return the values of all ranks [K, A], in rank order, and where this rank's begin."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, the same bits on every rank."""


class Alone:
    """One process: nothing is exchanged."""

    rank = 0
    num_ranks = 1

    def gather(self, own_KN: Tensor) -> tuple[Tensor, int]:
        return own_KN, 0

    def sum(self, values: Tensor) -> Tensor:
        return values


class Distributed:
    """The ranks of the default process group of torch.distributed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()

    def gather(self, own_KN: Tensor) -> tuple[Tensor, int]:
        own_KN = own_KN.to(self._device)  # NCCL sends from GPUs only
        sizes = torch.zeros(self.num_ranks, dtype=torch.int64, device=self._device)
        sizes[self.rank] = own_KN.shape[1]
        counts = self.sum(sizes).tolist()
        padded = own_KN.new_zeros(own_KN.shape[0], max(counts))
        padded[:, : own_KN.shape[1]] = own_KN
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        whole_KA = torch.cat(
            [part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1
        )
        return whole_KA, sum(counts[: self.rank])

    def sum(self, values: Tensor) -> Tensor:
        total = values.to(self._device, copy=True)
        dist.all_reduce(total)
        return total
