"""Metrics of one step: sums over its micro-batches and minibatches, then means by name.

Shape legend: N loss tokens of a micro-batch.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from storage.errors import ConfigError
from storage.records.batches import Batch
from trainer.engines.engine import SERVICE_METRICS
from trainer.engines.ranks.collectives import Collectives
from trainer.losses.diagnostics import clippable, kl_k3, second_moments
from trainer.losses.loss import TokenLoss
from trainer.losses.mismatch import SUMS, mismatch_metrics, mismatch_sums

CORRECTION_SUMS = ("tokens", "weight", "zero")


class StepMetrics:
    """Sums of one step. Means over tokens are over all loss tokens of the batch."""

    def __init__(self, regions: Sequence[str]) -> None:
        self._regions = regions
        self._mismatch = torch.zeros(len(regions), len(SUMS), dtype=torch.float64)
        self._largest = torch.zeros(len(regions), dtype=torch.float64)
        self._correction = torch.zeros(len(CORRECTION_SUMS), dtype=torch.float64)
        self._reference = torch.zeros(2, dtype=torch.float64)
        """Number of loss tokens, and the sum of their distances from the reference."""
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

    def add_mismatch(self, logprobs_N: Tensor, behaviour_N: Tensor, region_N: Tensor) -> None:
        """Add loss tokens whose log-probabilities are those before the first optimizer step."""
        sums, largest = mismatch_sums(logprobs_N, behaviour_N, region_N, len(self._regions))
        self._mismatch += sums.cpu()
        self._largest = torch.maximum(self._largest, largest.cpu())

    def add_correction(self, weights_N: Tensor) -> None:
        """Add the weights of loss tokens by which a correction multiplied their losses."""
        wide_N = weights_N.double()
        sums = wide_N.new_tensor(float(len(wide_N))), wide_N.sum(), (wide_N == 0).double().sum()
        self._correction += torch.stack(sums).cpu()

    def add_reference(self, distances_N: Tensor) -> None:
        """Add the distances of loss tokens from the reference."""
        distances_N = distances_N.detach()
        count = distances_N.new_tensor(float(len(distances_N)))
        self._reference += torch.stack([count, distances_N.sum()]).cpu()

    def add_update(self, grad_norm: float, scalars: Mapping[str, float]) -> None:
        """Add one optimizer step: the gradient's norm before clipping, and the loss's constants."""
        self._norms.append(grad_norm)
        for name, value in scalars.items():
            self._scalars.setdefault(f"trainer/{name}", []).append(value)

    def add_over_ranks(self, ranks: Collectives) -> None:
        """Replace sums and maxima over tokens by those over all ranks.

        Norms and constants of the loss are over the whole minibatch on every rank.
        """
        own = [*self._sums.values(), self._loss, float(self._tokens)]
        *values, self._loss, tokens = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        self._sums = dict(zip(self._sums, values, strict=True))
        self._tokens = int(tokens)
        self._mismatch = ranks.sum(self._mismatch).cpu()
        self._correction = ranks.sum(self._correction).cpu()
        self._reference = ranks.sum(self._reference).cpu()
        self._largest = ranks.gather(self._largest[:, None])[0].amax(dim=1).cpu()

    def by_name(self, batch: Batch, lr: float) -> dict[str, float]:
        """Return the finite metrics; `trainer/skipped` counts optimizer steps that were left out.

        `lr` is the learning rate of the step.

        ConfigError when a constant of the loss has the name of a metric that is measured here or by
        the service.
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
            "trainer/lr": lr,
        }
        measured |= _row_metrics(batch) | _correction_metrics(self._correction)
        measured |= _reference_metrics(self._reference)
        measured |= mismatch_metrics(self._mismatch.numpy(), self._largest.numpy(), self._regions)
        if clashes := self._scalars.keys() & {*measured, *SERVICE_METRICS}:
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


def _correction_metrics(sums: Tensor) -> dict[str, float]:
    tokens, weights, zeros = sums.tolist()
    if not tokens:
        return {}
    return {
        "trainer/correction/weight_mean": weights / tokens,
        "trainer/correction/zero_share": zeros / tokens,
    }


def _reference_metrics(sums: Tensor) -> dict[str, float]:
    tokens, distances = sums.tolist()
    return {"trainer/kl_reference": distances / tokens} if tokens else {}


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)
