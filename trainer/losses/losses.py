"""Policy-gradient losses: tensors in, tensors out. Knows nothing of models, configuration, batches or devices.

Shape legend: N loss tokens (in any order, from any sequences), B sequences. A suffix names a tensor's axes.
π is the policy that is trained, b the behaviour policy that sampled the token, ρ = π/b the ratio, A the advantage,
m = (log b − log π)² the second moment of the log ratio of one token.

A loss is a sum over tokens of weight × token loss. The weights hold the whole aggregation and the bounds are
constants, so the sum may be split into parts in any way without changing its gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

M2_EPS_LOW_MAX = 0.95
"""M2PO's widest lower clip range: the ratio's lower bound never falls below 0.05."""
M2_EPS_HIGH_MAX = 20.0
"""M2PO's widest upper clip range: the ratio's upper bound never exceeds 21."""
FILLED_EPS_LOW_MIN = 0.3
"""Narrowest lower clip range of M2PO's water-filled form: a ratio of 0.7 or more is never clipped."""
FILLED_EPS_HIGH_MIN = 0.5
"""Narrowest upper clip range of M2PO's water-filled form: a ratio of 1.5 or less is never clipped."""
FILLED_UNCLIPPED_EPS_LOW = 1.0
"""Lower clip range of the water-filled form where nothing is to be clipped: a ratio is never below 0."""
FILLED_UNCLIPPED_EPS_HIGH = 99_999.0
"""Upper clip range of the water-filled form where nothing is to be clipped: the ratio's upper bound is 100,000."""


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """One loss per token. Example: ρ = 1.5, A = 1, ε_hi = 0.2 → value −1.2, silenced True."""

    values_N: Tensor
    """[N] differentiable in `logprobs_N`."""
    silenced_N: Tensor
    """[N] bool; True where a bound or mask took the token's gradient away."""


@dataclass(frozen=True)
class ClipBounds:
    """The ratio is clipped to [1 − eps_low, 1 + eps_high]."""

    eps_low: float
    eps_high: float


