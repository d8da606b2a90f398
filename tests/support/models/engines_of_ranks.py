"""A train engine of ranks that needs no model, so that a rank starts without transformers, and
engines that end or fail on rank 1 alone, in the middle of a step.
"""

import os
import signal
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from storage.errors import CorruptError
from storage.records.batches import Batch
from storage.records.types import Json
from storage.records.weights import HostTensor
from trainer.config import TrainConfig


class Summing:
    """Each step adds the number of ranks to the weights, by a collective."""

    def __init__(self, config: TrainConfig, model_config: Json, seed: int) -> None:
        self._sums = torch.zeros(4)

    def set_weights(self, tensors: Mapping[str, HostTensor]) -> None:
        self._sums = torch.zeros(4)

    def step(self, batch: Batch) -> dict[str, float]:
        self.before_the_collective()
        ones = torch.ones(4)
        dist.all_reduce(ones)
        self._sums += ones
        return {"trainer/tokens": 1.0}

    def before_the_collective(self) -> None:
        """Of a step; to be overridden."""

    def weights(self) -> dict[str, HostTensor]:
        return {"sums": HostTensor("F32", (4,), self._sums.numpy().view(np.uint32).copy())}

    def save(self) -> tuple[dict[str, HostTensor], Json]:
        return self.weights(), {}

    def load(self, tensors: Mapping[str, HostTensor], state: Json) -> None:
        self._sums = torch.from_numpy(tensors["sums"].bits.view(np.float32).copy())


class KilledOnRankOne(Summing):
    def before_the_collective(self) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class RaisesOnRankOne(Summing):
    def before_the_collective(self) -> None:
        if dist.get_rank() == 1:
            raise ValueError("rank 1 has a fault of its own")


class LacksMemoryOnRankOne(Summing):
    def before_the_collective(self) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("no memory")


class RaisesOnEveryRank(Summing):
    def before_the_collective(self) -> None:
        raise CorruptError("all ranks see it")
