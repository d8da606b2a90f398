"""M2PO's bounds and mask against values worked out by hand. Behaviour log-probabilities are 0, so a
log-probability is the log ratio.
"""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from trainer.losses.loss import Prepared
from trainer.losses.m2po import M2po, adaptive_bounds, token_mask, water_filled_bounds, water_level
from trainer.losses.surrogates import ClipBounds, clipped_ratio

WIDE_OPEN = ClipBounds(0.95, 20.0)


def log_ratios(*ratios: float) -> Tensor:
    """Log-probabilities that require gradients and give these ratios against a behaviour of 0."""
    return torch.tensor(
        [math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True
    )


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64)


def bounds_of(differences: list[float], advantages: list[float], threshold: float) -> ClipBounds:
    return adaptive_bounds(
        vector(*differences), zeros(len(differences)), vector(*advantages), threshold
    )


def filled_of(differences: list[float], advantages: list[float], threshold: float) -> ClipBounds:
    return water_filled_bounds(
        vector(*differences), zeros(len(differences)), vector(*advantages), threshold
    )


def test_adaptive_bounds_are_infinite_without_a_clippable_token() -> None:
    assert bounds_of([-2.0, 2.0, 3.0], [1.0, -1.0, 0.0], threshold=0.01) == WIDE_OPEN


def test_adaptive_bounds_are_infinite_for_no_tokens() -> None:
    assert bounds_of([], [], threshold=0.01) == WIDE_OPEN


def test_adaptive_bounds_are_infinite_up_to_a_mean_equal_to_the_threshold() -> None:
    assert bounds_of([0.5], [1.0], threshold=0.25) == WIDE_OPEN
    assert bounds_of([0.5], [1.0], threshold=0.2499) != WIDE_OPEN


def test_adaptive_bounds_are_given_by_the_largest_kept_moment() -> None:
    # m = 0.09, 0.01, 0.0025 over T (two tokens are not in T); the rest after the first has mean
    # 0.00625 < 0.01: τ = 0.1.
    bounds = bounds_of([0.1, -2.0, -0.3, 0.05, 2.0], [1.0, 1.0, -1.0, 1.0, -1.0], threshold=0.01)
    assert bounds.eps_low == pytest.approx(0.0951625820)
    assert bounds.eps_high == pytest.approx(0.1051709181)


def test_adaptive_bounds_require_a_mean_strictly_below_the_threshold() -> None:
    # m = 1, 0.25, 0.0625: the rest from index 1 has mean 0.15625, which is not below θ = 0.15625,
    # so k = 2 and τ = 0.25.
    bounds = bounds_of([1.0, 0.5, 0.25], [1.0, 1.0, 1.0], threshold=0.15625)
    assert bounds.eps_low == pytest.approx(1.0 - math.exp(-0.25))
    assert bounds.eps_high == pytest.approx(math.exp(0.25) - 1.0)


def test_adaptive_bounds_fall_back_to_the_smallest_moment() -> None:
    # m = 0.25, 0.04: no rest has a mean below 0.01, so k is the last index and τ = 0.2.
    bounds = bounds_of([0.5, 0.2], [1.0, 1.0], threshold=0.01)
    assert bounds.eps_low == pytest.approx(0.1812692469)
    assert bounds.eps_high == pytest.approx(0.2214027582)


def test_adaptive_bounds_of_a_single_token_equal_its_ratio() -> None:
    bounds = bounds_of([1.0], [1.0], threshold=0.01)
    assert bounds.eps_low == pytest.approx(0.6321205588)
    assert bounds.eps_high == pytest.approx(1.7182818285)


@pytest.mark.parametrize(
    ("difference", "eps_low", "eps_high"),
    [
        (2.9, 0.9449767799, 17.1741453694),
        (3.0, 0.95, 19.0855369232),
        (4.0, 0.95, 20.0),
        (1000.0, 0.95, 20.0),
    ],
)
def test_adaptive_bounds_are_capped(difference: float, eps_low: float, eps_high: float) -> None:
    bounds = bounds_of([difference], [1.0], threshold=0.01)
    assert (bounds.eps_low, bounds.eps_high) == (pytest.approx(eps_low), pytest.approx(eps_high))


def test_no_gradient_flows_through_adaptive_bounds() -> None:
    logprobs = log_ratios(2.0, 1.01)
    bounds = adaptive_bounds(logprobs, zeros(2), vector(1.0, 1.0), threshold=0.01)
    clipped_ratio(logprobs, zeros(2), vector(1.0, 1.0), bounds).values_N.sum().backward()
    assert bounds.eps_high == pytest.approx(0.01)
    assert logprobs.grad is not None
    # 2.0 is above the bound and clipped. 1.01 is at the bound: half of its slope is free, half is
    # clamped, in total all of it.
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.01])


