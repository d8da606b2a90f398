"""Metrics of one step: sums over its micro-batches and minibatches, then means by name.

Shape legend: N loss tokens of a micro-batch.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from storage.errors import ConfigError
from storage.records.batches import Batch
from trainer.losses.diagnostics import clippable, kl_k3, second_moments
from trainer.losses.loss import TokenLoss


class StepMetrics:
    """Sums of one step. Means over tokens are over all loss tokens of the batch."""

    def __init__(self) -> None:
        self._tokens = 0
        self._sums = dict.fromkeys(("kl", "ratio", "entropy", "clipped", "m2", "clippable"), 0.0)
        self._loss = 0.0
        self._norms: list[float] = []
        self._scalars: dict[str, list[float]] = {}

    def add(
        self,
        loss: Tensor,
        losses: TokenLoss,
        logprobs_N: Tensor,
        entropy_N: Tensor,
        behaviour_N: Tensor,
        advantages_N: Tensor,
    ) -> None:
        """Add one micro-batch; `loss` is its part of the minibatch's loss."""
        clippable_N = clippable(logprobs_N, behaviour_N, advantages_N)
        sums = (
            kl_k3(logprobs_N, behaviour_N).sum(),
            (logprobs_N.detach().double() - behaviour_N).exp().sum(),
            entropy_N.double().sum(),
            losses.clipped_N.double().sum(),
            second_moments(logprobs_N, behaviour_N)[clippable_N].sum(),
            clippable_N.double().sum(),
            loss.detach().double(),
        )
        *values, loss_value = torch.stack(sums).tolist()  # one wait for the device, not seven
        for name, value in zip(self._sums, values, strict=True):
            self._sums[name] += value
        self._loss += loss_value
        self._tokens += len(logprobs_N)

    def add_update(self, grad_norm: float, scalars: Mapping[str, float]) -> None:
        """Add one optimizer step: the gradient's norm before clipping, and the loss's constants."""
        self._norms.append(grad_norm)
        for name, value in scalars.items():
            self._scalars.setdefault(f"trainer/{name}", []).append(value)

    def by_name(self, batch: Batch) -> dict[str, float]:
        """Return the finite metrics; `trainer/skipped` counts optimizer steps that were left out.

        ConfigError when a constant of the loss has the name of a metric that is measured here.
        """
        tokens, updates = max(self._tokens, 1), max(len(self._norms), 1)
        finite_norms = [norm for norm in self._norms if math.isfinite(norm)]
        measured = {
            "trainer/loss": self._loss / updates,
            "trainer/kl/mean": self._sums["kl"] / tokens,
            "trainer/ratio/mean": self._sums["ratio"] / tokens,
            "trainer/entropy/mean": self._sums["entropy"] / tokens,
            "trainer/masked_share": self._sums["clipped"] / tokens,
            "trainer/m2/mean": self._sums["m2"] / max(self._sums["clippable"], 1.0),
            "trainer/tokens": float(self._tokens),
            "trainer/grad_norm": _mean(finite_norms),
            "trainer/skipped": float(len(self._norms) - len(finite_norms)),
        }
        measured |= _row_metrics(batch)
        if clashes := self._scalars.keys() & measured.keys():
            names = ", ".join(name.removeprefix("trainer/") for name in sorted(clashes))
            raise ConfigError(
                f"train.loss: the loss prepares scalars by the name of other metrics: {names}; "
                "rename them"
            )
        measured |= {name: _mean(values) for name, values in self._scalars.items()}
        return {name: value for name, value in measured.items() if math.isfinite(value)}


def _row_metrics(batch: Batch) -> dict[str, float]:
    staleness = [float(batch.step - 1 - row.min_version) for row in batch.rows]
    return {
        "trainer/sequences": float(len(batch.rows)),
        "trainer/reward/mean": _mean([row.reward for row in batch.rows]),
        "trainer/staleness/mean": _mean(staleness),
        "trainer/staleness/max": max(staleness, default=0.0),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)
