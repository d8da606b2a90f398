"""M2PO (arXiv 2510.01161): bound the second moment of the log ratio, so that old data stay usable.

Its three published forms differ in what they compute over a minibatch, and in the objective:

    adaptive_clip   bounds of the ratio, the public AstraFlow implementation   clipped ratio
    token_mask      a mask that drops tokens, the paper                        masked ratio
    water_filled    bounds of the ratio, the authors' published code           clipped ratio

Bounds and mask are computed over the whole minibatch, never over a micro-batch: the size of the
memory must not change what is learned. The public implementation computes its bounds over the
micro-batch; with one micro-batch for each minibatch the results are equal.

Importing this module does not import torch, since every recipe is read with its settings.

Shape legend: N loss tokens, T those of them that clipping can affect (`clippable`).
m = (log b − log π)² is the second moment of the log ratio of one token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from storage.config_model import Positive, RatioLimit
from trainer.losses.aggregation import Aggregated
from trainer.losses.diagnostics import clippable, second_moments
from trainer.losses.loss import Loss, Prepared, TokenLoss
from trainer.losses.surrogates import ClipBounds, check_tokens, clipped_ratio, masked_ratio

if TYPE_CHECKING:
    from torch import Tensor

WATER_FILLED_THRESHOLD = 0.04
"""Default threshold θ of the form `water_filled`, that of the published code."""
EPS_LOW_MAX = 0.95
"""Widest lower clip range of `adaptive_clip`: the ratio's lower bound is never below 0.05."""
EPS_HIGH_MAX = 20.0
"""Widest upper clip range of `adaptive_clip`: the ratio's upper bound is never above 21."""
FILLED_EPS_LOW_MIN = 0.3
"""Narrowest lower clip range of `water_filled`: a ratio of 0.7 or more is never clipped."""
FILLED_EPS_HIGH_MIN = 0.5
"""Narrowest upper clip range of `water_filled`: a ratio of 1.5 or less is never clipped."""
FILLED_UNCLIPPED_EPS_LOW = 1.0
"""Lower clip range of `water_filled` where nothing is to be clipped: a ratio is never below 0."""
FILLED_UNCLIPPED_EPS_HIGH = 99_999.0
"""Upper clip range of `water_filled` where nothing is to be clipped: the bound is 100,000."""