def ppo_clip(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    bounds: ClipBounds,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Clipped surrogate of PPO: −min(ρA, clip(ρ, 1−ε_lo, 1+ε_hi)·A).

    arXiv 1707.06347; asymmetric bounds: DAPO, arXiv 2503.14476. With a dual clip c > 1 (arXiv 1912.09729) the loss of a
    token with A < 0 is at most −cA, which limits the weight of one token with a huge ratio: ε_hi never clips a token
    with A < 0. Float32 or float64 [N] each.
    """
    _check_tokens(logprobs_N, behaviour_N, advantages_N)
    log_ratio_N = logprobs_N - behaviour_N
    ratio_N = torch.exp(log_ratio_N.detach())
    free_N = -ratio_N * advantages_N
    bound_N = -ratio_N.clamp(1.0 - bounds.eps_low, 1.0 + bounds.eps_high) * advantages_N
    clipped_N = bound_N > free_N
    if dual_clip is None:
        return _limited(log_ratio_N, advantages_N, clipped_N, bound_N)
    above_N = _above_dual_clip(ratio_N, advantages_N, dual_clip)
    limit_N = torch.where(above_N, -dual_clip * advantages_N, bound_N)
    return _limited(log_ratio_N, advantages_N, clipped_N | above_N, limit_N)


def m2po_clip_bounds(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, threshold: float) -> ClipBounds:
    """M2PO's adaptive bounds, for `ppo_clip` (arXiv 2510.01161, the form of the reference implementation).

    T = tokens that clipping can silence (`clippable`). When T is empty or mean(m over T) ≤ θ, they are (0.95, 20).
    Otherwise, with m over T sorted descending, k is the smallest index with mean(m[k:]) < θ (the last index if there
    is none), τ = sqrt(m[k]), ε_lo = min(1 − e^(−τ), 0.95), ε_hi = min(e^τ − 1, 20): the ratio keeps to the span of the
    tokens that satisfy the constraint. Constants: no gradient flows through them.
    """
    _check_tokens(logprobs_N, behaviour_N, advantages_N)
    moments_N = second_moments(logprobs_N, behaviour_N)
    sorted_T = moments_N[clippable(logprobs_N, behaviour_N, advantages_N)].sort(descending=True).values
    if sorted_T.numel() == 0 or float(sorted_T.mean()) <= threshold:
        return ClipBounds(M2_EPS_LOW_MAX, M2_EPS_HIGH_MAX)
    within = torch.nonzero(_means_of_rest(sorted_T) < threshold)
    k = int(within[0]) if within.numel() else sorted_T.numel() - 1
    tau = math.sqrt(float(sorted_T[k]))
    eps_high = math.expm1(tau) if tau < 5.0 else M2_EPS_HIGH_MAX  # e^5 is far above the cap, and a huge τ overflows
    return ClipBounds(min(-math.expm1(-tau), M2_EPS_LOW_MAX), min(eps_high, M2_EPS_HIGH_MAX))


def m2po_filled_bounds(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, threshold: float) -> ClipBounds:
    """M2PO's water-filled bounds, for `ppo_clip` (arXiv 2510.01161, the form of the authors' published code).

    T as in `m2po_clip_bounds`. When T is empty or mean(m over T) ≤ θ, nothing is clipped: (1, 99999). Otherwise τ is
    such that the mean over T of min(m, τ²) is θ (`water_level`), ε_lo = max(1 − e^(−τ), 0.3), ε_hi = max(e^τ − 1, 0.5)
    and at most 99999. A token beyond τ counts as if it stood at τ, where `m2po_clip_bounds` leaves it out of the mean. The
    minima keep the bounds from falling below those of ordinary clipping. The published code takes for τ² the largest m
    of a token that keeps the mean within θ; here the equation is solved. Constants: no gradient flows through them.
    """
    _check_tokens(logprobs_N, behaviour_N, advantages_N)
    moments_T = second_moments(logprobs_N, behaviour_N)[clippable(logprobs_N, behaviour_N, advantages_N)]
    level = water_level(moments_T, threshold)
    if math.isinf(level):
        return ClipBounds(FILLED_UNCLIPPED_EPS_LOW, FILLED_UNCLIPPED_EPS_HIGH)
    tau = math.sqrt(level)
    eps_high = math.expm1(min(tau, math.log1p(FILLED_UNCLIPPED_EPS_HIGH)))  # a huge τ would overflow
    return ClipBounds(max(-math.expm1(-tau), FILLED_EPS_LOW_MIN), max(eps_high, FILLED_EPS_HIGH_MIN))


def water_level(values_T: Tensor, mean: float) -> float:
    """The level l with mean(min(v, l)) = `mean` over the values [T] ≥ 0; infinity when mean(v) ≤ `mean`, also for none.

    With v ascending and s_k the sum of the k smallest, l = (mean · T − s_k) / (T − k) for the smallest k with
    s_k + (T − k)·v_k ≥ mean · T: the first value that must be cut. Example: values 1, 2, 9 and mean 2 → level 3.
    """
    num_values = values_T.numel()
    if num_values == 0 or float(values_T.mean()) <= mean:
        return math.inf
    sorted_T = values_T.double().sort().values
    sums_T = torch.cat([sorted_T.new_zeros(1), sorted_T.cumsum(0)[:-1]])
    counts_T = torch.arange(num_values, 0, -1, dtype=torch.float64, device=sorted_T.device)
    total = mean * num_values
    enough = torch.nonzero(sums_T + counts_T * sorted_T >= total)
    k = int(enough[0]) if enough.numel() else num_values - 1  # none only where rounding decides
    return (total - float(sums_T[k])) / (num_values - k)


def m2po_keep(logprobs_N: Tensor, behaviour_N: Tensor, threshold: float) -> Tensor:
    """M2PO's token mask (arXiv 2510.01161, the form of the paper): bool [N], False on tokens to drop.

    Drops the tokens of largest m, as few as possible, until the mean of m over the rest is ≤ θ; of equal ones the
    earlier first.
    """
    _check_tokens(logprobs_N, behaviour_N)
    sorted_N, order_N = second_moments(logprobs_N, behaviour_N).sort(descending=True, stable=True)
    within = torch.nonzero(_means_of_rest(sorted_N) <= threshold)
    num_dropped = int(within[0]) if within.numel() else sorted_N.numel()
    keep_N = torch.ones_like(sorted_N, dtype=torch.bool)
    keep_N[order_N[:num_dropped]] = False
    return keep_N


def masked_ratio(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, keep_N: Tensor, dual_clip: float | None = None
) -> TokenLoss:
    """The objective of M2PO's token mask: −MρA, unclipped, 0 on dropped tokens (arXiv 2510.01161, equation of J_M2PO).

    Dropped tokens still count in the aggregation's divisor, as in the paper. A dual clip c limits the loss of a kept
    token with A < 0 to −cA, as in `ppo_clip`.
    """
    _check_tokens(logprobs_N, behaviour_N, advantages_N)
    if keep_N.dtype != torch.bool or keep_N.shape != logprobs_N.shape:
        raise ValueError(f"keep_N must be bool {list(logprobs_N.shape)}, found {keep_N.dtype} {list(keep_N.shape)}")
    log_ratio_N = logprobs_N - behaviour_N
    nothing_N = torch.zeros_like(advantages_N)
    if dual_clip is None:
        return _limited(log_ratio_N, advantages_N, ~keep_N, nothing_N)
    above_N = keep_N & _above_dual_clip(torch.exp(log_ratio_N.detach()), advantages_N, dual_clip)
    limit_N = torch.where(above_N, -dual_clip * advantages_N, nothing_N)
    return _limited(log_ratio_N, advantages_N, ~keep_N | above_N, limit_N)


def second_moments(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """m = (log b − log π)², float64 [N], detached: sums over many small squares keep their digits."""
    return (behaviour_N.detach().double() - logprobs_N.detach().double()).square()


def clippable(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Bool [N]: tokens whose gradient an upper or lower bound may silence, (A>0 ∧ ρ>1) ∨ (A<0 ∧ ρ<1)."""
    log_ratio_N = logprobs_N.detach() - behaviour_N
    return ((advantages_N > 0) & (log_ratio_N > 0)) | ((advantages_N < 0) & (log_ratio_N < 0))


