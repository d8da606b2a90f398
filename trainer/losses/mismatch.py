"""The mismatch: how far the log-probabilities of sampler and trainer are apart for one version.

    rollout engine ── log b ──▶ batch ─┐
                                       ├─▶ δ = log π − log b, before the first optimizer step
    trainer, same weights ── log π ────┘

In exact arithmetic δ is 0 on every token that the trainer's version sampled. Kernels, dtypes and
batch shapes of two engines differ, so it is not: the data is off-policy even at staleness 0.

Sums and the maximum are per region, so that those of several micro-batches, or ranks, can be added
and compared. Importing this module does not import torch.

Shape legend: N loss tokens, R regions, S sums. Notation as in `trainer/losses/loss.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.losses.diagnostics import kl_k3
from trainer.losses.surrogates import check_tokens

if TYPE_CHECKING:
    from torch import Tensor

NOT_MEASURED = -1
"""Instead of a region: a token that another version sampled, or a step after the first."""
BEYOND = 2.0
"""Tokens are counted whose ratio is above this, or below its inverse."""
SUMS = ("tokens", "abs", "k3", "beyond")
"""[S] number of tokens, Σ|δ|, Σ(ρ − 1 − log ρ), tokens with max(ρ, 1/ρ) > BEYOND."""
REGIONS_MAX = 16
"""Regions with metrics of their own: those with the most tokens."""
LOG_MAX = math.log(sys.float_info.max)
PREFIX = "trainer/mismatch/"
STATISTIC = "mean_abs"
"""The statistic that `train.mismatch` limits."""


def mismatch_sums(
    logprobs_N: Tensor, behaviour_N: Tensor, region_N: Tensor, num_regions: int
) -> tuple[Tensor, Tensor]:
    """Return the sums, float64 [R, S], and the largest |δ| (0 without tokens), float64 [R].

    `region_N` int64 is the index of each token's region, or NOT_MEASURED. ValueError for tensors of
    other shapes or dtypes.
    """
    import torch

    check_tokens(logprobs_N, behaviour_N)
    if str(region_N.dtype) != "torch.int64" or region_N.shape != logprobs_N.shape:
        shape = list(logprobs_N.shape)
        raise ValueError(
            f"region_N must be int64 {shape}, found {region_N.dtype} {list(region_N.shape)}"
        )
    is_measured_N = region_N != NOT_MEASURED
    region_M = region_N[is_measured_N]
    logprobs_M, behaviour_M = logprobs_N.detach()[is_measured_N], behaviour_N[is_measured_N]
    distance_M = (logprobs_M.double() - behaviour_M.double()).abs()
    beyond_M = (distance_M > math.log(BEYOND)).double()
    columns = (torch.ones_like(distance_M), distance_M, kl_k3(logprobs_M, behaviour_M), beyond_M)
    sums_RS = distance_M.new_zeros(num_regions, len(SUMS))
    sums_RS.index_add_(0, region_M, torch.stack(columns, dim=1))
    largest_R = distance_M.new_zeros(num_regions)
    largest_R.scatter_reduce_(0, region_M, distance_M, "amax")
    return sums_RS, largest_R


def mismatch_metrics(
    sums_RS: NDArray[np.float64], largest_R: NDArray[np.float64], regions: Sequence[str]
) -> dict[str, float]:
    """Return the metrics of all tokens, and those of each region under its name.

    None where nothing was measured. The region without a name counts in those of all tokens only.
    """
    metrics = _statistics(sums_RS.sum(axis=0), float(largest_R.max(initial=0.0)))
    named = [index for index, region in enumerate(regions) if region and sums_RS[index, 0]]
    most = sorted(named, key=lambda index: (-sums_RS[index, 0], regions[index]))[:REGIONS_MAX]
    for index in most:
        of_region = _statistics(sums_RS[index], float(largest_R[index]))
        metrics |= {f"{name}/{regions[index]}": value for name, value in of_region.items()}
    return {f"{PREFIX}{name}": value for name, value in metrics.items()}


def region_of(metric: str, statistic: str = STATISTIC) -> str:
    """Return the region of a metric's name; empty for any other metric."""
    prefix = f"{PREFIX}{statistic}/"
    return metric.removeprefix(prefix) if metric.startswith(prefix) else ""


def _statistics(sums_S: NDArray[np.float64], largest: float) -> dict[str, float]:
    tokens, distance, k3, beyond = (float(value) for value in sums_S)
    if not tokens:
        return {}
    return {
        STATISTIC: distance / tokens,
        "k3": k3 / tokens,
        "ratio_max": math.exp(largest) if largest < LOG_MAX else math.inf,
        "beyond_2x_share": beyond / tokens,
        "tokens": tokens,
    }