class M2po(Aggregated):
    """The ratio, clipped or masked so that the second moment of the log ratio is at most θ."""

    name: Literal["m2po"] = "m2po"
    m2_form: Literal["adaptive_clip", "token_mask", "water_filled"] = "adaptive_clip"
    """The published form."""
    m2_threshold: Positive = 0.01
    """Bound θ of the second moment of the log ratio; default 0.04 with `m2_form: water_filled`."""
    dual_clip: RatioLimit | None = None
    """Largest ratio that counts where the advantage is negative; null: no limit."""

    whole_minibatch: ClassVar[bool] = True

    def make(self) -> Loss:
        """Return the loss with these settings."""
        return self

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        if self.m2_form == "token_mask":
            keep_N = token_mask(logprobs_N, behaviour_N, self.m2_threshold)
            return Prepared(per_token={"keep": keep_N})
        bounds_of = adaptive_bounds if self.m2_form == "adaptive_clip" else water_filled_bounds
        bounds = bounds_of(logprobs_N, behaviour_N, advantages_N, self.m2_threshold)
        return Prepared(scalars={"clip_low": bounds.eps_low, "clip_high": bounds.eps_high})

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        if self.m2_form == "token_mask":
            keep_N = prepared.per_token["keep"]
            return masked_ratio(logprobs_N, behaviour_N, advantages_N, keep_N, self.dual_clip)
        bounds = ClipBounds(prepared.scalars["clip_low"], prepared.scalars["clip_high"])
        return clipped_ratio(logprobs_N, behaviour_N, advantages_N, bounds, self.dual_clip)

    @model_validator(mode="before")
    @classmethod
    def _threshold_of_the_form(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("m2_form") == "water_filled":
            return {"m2_threshold": WATER_FILLED_THRESHOLD} | value
        return value


def adaptive_bounds(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, threshold: float
) -> ClipBounds:
    """Compute adaptive bounds of the ratio (the form of the public AstraFlow implementation).

    When T is empty or mean(m over T) ≤ θ, they are (0.95, 20). Otherwise, with m over T sorted
    descending, k is the smallest index with mean(m[k:]) < θ (the last index if there is none),
    τ = sqrt(m[k]), ε_lo = min(1 − e^(−τ), 0.95), ε_hi = min(e^τ − 1, 20): the range of the ratio is
    that of the tokens that satisfy the constraint. Constants: no gradient flows through them.
    """
    check_tokens(logprobs_N, behaviour_N, advantages_N)
    moments_N = second_moments(logprobs_N, behaviour_N)
    affected_N = clippable(logprobs_N, behaviour_N, advantages_N)
    sorted_T = moments_N[affected_N].sort(descending=True).values
    if sorted_T.numel() == 0 or float(sorted_T.mean()) <= threshold:
        return ClipBounds(EPS_LOW_MAX, EPS_HIGH_MAX)
    k = _first_true(_means_of_rest(sorted_T) < threshold, default=sorted_T.numel() - 1)
    tau = math.sqrt(float(sorted_T[k]))
    # e^5 is far above the cap, and a huge τ overflows.
    eps_high = math.expm1(tau) if tau < 5.0 else EPS_HIGH_MAX
    return ClipBounds(min(-math.expm1(-tau), EPS_LOW_MAX), min(eps_high, EPS_HIGH_MAX))


def water_filled_bounds(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, threshold: float
) -> ClipBounds:
    """Compute water-filled bounds of the ratio (the form of the authors' published code).

    When T is empty or mean(m over T) ≤ θ, nothing is clipped: (1, 99999). Otherwise τ is such that
    the mean over T of min(m, τ²) is θ (`water_level`), ε_lo = max(1 − e^(−τ), 0.3), ε_hi = max(e^τ
    − 1, 0.5) and at most 99999. A token beyond τ counts with the moment τ², where `adaptive_bounds`
    leaves it out of the mean. The minima keep the bounds from falling below those of ordinary
    clipping. The published code takes for τ² the largest m of a token that keeps the mean within θ;
    here the equation is solved. Constants: no gradient flows through them.
    """
    check_tokens(logprobs_N, behaviour_N, advantages_N)
    affected_N = clippable(logprobs_N, behaviour_N, advantages_N)
    level = water_level(second_moments(logprobs_N, behaviour_N)[affected_N], threshold)
    if math.isinf(level):
        return ClipBounds(FILLED_UNCLIPPED_EPS_LOW, FILLED_UNCLIPPED_EPS_HIGH)
    tau = math.sqrt(level)
    # A huge τ would overflow.
    eps_high = math.expm1(min(tau, math.log1p(FILLED_UNCLIPPED_EPS_HIGH)))
    return ClipBounds(
        max(-math.expm1(-tau), FILLED_EPS_LOW_MIN), max(eps_high, FILLED_EPS_HIGH_MIN)
    )


def water_level(values_T: Tensor, mean: float) -> float:
    """Solve mean(min(v, l)) = `mean` for the level l, over values [T] ≥ 0.

    Infinity when mean(v) ≤ `mean`, and for no values. With v ascending and s_k the sum of the k
    smallest, l = (mean · T − s_k) / (T − k) for the smallest k with s_k + (T − k)·v_k ≥ mean · T:
    the first value that must be cut. Example: values 1, 2, 9 and mean 2 → level 3.
    """
    import torch

    num_values = values_T.numel()
    if num_values == 0 or float(values_T.mean()) <= mean:
        return math.inf
    sorted_T = values_T.double().sort().values
    sums_T = torch.cat([sorted_T.new_zeros(1), sorted_T.cumsum(0)[:-1]])
    counts_T = torch.arange(num_values, 0, -1, dtype=torch.float64, device=sorted_T.device)
    total = mean * num_values
    # Without rounding there always is such a k.
    k = _first_true(sums_T + counts_T * sorted_T >= total, default=num_values - 1)
    return (total - float(sums_T[k])) / (num_values - k)


def token_mask(logprobs_N: Tensor, behaviour_N: Tensor, threshold: float) -> Tensor:
    """Compute the token mask (the form of the paper): bool [N], False on tokens to drop.

    Drops as few tokens as possible, of largest m first, until the mean of m over the rest is ≤ θ;
    of tokens with equal m the earlier first.
    """
    import torch

    check_tokens(logprobs_N, behaviour_N)
    moments_N = second_moments(logprobs_N, behaviour_N)
    sorted_N, order_N = moments_N.sort(descending=True, stable=True)
    num_dropped = _first_true(_means_of_rest(sorted_N) <= threshold, default=sorted_N.numel())
    keep_N = torch.ones_like(sorted_N, dtype=torch.bool)
    keep_N[order_N[:num_dropped]] = False
    return keep_N


def _means_of_rest(sorted_N: Tensor) -> Tensor:
    """Compute the means of all tails: entry k is mean(sorted_N[k:])."""
    import torch

    counts_N = torch.arange(sorted_N.numel(), 0, -1, dtype=sorted_N.dtype, device=sorted_N.device)
    return sorted_N.flip(0).cumsum(0).flip(0) / counts_N


def _first_true(mask_N: Tensor, default: int) -> int:
    """Return the index of the first True, or `default` where there is none."""
    return int(mask_N.int().argmax()) if bool(mask_N.any()) else default