def divergence(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """Estimator k3 of KL(b‖π) on tokens that b sampled: ρ − 1 − log ρ ≥ 0 (Schulman 2020). Float64 [N], detached."""
    log_ratio_N = logprobs_N.detach().double() - behaviour_N.double()
    return torch.expm1(log_ratio_N) - log_ratio_N


def token_mean_weights(lengths_B: Tensor) -> Tensor:
    """Every loss token counts the same: 1 / ΣL (DAPO, arXiv 2503.14476). `lengths_B`: loss tokens of each sequence."""
    _check_lengths(lengths_B)
    total = max(int(lengths_B.sum()), 1)
    return torch.where(lengths_B > 0, 1.0 / total, 0.0).float()


def sequence_mean_weights(lengths_B: Tensor) -> Tensor:
    """Every sequence counts the same: 1 / (B·L_b) (GRPO, arXiv 2402.03300). B leaves out those without loss tokens."""
    _check_lengths(lengths_B)
    num_sequences = max(int((lengths_B > 0).sum()), 1)
    return torch.where(lengths_B > 0, 1.0 / (num_sequences * lengths_B.clamp(min=1).double()), 0.0).float()


def constant_weights(lengths_B: Tensor, constant_length: int) -> Tensor:
    """Every token counts 1 / (B·constant), so that long answers are not diluted (Dr.GRPO, arXiv 2503.20783)."""
    _check_lengths(lengths_B)
    num_sequences = max(int((lengths_B > 0).sum()), 1)
    return torch.where(lengths_B > 0, 1.0 / (num_sequences * constant_length), 0.0).float()


def _limited(log_ratio_N: Tensor, advantages_N: Tensor, silenced_N: Tensor, limit_N: Tensor) -> TokenLoss:
    """−ρA, and the constant `limit_N` on tokens whose gradient is taken away."""
    # Masking the log ratio before exp, not the product after it: inf · 0 would be NaN, also in the gradient.
    kept_N = torch.where(silenced_N | (advantages_N == 0), 0.0, log_ratio_N)
    return TokenLoss(torch.where(silenced_N, limit_N, -torch.exp(kept_N) * advantages_N), silenced_N)


def _above_dual_clip(ratio_N: Tensor, advantages_N: Tensor, dual_clip: float) -> Tensor:
    """Bool [N]: tokens with A < 0 and ρ > c."""
    return (advantages_N < 0) & (ratio_N > dual_clip)


def _means_of_rest(sorted_N: Tensor) -> Tensor:
    """[k] = mean(sorted_N[k:])."""
    counts_N = torch.arange(sorted_N.numel(), 0, -1, dtype=sorted_N.dtype, device=sorted_N.device)
    return sorted_N.flip(0).cumsum(0).flip(0) / counts_N


def _check_tokens(first_N: Tensor, *others_N: Tensor) -> None:
    for tensor in (first_N, *others_N):
        if tensor.dim() != 1 or tensor.shape != first_N.shape or tensor.dtype not in (torch.float32, torch.float64):
            found = ", ".join(f"{each.dtype} {list(each.shape)}" for each in (first_N, *others_N))
            raise ValueError(f"expected float32 or float64 tensors of one shape [N], found {found}")


def _check_lengths(lengths_B: Tensor) -> None:
    if lengths_B.dim() != 1 or lengths_B.dtype != torch.int64:
        raise ValueError(f"expected int64 lengths [B], found {lengths_B.dtype} {list(lengths_B.shape)}")