@pytest.mark.parametrize(
    ("differences", "threshold", "keep"),
    [
        ([0.5, 0.25, 1.0], 0.4375, [True, True, True]),
        ([0.5, -0.25, 1.0], 0.15625, [True, True, False]),
        ([0.5, 0.25, -1.0], 0.1, [False, True, False]),
        ([0.5, 0.5, 0.0], 0.125, [False, True, True]),
        ([1.0], 0.01, [False]),
        ([1.0, 2.0], 0.01, [False, False]),
        ([0.0, 0.0], 0.01, [True, True]),
        ([], 0.01, []),
    ],
)
def test_token_mask_drops_the_largest_moments_until_the_mean_is_within_the_threshold(
    differences: list[float], threshold: float, keep: list[bool]
) -> None:
    assert token_mask(vector(*differences), zeros(len(differences)), threshold).tolist() == keep


@pytest.mark.parametrize(
    ("values", "mean", "level"),
    [
        ([1.0, 2.0, 9.0], 2.0, 3.0),  # 1 + 2 + 3 = 6 = 3 · 2
        ([9.0, 1.0, 2.0], 2.0, 3.0),
        ([1.0, 2.0, 9.0], 5 / 3, 2.0),  # 1 + 2 + 2 = 5: the level is a value
        ([1.0, 2.0, 9.0], 0.5, 0.5),  # all three are cut
        ([1.0, 2.0, 9.0], 1.0, 1.0),
        ([0.0, 0.0, 8.0], 1.0, 3.0),
        ([4.0, 4.0], 1.0, 1.0),
        ([5.0], 2.0, 2.0),
        ([1.0, 2.0, 9.0], 4.0, math.inf),  # the mean itself
        ([1.0, 2.0, 9.0], 5.0, math.inf),
        ([], 1.0, math.inf),
    ],
)
def test_at_the_water_level_the_cut_values_have_the_given_mean(
    values: list[float], mean: float, level: float
) -> None:
    assert water_level(vector(*values), mean) == pytest.approx(level)


def test_water_filled_bounds_keep_the_mean_of_the_cut_moments_at_the_threshold() -> None:
    # m over T = 0.09, 1.0, 4.0 (two tokens are not in T), θ = 0.53: 0.09 + 2 τ² = 1.59, τ² = 0.75.
    bounds = filled_of([0.3, -2.0, -1.0, 2.0, 2.0], [1.0, 1.0, -1.0, 1.0, -1.0], threshold=0.53)
    tau = math.sqrt(0.75)
    assert bounds.eps_low == pytest.approx(1.0 - math.exp(-tau))  # 0.579
    assert bounds.eps_high == pytest.approx(math.exp(tau) - 1.0)  # 1.377


def test_water_filled_bounds_never_fall_below_those_of_ordinary_clipping() -> None:
    # τ = 0.2 would be 0.181 and 0.221; τ = 0.4 is 0.330 and 0.492: only the upper one is raised.
    assert filled_of([1.0, 1.0], [1.0, -1.0], threshold=0.04) == ClipBounds(0.3, 0.5)
    bounds = filled_of([1.0, 1.0], [1.0, 1.0], threshold=0.16)
    assert (bounds.eps_low, bounds.eps_high) == (pytest.approx(1 - math.exp(-0.4)), 0.5)


def test_water_filled_bounds_clip_nothing_up_to_a_mean_equal_to_the_threshold() -> None:
    assert filled_of([0.5], [1.0], threshold=0.25) == ClipBounds(1.0, 99_999.0)
    assert filled_of([-2.0, 2.0, 3.0], [1.0, -1.0, 0.0], threshold=0.01) == ClipBounds(
        1.0, 99_999.0
    )
    assert filled_of([], [], threshold=0.01) == ClipBounds(1.0, 99_999.0)
    assert filled_of([0.5], [1.0], threshold=0.2499) == ClipBounds(
        pytest.approx(0.3934, abs=1e-3), pytest.approx(0.6484, abs=1e-3)
    )


def test_water_filled_bounds_of_a_huge_level_do_not_overflow() -> None:
    bounds = filled_of([2000.0], [1.0], threshold=1e6)  # τ = 1000
    assert (bounds.eps_low, bounds.eps_high) == (1.0, pytest.approx(99_999.0))


def test_no_gradient_flows_through_water_filled_bounds() -> None:
    logprobs = log_ratios(4.0, 1.2)
    bounds = water_filled_bounds(logprobs, zeros(2), vector(1.0, 1.0), threshold=0.04)
    clipped_ratio(logprobs, zeros(2), vector(1.0, 1.0), bounds).values_N.sum().backward()
    assert bounds == ClipBounds(0.3, 0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.2])


def prepared(loss: M2po, *moved: tuple[float, float]) -> Prepared:
    """The constants of tokens (log ratio, advantage)."""
    differences, advantages = zip(*moved, strict=True)
    return loss.prepare(vector(*differences), zeros(len(moved)), vector(*advantages))


