"""A recipe's settings reach the loss that they name."""

import pytest
import torch

from trainer.config import LossConfig
from trainer.losses import ClipBounds
from trainer.objective import Constants, constants, token_losses


def log_ratios(*ratios: float) -> torch.Tensor:
    """Log-probabilities that give these ratios against a behaviour of 0."""
    return torch.tensor(ratios, dtype=torch.float64).log()


def test_each_clip_setting_is_the_bound_of_its_side() -> None:
    loss = LossConfig(name="ppo_clip", clip_low=0.1, clip_high=0.3)
    nothing = log_ratios()
    assert constants(loss, nothing, nothing, nothing).bounds == ClipBounds(eps_low=0.1, eps_high=0.3)


def test_dual_clip_bounds_ppos_loss_and_no_other() -> None:
    fixed = Constants(bounds=ClipBounds(0.2, 0.2))
    tokens = log_ratios(5.0), log_ratios(1.0), torch.tensor([-1.0], dtype=torch.float64)
    clipped, free, other = (
        token_losses(loss, fixed, *tokens).values_N.item()
        for loss in (
            LossConfig(name="ppo_clip", dual_clip=3.0),
            LossConfig(name="ppo_clip"),
            LossConfig(name="m2po", dual_clip=3.0),
        )
    )
    assert (clipped, free, other) == pytest.approx((3.0, 5.0, 5.0))
