"""A recipe's settings reach the loss that they name."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from trainer.config import LossConfig
from trainer.losses.losses import ClipBounds
from trainer.losses.objective import Constants, constants, looks_ahead, row_weights, token_losses

FIXED = Constants(bounds=ClipBounds(0.2, 0.2))


def log_ratios(*ratios: float) -> Tensor:
    """Log-probabilities that give these ratios against a behaviour of 0."""
    return torch.tensor(ratios, dtype=torch.float64).log()


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of(loss: LossConfig, *moved: tuple[float, float]) -> Constants:
    """The constants of tokens (log ratio, advantage)."""
    differences, advantages = zip(*moved, strict=True)
    return constants(loss, vector(*differences), torch.zeros(len(moved), dtype=torch.float64), vector(*advantages))


def test_each_clip_setting_is_the_bound_of_its_side() -> None:
    loss = LossConfig(name="ppo_clip", clip_low=0.1, clip_high=0.3)
    nothing = log_ratios()
    assert constants(loss, nothing, nothing, nothing).bounds == ClipBounds(eps_low=0.1, eps_high=0.3)


def test_the_adaptive_clip_takes_its_threshold_from_the_recipe() -> None:
    # m = 0.25, 0.04 with mean 0.145. θ = 0.1: the rest after the first is within, τ = 0.2. θ = 0.145: wide open.
    tokens = (0.5, 1.0), (0.2, 1.0)
    assert of(LossConfig(m2_threshold=0.1), *tokens).bounds == ClipBounds(
        pytest.approx(1 - math.exp(-0.2)), pytest.approx(math.exp(0.2) - 1)
    )
    assert of(LossConfig(m2_threshold=0.2), *tokens).bounds == ClipBounds(0.95, 20.0)


def test_the_token_mask_takes_its_threshold_from_the_recipe() -> None:
    # m = 1, 0.25, 0.0625
    tokens = (1.0, 1.0), (-0.5, 1.0), (0.25, -1.0)
    kept = []
    for threshold in (0.05, 0.2, 0.5):
        fixed = of(LossConfig(m2_form="token_mask", m2_threshold=threshold), *tokens)
        assert fixed.bounds is None
        assert fixed.keep_N is not None
        kept.append(fixed.keep_N.tolist())
    assert kept == [[False, False, False], [False, True, True], [True, True, True]]


def test_the_water_filled_clip_takes_its_threshold_from_the_recipe_and_has_one_of_its_own() -> None:
    # m = 4, 1: mean(min(m, τ²)) = θ = 0.81 gives τ = 0.9.
    tokens = (2.0, 1.0), (-1.0, -1.0)
    assert of(LossConfig(m2_form="water_filled", m2_threshold=0.81), *tokens).bounds == ClipBounds(
        pytest.approx(1 - math.exp(-0.9)), pytest.approx(math.exp(0.9) - 1)
    )
    assert of(LossConfig(m2_form="water_filled"), *tokens).bounds == ClipBounds(0.3, 0.5)  # τ = 0.2


def test_the_default_threshold_is_that_of_the_form() -> None:
    assert LossConfig().m2_threshold == 0.01
    assert LossConfig(m2_form="token_mask").m2_threshold == 0.01
    assert LossConfig(m2_form="water_filled").m2_threshold == 0.04
    assert LossConfig(m2_form="water_filled", m2_threshold=0.01).m2_threshold == 0.01
    with pytest.raises(ValidationError, match="'adaptive_clip', 'token_mask' or 'water_filled'"):
        LossConfig.model_validate({"m2_form": "half_full"})


def test_only_m2po_looks_ahead_and_in_every_form() -> None:
    forms = ("adaptive_clip", "token_mask", "water_filled")
    assert not looks_ahead(LossConfig(name="ppo_clip"))
    assert [looks_ahead(LossConfig.model_validate({"name": "m2po", "m2_form": form})) for form in forms] == [True] * 3


def test_bounds_clip_the_ratio_in_every_loss_that_has_them() -> None:
    # ρ = 1.5 and 0.5 with A = 1 and −1: −min(1.5, 1.2) and −min(−0.5, −0.8)
    tokens = log_ratios(1.5, 0.5), log_ratios(1.0, 1.0), vector(1.0, -1.0)
    for loss in (LossConfig(name="ppo_clip"), LossConfig(), LossConfig(m2_form="water_filled")):
        assert token_losses(loss, FIXED, *tokens).values_N.tolist() == pytest.approx([-1.2, 0.8])


def test_a_mask_silences_what_it_drops_and_nothing_else() -> None:
    tokens = log_ratios(1.5, 0.5), log_ratios(1.0, 1.0), vector(1.0, -1.0)
    fixed = Constants(keep_N=torch.tensor([True, False]))
    assert token_losses(LossConfig(m2_form="token_mask"), fixed, *tokens).values_N.tolist() == pytest.approx([-1.5, 0.0])


@pytest.mark.parametrize(
    ("loss", "fixed"),
    [
        (LossConfig(name="ppo_clip"), FIXED),
        (LossConfig(m2_form="adaptive_clip"), FIXED),
        (LossConfig(m2_form="water_filled"), FIXED),
        (LossConfig(m2_form="token_mask"), Constants(keep_N=torch.tensor([True]))),
    ],
    ids=["ppo_clip", "adaptive_clip", "water_filled", "token_mask"],
)
def test_dual_clip_limits_every_loss(loss: LossConfig, fixed: Constants) -> None:
    """One token with A < 0 and ρ = e²⁵ would decide a step."""
    tokens = vector(25.0), vector(0.0), vector(-1.0)
    free = token_losses(loss, fixed, *tokens)
    assert free.values_N.item() == pytest.approx(math.exp(25.0))
    assert free.silenced_N.tolist() == [False]
    limited = token_losses(loss.model_copy(update={"dual_clip": 3.0}), fixed, *tokens)
    assert limited.values_N.item() == 3.0
    assert limited.silenced_N.tolist() == [True]


def test_each_aggregate_weighs_tokens_in_its_way() -> None:
    lengths = [4, 0, 1]
    assert row_weights(LossConfig(aggregate="token_mean"), lengths) == pytest.approx([0.2, 0.0, 0.2])
    assert row_weights(LossConfig(aggregate="sequence_mean"), lengths) == [0.125, 0.0, 0.5]
    assert row_weights(LossConfig(aggregate="constant", constant_length=8), lengths) == [0.0625, 0.0, 0.0625]


def test_a_constant_aggregate_needs_its_length() -> None:
    with pytest.raises(ValidationError, match=r"needs loss\.constant_length"):
        LossConfig(aggregate="constant")
    without = LossConfig().model_copy(update={"aggregate": "constant"})
    with pytest.raises(ValueError, match="needs constant_length"):
        row_weights(without, [1])


def test_a_part_of_the_constants_is_that_of_its_tokens() -> None:
    fixed = Constants(keep_N=torch.tensor([True, False, False, True]))
    part = fixed.part(1, 4)
    assert part.keep_N is not None
    assert part.keep_N.tolist() == [False, False, True]
    assert FIXED.part(1, 4).bounds == FIXED.bounds
    assert FIXED.part(1, 4).keep_N is None


def test_constants_without_bounds_and_mask_are_refused() -> None:
    with pytest.raises(ValueError, match="neither bounds nor a mask"):
        token_losses(LossConfig(), Constants(), log_ratios(1.0), log_ratios(1.0), vector(1.0))