def test_the_adaptive_clip_takes_its_threshold_from_the_recipe() -> None:
    # m = 0.25, 0.04 with mean 0.145. θ = 0.1: the rest after the first is within, τ = 0.2. θ =
    # 0.145: wide open.
    tokens = (0.5, 1.0), (0.2, 1.0)
    narrow = prepared(M2po(m2_threshold=0.1), *tokens)
    assert narrow.scalars == pytest.approx(
        {"clip_low": 1 - math.exp(-0.2), "clip_high": math.exp(0.2) - 1}
    )
    assert prepared(M2po(m2_threshold=0.2), *tokens).scalars == {
        "clip_low": 0.95,
        "clip_high": 20.0,
    }


def test_the_token_mask_takes_its_threshold_from_the_recipe() -> None:
    # m = 1, 0.25, 0.0625
    tokens = (1.0, 1.0), (-0.5, 1.0), (0.25, -1.0)
    kept = []
    for threshold in (0.05, 0.2, 0.5):
        constants = prepared(M2po(m2_form="token_mask", m2_threshold=threshold), *tokens)
        assert constants.scalars == {}
        kept.append(constants.per_token["keep"].tolist())
    assert kept == [[False, False, False], [False, True, True], [True, True, True]]


def test_the_water_filled_clip_takes_its_threshold_from_the_recipe_and_has_another_default() -> (
    None
):
    # m = 4, 1: mean(min(m, τ²)) = θ = 0.81 gives τ = 0.9.
    tokens = (2.0, 1.0), (-1.0, -1.0)
    scalars = prepared(M2po(m2_form="water_filled", m2_threshold=0.81), *tokens).scalars
    assert scalars == pytest.approx(
        {"clip_low": 1 - math.exp(-0.9), "clip_high": math.exp(0.9) - 1}
    )
    scalars = prepared(M2po(m2_form="water_filled"), *tokens).scalars  # τ = 0.2
    assert scalars == {"clip_low": 0.3, "clip_high": 0.5}


def test_the_default_threshold_depends_on_the_form() -> None:
    assert M2po().m2_threshold == 0.01
    assert M2po(m2_form="token_mask").m2_threshold == 0.01
    assert M2po(m2_form="water_filled").m2_threshold == 0.04
    assert M2po(m2_form="water_filled", m2_threshold=0.01).m2_threshold == 0.01
    with pytest.raises(ValidationError, match="'adaptive_clip', 'token_mask' or 'water_filled'"):
        M2po.model_validate({"m2_form": "half_full"})


@pytest.mark.parametrize("form", ["adaptive_clip", "water_filled"])
def test_bounds_are_applied_to_the_ratio(form: str) -> None:
    # ρ = 1.5 and 0.5 with A = 1 and −1: −min(1.5, 1.2) and −min(−0.5, −0.7)
    loss = M2po.model_validate({"m2_form": form})
    constants = Prepared(scalars={"clip_low": 0.3, "clip_high": 0.2})
    result = loss.token_losses(constants, log_ratios(1.5, 0.5), zeros(2), vector(1.0, -1.0))
    assert result.values_N.tolist() == pytest.approx([-1.2, 0.7])
    assert result.clipped_N.tolist() == [True, True]


def test_a_mask_drops_tokens_and_does_not_clip_others() -> None:
    constants = Prepared(per_token={"keep": torch.tensor([True, False])})
    loss = M2po(m2_form="token_mask")
    result = loss.token_losses(constants, log_ratios(1.5, 0.5), zeros(2), vector(1.0, -1.0))
    assert result.values_N.tolist() == pytest.approx([-1.5, 0.0])
    assert result.clipped_N.tolist() == [False, True]


@pytest.mark.parametrize("form", ["adaptive_clip", "token_mask", "water_filled"])
def test_dual_clip_limits_every_form(form: str) -> None:
    """One token with A < 0 and ρ = e²⁵ would dominate a step."""
    loss = M2po.model_validate({"m2_form": form})
    constants = Prepared({"clip_low": 0.2, "clip_high": 0.2}, {"keep": torch.tensor([True])})
    tokens = vector(25.0), vector(0.0), vector(-1.0)
    free = loss.token_losses(constants, *tokens)
    assert free.values_N.item() == pytest.approx(math.exp(25.0))
    assert free.clipped_N.tolist() == [False]
    limited = loss.model_copy(update={"dual_clip": 3.0}).token_losses(constants, *tokens)
    assert limited.values_N.item() == 3.0
    assert limited.clipped_N.tolist() == [True]


def test_m2po_requires_the_whole_minibatch() -> None:
    assert M2po.whole_minibatch
    loss = M2po()
    assert loss.make() is loss


def test_tensors_of_another_shape_are_refused() -> None:
    for bounds in (adaptive_bounds, water_filled_bounds):
        with pytest.raises(ValueError, match=r"float64 \[2\], torch.float64 \[3\]"):
            bounds(zeros(2), zeros(3), zeros(2), 0.01)
    with pytest.raises(ValueError, match=r"float64 \[2\], torch.float64 \[3\]"):
        token_mask(zeros(2), zeros(3), 0.01)
