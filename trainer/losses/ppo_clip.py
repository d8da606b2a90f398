"""PPO with a clipped ratio (arXiv 1707.06347), the bounds asymmetric as in DAPO (arXiv 2503.14476).

Importing this module does not import torch, since every recipe is read with its settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from storage.config_model import NotNegative, RatioLimit
from trainer.losses.aggregation import Aggregated
from trainer.losses.loss import Loss, Prepared, TokenLoss
from trainer.losses.surrogates import ClipBounds, clipped_ratio

if TYPE_CHECKING:
    from torch import Tensor


class PpoClip(Aggregated):
    """−min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)·A)."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: NotNegative = 0.2
    """1 − clip_low is the lower bound of the ratio."""
    clip_high: NotNegative = 0.2
    """1 + clip_high is the upper bound of the ratio."""
    dual_clip: RatioLimit | None = None
    """Largest ratio that counts where the advantage is negative; null: no limit."""

    whole_minibatch: ClassVar[bool] = False

    def make(self) -> Loss:
        """Return the loss with these settings."""
        return self

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        return Prepared(scalars={"clip_low": self.clip_low, "clip_high": self.clip_high})

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        bounds = ClipBounds(prepared.scalars["clip_low"], prepared.scalars["clip_high"])
        return clipped_ratio(logprobs_N, behaviour_N, advantages_N, bounds, self.dual_clip)
