"""Surrogate objectives of the policy gradient: the ratio, clipped or masked.

Importing this module does not import torch.

Shape legend: N loss tokens. Notation as in `trainer/losses/loss.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.losses.loss import TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ClipBounds:
    """The ratio is clipped to [1 − eps_low, 1 + eps_high]."""

    eps_low: float
    eps_high: float


def clipped_ratio(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    bounds: ClipBounds,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Compute the clipped surrogate of PPO: −min(ρA, clip(ρ, 1−ε_lo, 1+ε_hi)·A).

    arXiv 1707.06347; asymmetric bounds: DAPO, arXiv 2503.14476. With a dual clip c > 1 (arXiv
    1912.09729) the loss of a token with A < 0 is at most −cA, which limits the weight of one token
    with a huge ratio: ε_hi never clips a token with A < 0. ValueError for tensors of other shapes
    or dtypes.
    """
    check_tokens(logprobs_N, behaviour_N, advantages_N)
    log_ratio_N = logprobs_N - behaviour_N
    ratio_N = log_ratio_N.detach().exp()
    free_N = -ratio_N * advantages_N
    bound_N = -ratio_N.clamp(1.0 - bounds.eps_low, 1.0 + bounds.eps_high) * advantages_N
    clipped_N = bound_N > free_N
    if dual_clip is None:
        return _limited(log_ratio_N, advantages_N, clipped_N, bound_N)
    above_N = _above_dual_clip(ratio_N, advantages_N, dual_clip)
    limit_N = bound_N.where(~above_N, -dual_clip * advantages_N)
    return _limited(log_ratio_N, advantages_N, clipped_N | above_N, limit_N)


def masked_ratio(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    keep_N: Tensor,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Compute −MρA, not clipped, and 0 on dropped tokens (arXiv 2510.01161, J_M2PO).

    Dropped tokens still count in the weights, as in the paper. A dual clip c limits the loss of a
    kept token with A < 0 to −cA, as in `clipped_ratio`. ValueError for tensors of other shapes or
    dtypes.
    """
    check_tokens(logprobs_N, behaviour_N, advantages_N)
    if str(keep_N.dtype) != "torch.bool" or keep_N.shape != logprobs_N.shape:
        shape = list(logprobs_N.shape)
        raise ValueError(f"keep_N must be bool {shape}, found {keep_N.dtype} {list(keep_N.shape)}")
    log_ratio_N = logprobs_N - behaviour_N
    nothing_N = advantages_N.new_zeros(len(advantages_N))
    if dual_clip is None:
        return _limited(log_ratio_N, advantages_N, ~keep_N, nothing_N)
    ratio_N = log_ratio_N.detach().exp()
    above_N = keep_N & _above_dual_clip(ratio_N, advantages_N, dual_clip)
    limit_N = nothing_N.where(~above_N, -dual_clip * advantages_N)
    return _limited(log_ratio_N, advantages_N, ~keep_N | above_N, limit_N)


def check_tokens(first_N: Tensor, *others_N: Tensor) -> None:
    """Raise ValueError unless all tensors are float32 or float64 of one shape [N]."""
    tensors_N = (first_N, *others_N)
    for tensor_N in tensors_N:
        same_shape = tensor_N.dim() == 1 and tensor_N.shape == first_N.shape
        if not same_shape or str(tensor_N.dtype) not in ("torch.float32", "torch.float64"):
            shapes = ", ".join(f"{each.dtype} {list(each.shape)}" for each in tensors_N)
            raise ValueError(
                f"expected float32 or float64 tensors of one shape [N], found {shapes}"
            )


def _limited(
    log_ratio_N: Tensor, advantages_N: Tensor, clipped_N: Tensor, limit_N: Tensor
) -> TokenLoss:
    """Compute −ρA, and the constant `limit_N` on tokens whose gradient is set to 0."""
    # The log ratio is masked before exp, not the product after it: inf · 0 is NaN, also in the
    # gradient.
    kept_N = log_ratio_N.masked_fill(clipped_N | (advantages_N == 0), 0.0)
    return TokenLoss(limit_N.where(clipped_N, -kept_N.exp() * advantages_N), clipped_N)


def _above_dual_clip(ratio_N: Tensor, advantages_N: Tensor, dual_clip: float) -> Tensor:
    """Select the tokens with A < 0 and ρ > c: bool [N]."""
    return (advantages_N < 0) & (ratio_N > dual_clip)
