"""PPO clip with the settings of a recipe."""

import math

import pytest
import torch
from torch import Tensor

from trainer.losses.loss import Prepared
from trainer.losses.ppo_clip import PpoClip


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_each_clip_setting_is_the_bound_of_its_side() -> None:
    loss = PpoClip(clip_low=0.3, clip_high=0.1)
    tokens = vector(math.log(1.5), math.log(0.5)), vector(0.0, 0.0), vector(1.0, -1.0)
    prepared = loss.prepare(*tokens)
    assert prepared.scalars == {"clip_low": 0.3, "clip_high": 0.1}
    assert prepared.per_token == {}
    result = loss.token_losses(prepared, *tokens)
    assert result.values_N.tolist() == pytest.approx([-1.1, 0.7])
    assert result.clipped_N.tolist() == [True, True]


def test_the_default_bounds_are_symmetric() -> None:
    assert PpoClip().prepare(vector(), vector(), vector()).scalars == {
        "clip_low": 0.2,
        "clip_high": 0.2,
    }


def test_dual_clip_limits_a_token_with_a_huge_ratio() -> None:
    tokens = vector(25.0), vector(0.0), vector(-1.0)
    constants = Prepared(scalars={"clip_low": 0.2, "clip_high": 0.2})
    assert PpoClip().token_losses(constants, *tokens).values_N.item() == pytest.approx(
        math.exp(25.0)
    )
    limited = PpoClip(dual_clip=3.0).token_losses(constants, *tokens)
    assert (limited.values_N.item(), limited.clipped_N.tolist()) == (3.0, [True])


def test_ppo_clip_requires_only_single_tokens() -> None:
    assert not PpoClip.whole_minibatch
    loss = PpoClip()
    assert loss.make() is loss
