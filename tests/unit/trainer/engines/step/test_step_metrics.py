"""Metrics of a step against values worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from storage.records.batches import SequenceKey
from tests.support.runs.builders import batch, row
from trainer.engines.step.step_metrics import StepMetrics
from trainer.losses.loss import TokenLoss
from trainer.losses.mismatch import NOT_MEASURED

LN2 = math.log(2)
BATCH = batch(
    row(SequenceKey(0, 0, 0, 0), version=0, reward=1.0),
    row(SequenceKey(1, 0, 0, 0), version=2, reward=0.5),
    step=4,
)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def measured() -> StepMetrics:
    """Two micro-batches, of ratios 2 and ½, and of ratio 1."""
    metrics = StepMetrics(["eu", ""])
    nothing = vector(0.0)
    first = TokenLoss(vector(0.0, 0.0), torch.tensor([True, False]))
    metrics.add(
        vector(0.75)[0], first, vector(LN2 - 1, -LN2 - 1), vector(0.5, 1.5), vector(-1, -1),
        vector(1, 1),
    )  # fmt: skip
    metrics.add(
        vector(0.25)[0], TokenLoss(nothing, torch.tensor([False])), vector(-1), vector(1),
        vector(-1), vector(-1),
    )  # fmt: skip
    regions = torch.tensor([0, 1, NOT_MEASURED])
    metrics.add_mismatch(vector(LN2 - 1, -1, 9), vector(-1, -1, -1), regions)
    metrics.add_mismatch(vector(-2 * LN2), vector(0), torch.tensor([1]))
    metrics.add_correction(vector(0, 2))
    metrics.add_correction(vector(2.5))
    metrics.add_reference(vector(1, 3).requires_grad_())
    metrics.add_reference(vector(5))
    metrics.add_update(2.0, {"eps": 0.1})
    metrics.add_update(math.inf, {"eps": 0.3})
    return metrics


EXPECTED = {
    "trainer/loss": 0.5,
    # k3: 2 − 1 − ln 2 and ½ − 1 + ln 2
    "trainer/kl/mean": 0.5 / 3,
    "trainer/ratio/mean": 3.5 / 3,
    "trainer/entropy/mean": 1.0,
    "trainer/masked_share": 1 / 3,
    "trainer/m2/mean": LN2**2,
    "trainer/tokens": 3.0,
    "trainer/grad_norm": 2.0,
    "trainer/skipped": 1.0,
    "trainer/lr": 0.25,
    "trainer/eps": 0.2,
    "trainer/sequences": 2.0,
    "trainer/reward/mean": 0.75,
    "trainer/staleness/mean": 2.0,
    "trainer/staleness/max": 3.0,
    "trainer/correction/weight_mean": 1.5,
    "trainer/correction/zero_share": 1 / 3,
    "trainer/kl_reference": 3.0,
    "trainer/mismatch/tokens": 3.0,
    "trainer/mismatch/mean_abs": LN2,
    "trainer/mismatch/ratio_max": 4.0,
}


def test_metrics_are_means_over_the_tokens_of_all_micro_batches_and_over_updates() -> None:
    found = measured().by_name(BATCH, 0.25)
    assert {name: found[name] for name in EXPECTED} == pytest.approx(EXPECTED)
    assert found["trainer/mismatch/tokens/eu"] == 1.0
    assert found["trainer/mismatch/ratio_max/eu"] == pytest.approx(2.0)


class TwoRanks:
    """This rank, and one with the same sums and three times the largest distances."""

    rank, num_ranks = 0, 2

    def sum(self, values: Tensor) -> Tensor:
        return 2 * values

    def gather(self, own_KN: Tensor) -> tuple[Tensor, int]:
        return torch.cat([own_KN, 3 * own_KN], dim=1), 0


def test_sums_and_maxima_are_over_all_ranks_and_norms_are_not() -> None:
    metrics = measured()
    metrics.add_over_ranks(TwoRanks())
    found = metrics.by_name(BATCH, 0.25)
    twice = ("trainer/tokens", "trainer/loss", "trainer/mismatch/tokens")
    expected = EXPECTED | {name: 2 * EXPECTED[name] for name in twice}
    expected["trainer/mismatch/ratio_max"] = 4.0**3
    assert {name: found[name] for name in EXPECTED} == pytest.approx(expected)
    assert found["trainer/mismatch/ratio_max/eu"] == pytest.approx(2.0**3)


def test_a_step_without_tokens_has_metrics_of_its_rows_alone() -> None:
    metrics = StepMetrics([])
    metrics.add_update(math.nan, {"bound": math.inf})
    found = metrics.by_name(BATCH, 0.25)
    assert found["trainer/tokens"] == found["trainer/loss"] == found["trainer/grad_norm"] == 0.0
    assert found["trainer/sequences"] == 2.0
    assert found["trainer/skipped"] == 1.0
    missing = ("bound", "kl_reference", "correction/weight_mean", "mismatch/tokens")
    assert not {f"trainer/{name}" for name in missing} & found.keys()
