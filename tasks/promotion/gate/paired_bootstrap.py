"""The test `paired_bootstrap`: resampled problems give the bounds, exchanged signs the p value.

P: problems. d_p is the candidate's accuracy minus the champion's on problem p, and d their mean.
"""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from data_ops.algorithms.named import Named
from storage.config_model import Seed
from tasks.promotion.gate.comparison import Accuracies, Comparison, GateTest

DRAWS_MAX = 2**22
"""Random numbers that are in memory at once."""
VALUES_MAX, PROBLEMS_PER_VALUE = 64, 8
"""With more different values than VALUES_MAX, and fewer problems to each than PROBLEMS_PER_VALUE, a
random number for each problem takes less time than one for each value.
"""
TIE_TOLERANCE = 1e-9
"""Sums that differ by less are equal: their terms are added in another order."""


class PairedBootstrap(Named):
    """Resamples problems. For any number of samples of each problem."""

    name: Literal["paired_bootstrap"] = "paired_bootstrap"
    resamples: Annotated[int, Field(ge=100, le=1_000_000)] = 10_000
    """Resamples for the bounds, and again as many for the p value."""
    seed: Seed = 0

    def make(self, key: str) -> GateTest:
        """Return the test."""
        return self

    def compare(
        self, champion_P: Accuracies, candidate_P: Accuracies, confidence: float
    ) -> Comparison:
        """Compare two teams on the same problems."""
        differences_P = candidate_P - champion_P
        rng = np.random.default_rng(self.seed)
        low, high = bootstrap_bounds(differences_P, confidence, self.resamples, rng)
        return Comparison(low, high, sign_flip_p_value(differences_P, self.resamples, rng))


def bootstrap_bounds(
    differences_P: Accuracies, confidence: float, resamples: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Bounds of the mean difference by the percentile bootstrap.

        d* = mean of P differences that are drawn with replacement from d_1 … d_P
        low = the (1 - confidence) quantile of B values d*, high = the confidence quantile

    Each is a one-sided bound. Problems are drawn, not samples: the samples of one problem are not
    independent. Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13; for
    paired comparisons of systems: Koehn, Statistical Significance Tests for Machine Translation
    Evaluation, EMNLP 2004.

    A resample is drawn as the number of times that each distinct difference is in it; where there
    are many, as the problems.
    """
    values_U, counts_U = np.unique(differences_P, return_counts=True)
    size = len(differences_P)
    if _are_few(len(values_U), size):
        means = [
            rng.multinomial(size, counts_U / size, size=rows) @ values_U / size
            for rows in _chunks(resamples, len(values_U))
        ]
    else:
        means = [
            differences_P[rng.integers(size, size=(rows, size))].mean(axis=1)
            for rows in _chunks(resamples, size)
        ]
    means_B = np.concatenate(means)
    low, high = np.quantile(means_B, [1 - confidence, confidence], method="inverted_cdf")
    return float(low), float(high)


def sign_flip_p_value(differences_P: Accuracies, resamples: int, rng: np.random.Generator) -> float:
    """One-sided p value of the mean difference by approximate randomization.

        S* = Σ ±d_p, each sign + or - with probability 1/2;  p = (1 + #{S* ≥ Σ d_p}) / (1 + B)

    If the two teams do not differ, each problem's outcomes may be exchanged, which changes the sign
    of its difference. So p is valid for any number of problems, also where only a few differ, while
    the bootstrap is an approximation. Noreen, Computer-Intensive Methods for Testing Hypotheses,
    1989; Riezler and Maxwell, On Some Pitfalls in Automatic Evaluation and Significance Testing for
    MT, 2005.

    The signs of the k problems with one distance |d| are drawn together, k⁺ ~ Binomial(k, 1/2), but
    not where there are many distances.
    """
    distances_U, counts_U = np.unique(np.abs(differences_P), return_counts=True)
    are_few, size = _are_few(len(distances_U), len(differences_P)), len(differences_P)
    observed = float(differences_P.sum())
    at_least = 0
    for rows in _chunks(resamples, len(distances_U) if are_few else size):
        if are_few:
            positive_BU = rng.binomial(counts_U, 0.5, size=(rows, len(counts_U)))
            sums_B = (2 * positive_BU - counts_U) @ distances_U
        else:
            is_kept_BP = rng.integers(2, size=(rows, size), dtype=np.bool_)
            sums_B = 2 * (is_kept_BP @ differences_P) - observed
        at_least += int((sums_B >= observed - TIE_TOLERANCE).sum())
    return (1 + at_least) / (1 + resamples)


def _are_few(values: int, problems: int) -> bool:
    return values <= max(VALUES_MAX, problems // PROBLEMS_PER_VALUE)


def _chunks(resamples: int, draws: int) -> list[int]:
    """Return numbers of resamples that sum to `resamples`, each with at most DRAWS_MAX draws."""
    rows = max(1, DRAWS_MAX // draws)
    full, rest = divmod(resamples, rows)
    return [rows] * full + [rest] * (rest > 0)
