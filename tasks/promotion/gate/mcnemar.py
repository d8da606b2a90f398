"""The test `mcnemar`: problems that only one of the two teams solves.

wins     only the candidate's answer is right       losses   only the champion's answer is right
"""

import math
from statistics import NormalDist
from typing import Literal

import numpy as np

from data_ops.algorithms.named import Named
from storage.errors import ConfigError
from tasks.promotion.gate.comparison import Accuracies, Comparison, GateTest


class McNemar(Named):
    """Counts problems that only one team solves. For right and wrong answers, one per problem."""

    name: Literal["mcnemar"] = "mcnemar"
    mid_p: bool = False
    """Use the mid-p value, which is less conservative where few problems differ."""

    def make(self, key: str) -> GateTest:
        """Return the test."""
        return self

    def compare(
        self, champion_P: Accuracies, candidate_P: Accuracies, confidence: float
    ) -> Comparison:
        """Compare two teams on the same problems. ConfigError for an accuracy except 0 and 1."""
        for accuracies_P in (champion_P, candidate_P):
            if (graded := accuracies_P[(accuracies_P != 0) & (accuracies_P != 1)]).size:
                raise ConfigError(
                    f"the test mcnemar compares right and wrong answers, and a problem has the "
                    f"accuracy {graded[0]:g}; play one sample of each problem, or use the test "
                    "paired_bootstrap"
                )
        wins = int((candidate_P > champion_P).sum())
        losses = int((candidate_P < champion_P).sum())
        low, high = adjusted_wald_bounds(wins, losses, len(champion_P), confidence)
        return Comparison(low, high, mcnemar_p_value(wins, losses, mid_p=self.mid_p))


def mcnemar_p_value(wins: int, losses: int, *, mid_p: bool = False) -> float:
    """One-sided p value of McNemar's exact test: that the candidate is not better.

        p = P(X ≥ wins), X ~ Binomial(wins + losses, 1/2);  mid-p = p - P(X = wins) / 2

    McNemar, Psychometrika 1947; mid-p: Fagerland, Lydersen and Laake, The McNemar test for binary
    matched-pairs data, BMC Medical Research Methodology 2013.
    """
    trials = wins + losses
    tail = math.fsum(_binomial_half(trials, count) for count in range(wins, trials + 1))
    return min(1.0, tail - _binomial_half(trials, wins) / 2 if mid_p else tail)


def adjusted_wald_bounds(
    wins: int, losses: int, problems: int, confidence: float
) -> tuple[float, float]:
    """Bounds of the difference of two paired proportions, each one-sided.

        p₊ = (wins + 1) / (n + 2),  p₋ = (losses + 1) / (n + 2)
        p₊ - p₋ ± z · √((p₊ + p₋ - (p₊ - p₋)²) / (n + 2)),  z the normal quantile of `confidence`

    Bonett and Price, Adjusted Wald Confidence Interval for a Difference of Binomial Proportions
    Based on Paired Data, Journal of Educational and Behavioral Statistics 2012.
    """
    size = problems + 2
    plus, minus = (wins + 1) / size, (losses + 1) / size
    half = NormalDist().inv_cdf(confidence) * math.sqrt((plus + minus - (plus - minus) ** 2) / size)
    return float(np.clip(plus - minus - half, -1, 1)), float(np.clip(plus - minus + half, -1, 1))


def _binomial_half(trials: int, count: int) -> float:
    """Return P(X = count), X ~ Binomial(trials, 1/2)."""
    log_ways = math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
    return math.exp(log_ways - trials * math.log(2))
