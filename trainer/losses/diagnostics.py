"""Distances between the trained policy and the behaviour policy, token by token.

M2PO selects tokens by them, and the engine publishes them as metrics. No gradient flows through any
of them. Importing this module does not import torch.

Shape legend: N loss tokens. Notation as in `trainer/losses/loss.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def second_moments(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """m = (log b − log π)², float64 [N]: sums over many small squares keep their digits."""
    return (behaviour_N.detach().double() - logprobs_N.detach().double()).square()


def clippable(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Bool [N]: tokens that a bound of the ratio may clip, (A>0 ∧ ρ>1) ∨ (A<0 ∧ ρ<1)."""
    log_ratio_N = logprobs_N.detach() - behaviour_N
    rises_N = (advantages_N > 0) & (log_ratio_N > 0)
    return rises_N | ((advantages_N < 0) & (log_ratio_N < 0))


def kl_k3(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """Estimator k3 of KL(b‖π): ρ − 1 − log ρ ≥ 0 (Schulman 2020), float64 [N]."""
    log_ratio_N = logprobs_N.detach().double() - behaviour_N.double()
    return log_ratio_N.expm1() - log_ratio_N
