"""Distances between the trained policy and the behaviour policy, token by token.

They are M2PO's selection criteria and the engine's metrics. No gradient flows through them.
Importing this module does not import torch.

Shape legend: N loss tokens. Notation as in `trainer/losses/loss.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def second_moments(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """Compute m = (log b − log π)²: float64 [N], so that sums of small squares lose no digits."""
    return (behaviour_N.detach().double() - logprobs_N.detach().double()).square()


def clippable(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Select the tokens that a bound may clip, (A>0 ∧ ρ>1) ∨ (A<0 ∧ ρ<1): bool [N]."""
    log_ratio_N = logprobs_N.detach() - behaviour_N
    positive_N = (advantages_N > 0) & (log_ratio_N > 0)
    negative_N = (advantages_N < 0) & (log_ratio_N < 0)
    return positive_N | negative_N


def kl_k3(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """Compute the estimator k3 of KL(b‖π), ρ − 1 − log ρ ≥ 0 (Schulman 2020): float64 [N]."""
    log_ratio_N = logprobs_N.detach().double() - behaviour_N.double()
    return log_ratio_N.expm1() - log_ratio_N
