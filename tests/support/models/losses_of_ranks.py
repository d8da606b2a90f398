"""Losses that end or fail on rank 1 alone, in the middle of a step."""

import os
import signal

import torch
from torch import Tensor

from storage.errors import CorruptError
from trainer.losses.loss import Prepared, TokenLoss


class _OnRankOne:
    whole_minibatch = False

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        if torch.distributed.get_rank() == 1:
            self.fail()
        return Prepared()

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        return TokenLoss(-logprobs_N * advantages_N, torch.zeros_like(logprobs_N, dtype=torch.bool))

    def fail(self) -> None:
        raise NotImplementedError


class KilledOnRankOne(_OnRankOne):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class RaisesOnRankOne(_OnRankOne):
    def fail(self) -> None:
        raise ValueError("rank 1 has a fault of its own")


class RaisesOnEveryRank(_OnRankOne):
    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        raise CorruptError("all ranks see it")


class LacksMemoryOnRankOne(_OnRankOne):
    def fail(self) -> None:
        raise RuntimeError("no memory")
