"""The distance from a frozen reference policy, as a term of each token's loss.

    Σ weight × (token loss + coefficient × k(d))        d = log q − log π

π is the policy that is trained, q the reference: a version of the same policy that stays as it is.
k estimates KL(π‖q) from a token that π sampled (Schulman 2020,
http://joschu.net/blog/kl-approx.html; in the loss as in GRPO, arXiv 2402.03300, eq. 4):

    k1 = −d        k2 = d² / 2        k3 = e^d − 1 − d

Importing this module does not import torch. Shape legend: N loss tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from storage.config_model import CountOrNone, Frozen, NotNegative
from trainer.losses.corrections import LOG_RATIO_MAX
from trainer.losses.surrogates import check_tokens

if TYPE_CHECKING:
    from torch import Tensor

K3_MAX = 10.0
"""Largest k3 of a token, as in published implementations; a token beyond it has no gradient."""


class ReferenceKl(Frozen):
    """Keep the policy near one of its own versions."""

    version: CountOrNone = 0
    """Version of the reference, which exists before training starts; 0: the base model."""
    coefficient: NotNegative = 0.001
    """Weight of the distance; 0 measures it and changes nothing."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the distance. The mean gradient of k1 is 0: it measures, and does not limit."""

    def estimates(self, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
        """Compute k of each token: float64 [N], differentiable in `logprobs_N` alone.

        In float64, since e^d − 1 − d of a small d is a difference of nearly equal numbers.
        """
        check_tokens(logprobs_N, reference_N)
        d_N = reference_N.detach().double() - logprobs_N.double()
        if self.estimator == "k1":
            return -d_N
        if self.estimator == "k2":
            return d_N.square() / 2
        limited_N = d_N.clamp(max=LOG_RATIO_MAX)  # the limit of k3 would make NaN of inf · 0
        return (limited_N.expm1() - limited_N).clamp(max=K3_MAX)
