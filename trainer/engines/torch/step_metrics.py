"""What one step measured, summed over its micro-batches and minibatches, then named `trainer/…`.

Shape legend: N loss tokens of a micro-batch.
"""

import math

import torch
from torch import Tensor

from storage.records.batches import Batch
from trainer.losses.losses import ClipBounds, TokenLoss, clippable, divergence, second_moments


class Tally:
    """Sums of one step. Means over tokens are over all loss tokens of the batch, whatever its splitting."""

    def __init__(self) -> None:
        self._tokens = 0
        self._sums = dict.fromkeys(("kl", "ratio", "entropy", "silenced", "m2", "clippable"), 0.0)
        self._loss = 0.0
        self._norms: list[float] = []
        self._bounds: list[ClipBounds] = []

    def add(
        self,
        loss: Tensor,
        losses: TokenLoss,
        logprobs_N: Tensor,
        entropy_N: Tensor,
        behaviour_N: Tensor,
        advantages_N: Tensor,
    ) -> None:
        """Take in one micro-batch; `loss` is its share of the minibatch's loss."""
        clippable_N = clippable(logprobs_N, behaviour_N, advantages_N)
        sums = (
            divergence(logprobs_N, behaviour_N).sum(),
            (logprobs_N.detach().double() - behaviour_N).exp().sum(),
            entropy_N.double().sum(),
            losses.silenced_N.double().sum(),
            second_moments(logprobs_N, behaviour_N)[clippable_N].sum(),
            clippable_N.double().sum(),
            loss.detach().double(),
        )
        *by_name, share = torch.stack(sums).tolist()  # one wait for the device, not seven
        for name, value in zip(self._sums, by_name, strict=True):
            self._sums[name] += value
        self._loss += share
        self._tokens += len(logprobs_N)

    def add_update(self, grad_norm: float, bounds: ClipBounds | None) -> None:
        """Take in one optimizer step: the gradient's norm before clipping, and the loss's bounds if it has any."""
        self._norms.append(grad_norm)
        if bounds:
            self._bounds.append(bounds)

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Finite numbers only: what is not finite is left out, and `trainer/skipped` counts such optimizer steps."""
        tokens, updates = max(self._tokens, 1), max(len(self._norms), 1)
        finite_norms = [norm for norm in self._norms if math.isfinite(norm)]
        found = {
            "trainer/loss": self._loss / updates,
            "trainer/kl/mean": self._sums["kl"] / tokens,
            "trainer/ratio/mean": self._sums["ratio"] / tokens,
            "trainer/entropy/mean": self._sums["entropy"] / tokens,
            "trainer/masked_share": self._sums["silenced"] / tokens,
            "trainer/m2/mean": self._sums["m2"] / max(self._sums["clippable"], 1.0),
            "trainer/tokens": float(self._tokens),
            "trainer/grad_norm": _mean(finite_norms),
            "trainer/skipped": float(len(self._norms) - len(finite_norms)),
        }
        if self._bounds:
            found["trainer/clip_low"] = _mean([bounds.eps_low for bounds in self._bounds])
            found["trainer/clip_high"] = _mean([bounds.eps_high for bounds in self._bounds])
        found |= _of_rows(batch)
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _of_rows(batch: Batch) -> dict[str, float]:
    staleness = [float(batch.step - 1 - row.min_version) for row in batch.rows]
    return {
        "trainer/sequences": float(len(batch.rows)),
        "trainer/reward/mean": _mean([row.reward for row in batch.rows]),
        "trainer/staleness/mean": _mean(staleness),
        "trainer/staleness/max": max(staleness, default=0.0),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)
