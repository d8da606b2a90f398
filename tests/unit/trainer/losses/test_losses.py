"""Losses against values worked out by hand. Behaviour log-probabilities are 0, so a log-probability is the log ratio."""

import math

import pytest
import torch
from torch import Tensor

from trainer.losses.losses import (
    ClipBounds,
    clippable,
    constant_weights,
    divergence,
    m2po_clip_bounds,
    m2po_filled_bounds,
    m2po_keep,
    masked_ratio,
    ppo_clip,
    second_moments,
    sequence_mean_weights,
    token_mean_weights,
    water_level,
)

WIDE_OPEN = ClipBounds(0.95, 20.0)


def log_ratios(*ratios: float) -> Tensor:
    """Log-probabilities that require gradients and give these ratios against a behaviour of 0."""
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64)


def bounds_of(differences: list[float], advantages: list[float], threshold: float) -> ClipBounds:
    return m2po_clip_bounds(vector(*differences), zeros(len(differences)), vector(*advantages), threshold)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "silenced"),
    [
        (1.5, 1.0, -1.2, 0.0, True),
        (1.5, -1.0, 1.5, 1.5, False),
        (0.5, 1.0, -0.5, -0.5, False),
        (0.5, -1.0, 0.8, 0.0, True),
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, -2.0, 2.2, 2.2, False),
        (3.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_ppo_clip_takes_the_worse_of_the_free_and_the_clipped_ratio(
    ratio: float, advantage: float, value: float, slope: float, silenced: bool
) -> None:
    logprobs = log_ratios(ratio)
    loss = ppo_clip(logprobs, zeros(1), vector(advantage), ClipBounds(0.2, 0.2))
    loss.values_N.sum().backward()
    assert loss.values_N.item() == pytest.approx(value)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope)
    assert loss.silenced_N.tolist() == [silenced]


def test_ppo_clip_bounds_may_differ_below_and_above() -> None:
    loss = ppo_clip(log_ratios(1.25, 1.5, 0.75), zeros(3), vector(1.0, 1.0, -1.0), ClipBounds(0.2, 0.28))
    assert loss.values_N.tolist() == pytest.approx([-1.25, -1.28, 0.8])
    assert loss.silenced_N.tolist() == [False, True, True]


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    logprobs = log_ratios(5.0, 2.0, 5.0)
    loss = ppo_clip(logprobs, zeros(3), vector(-1.0, -1.0, 1.0), ClipBounds(0.2, 0.2), dual_clip=3.0)
    loss.values_N.sum().backward()
    assert loss.values_N.tolist() == pytest.approx([3.0, 2.0, -1.2])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert loss.silenced_N.tolist() == [True, False, True]


def test_dual_clip_begins_above_its_ratio_and_not_at_it() -> None:
    logprobs = vector(0.0, math.log(3.0) + 1e-6).requires_grad_()
    loss = ppo_clip(logprobs, vector(-math.log(2.0), 0.0), vector(-1.0, -1.0), ClipBounds(0.2, 0.2), dual_clip=2.0)
    assert loss.silenced_N.tolist() == [False, True]
    assert loss.values_N.tolist() == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("difference", [25.0, 100.0, 1000.0])
def test_a_ratio_of_any_size_is_limited_in_its_loss_and_gradient(difference: float) -> None:
    """e^100 overflows float32 and e^1000 float64: the gradient of what is limited must not be 0 · inf."""
    logprobs = torch.tensor([difference, 0.0], requires_grad=True)
    nothing = torch.zeros(2)
    bad = ppo_clip(logprobs, nothing, torch.tensor([-2.0, -1.0]), ClipBounds(0.2, 0.2), dual_clip=3.0)
    kept = masked_ratio(logprobs, nothing, torch.tensor([-2.0, -1.0]), torch.tensor([True, True]), dual_clip=3.0)
    good = ppo_clip(logprobs, nothing, torch.tensor([2.0, -1.0]), ClipBounds(0.2, 0.2))
    for loss, value in ((bad, 6.0), (kept, 6.0), (good, -2.4)):
        (slope,) = torch.autograd.grad(loss.values_N.sum(), logprobs)
        assert loss.values_N.tolist() == pytest.approx([value, 1.0])
        assert slope.tolist() == [0.0, 1.0]
        assert loss.silenced_N.tolist() == [True, False]


def test_ppo_clip_of_no_tokens_is_empty() -> None:
    loss = ppo_clip(zeros(0), zeros(0), zeros(0), ClipBounds(0.2, 0.2))
    assert loss.values_N.tolist() == []
    assert loss.silenced_N.tolist() == []


def test_only_tokens_that_moved_with_their_advantage_are_clippable() -> None:
    moved = clippable(vector(0.1, -0.1, 0.1, -0.1, 0.1, 0.0), zeros(6), vector(1.0, 1.0, -1.0, -1.0, 0.0, 1.0))
    assert moved.tolist() == [True, False, False, True, False, False]


def test_adaptive_bounds_are_wide_open_when_no_token_is_clippable() -> None:
    assert bounds_of([-2.0, 2.0, 3.0], [1.0, -1.0, 0.0], threshold=0.01) == WIDE_OPEN


def test_adaptive_bounds_are_wide_open_for_no_tokens_at_all() -> None:
    assert bounds_of([], [], threshold=0.01) == WIDE_OPEN


def test_adaptive_bounds_are_wide_open_up_to_a_mean_equal_to_the_threshold() -> None:
    assert bounds_of([0.5], [1.0], threshold=0.25) == WIDE_OPEN
    assert bounds_of([0.5], [1.0], threshold=0.2499) != WIDE_OPEN


def test_adaptive_bounds_come_from_the_largest_moment_that_is_left() -> None:
    # m = 0.09, 0.01, 0.0025 over T (two tokens are not in T); the rest after the first has mean 0.00625 < 0.01: τ = 0.1.
    bounds = bounds_of([0.1, -2.0, -0.3, 0.05, 2.0], [1.0, 1.0, -1.0, 1.0, -1.0], threshold=0.01)
    assert bounds.eps_low == pytest.approx(0.0951625820)
    assert bounds.eps_high == pytest.approx(0.1051709181)


def test_adaptive_bounds_need_a_mean_strictly_below_the_threshold() -> None:
    # m = 1, 0.25, 0.0625: the rest from index 1 has mean 0.15625, which is not below θ = 0.15625, so k = 2 and τ = 0.25.
    bounds = bounds_of([1.0, 0.5, 0.25], [1.0, 1.0, 1.0], threshold=0.15625)
    assert bounds.eps_low == pytest.approx(1.0 - math.exp(-0.25))
    assert bounds.eps_high == pytest.approx(math.exp(0.25) - 1.0)


def test_adaptive_bounds_fall_back_to_the_smallest_moment() -> None:
    # m = 0.25, 0.04: no rest has a mean below 0.01, so k is the last index and τ = 0.2.
    bounds = bounds_of([0.5, 0.2], [1.0, 1.0], threshold=0.01)
    assert bounds.eps_low == pytest.approx(0.1812692469)
    assert bounds.eps_high == pytest.approx(0.2214027582)


def test_adaptive_bounds_of_a_single_token_are_its_own_ratio() -> None:
    bounds = bounds_of([1.0], [1.0], threshold=0.01)
    assert bounds.eps_low == pytest.approx(0.6321205588)
    assert bounds.eps_high == pytest.approx(1.7182818285)


@pytest.mark.parametrize(
    ("difference", "eps_low", "eps_high"),
    [(2.9, 0.9449767799, 17.1741453694), (3.0, 0.95, 19.0855369232), (4.0, 0.95, 20.0), (1000.0, 0.95, 20.0)],
)
def test_adaptive_bounds_are_capped(difference: float, eps_low: float, eps_high: float) -> None:
    bounds = bounds_of([difference], [1.0], threshold=0.01)
    assert (bounds.eps_low, bounds.eps_high) == (pytest.approx(eps_low), pytest.approx(eps_high))


def test_no_gradient_flows_through_adaptive_bounds() -> None:
    logprobs = log_ratios(2.0, 1.01)
    bounds = m2po_clip_bounds(logprobs, zeros(2), vector(1.0, 1.0), threshold=0.01)
    ppo_clip(logprobs, zeros(2), vector(1.0, 1.0), bounds).values_N.sum().backward()
    assert bounds.eps_high == pytest.approx(0.01)
    assert logprobs.grad is not None
    # 2.0 lies above the bound and is silenced. 1.01 lies on it: half its slope is free, half is clamped, which is all of it.
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
def test_token_mask_drops_the_largest_moments_until_the_mean_holds(
    differences: list[float], threshold: float, keep: list[bool]
) -> None:
    assert m2po_keep(vector(*differences), zeros(len(differences)), threshold).tolist() == keep


def test_masked_ratio_is_free_where_kept_and_silent_where_dropped() -> None:
    logprobs = log_ratios(30.0, 2.0)
    loss = masked_ratio(logprobs, zeros(2), vector(1.0, 0.5), torch.tensor([False, True]))
    loss.values_N.sum().backward()
    assert loss.values_N.tolist() == pytest.approx([0.0, -1.0])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.0])
    assert loss.silenced_N.tolist() == [True, False]


def test_a_dropped_token_with_an_infinite_ratio_leaves_no_trace() -> None:
    logprobs = torch.tensor([1000.0, 0.0], dtype=torch.float64, requires_grad=True)
    loss = masked_ratio(logprobs, zeros(2), vector(1.0, 1.0), torch.tensor([False, True]))
    loss.values_N.sum().backward()
    assert loss.values_N.tolist() == [0.0, -1.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -1.0]


def test_dual_clip_limits_kept_tokens_with_a_negative_advantage_only() -> None:
    logprobs = log_ratios(5.0, 2.0, 5.0, 5.0)
    keep = torch.tensor([True, True, True, False])
    loss = masked_ratio(logprobs, zeros(4), vector(-1.0, -1.0, 1.0, -1.0), keep, dual_clip=3.0)
    loss.values_N.sum().backward()
    assert loss.values_N.tolist() == pytest.approx([3.0, 2.0, -5.0, 0.0])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, -5.0, 0.0])
    assert loss.silenced_N.tolist() == [True, False, False, True]


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
def test_the_water_level_is_where_the_mean_of_the_cut_values_is_the_given_one(
    values: list[float], mean: float, level: float
) -> None:
    assert water_level(vector(*values), mean) == pytest.approx(level)


def filled_of(differences: list[float], advantages: list[float], threshold: float) -> ClipBounds:
    return m2po_filled_bounds(vector(*differences), zeros(len(differences)), vector(*advantages), threshold)


def test_water_filled_bounds_hold_the_mean_of_the_cut_moments_at_the_threshold() -> None:
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
    assert filled_of([-2.0, 2.0, 3.0], [1.0, -1.0, 0.0], threshold=0.01) == ClipBounds(1.0, 99_999.0)
    assert filled_of([], [], threshold=0.01) == ClipBounds(1.0, 99_999.0)
    assert filled_of([0.5], [1.0], threshold=0.2499) == ClipBounds(
        pytest.approx(0.3934, abs=1e-3), pytest.approx(0.6484, abs=1e-3)
    )


def test_water_filled_bounds_of_a_huge_level_do_not_overflow() -> None:
    bounds = filled_of([2000.0], [1.0], threshold=1e6)  # τ = 1000
    assert (bounds.eps_low, bounds.eps_high) == (1.0, pytest.approx(99_999.0))


def test_no_gradient_flows_through_water_filled_bounds() -> None:
    logprobs = log_ratios(4.0, 1.2)
    bounds = m2po_filled_bounds(logprobs, zeros(2), vector(1.0, 1.0), threshold=0.04)
    ppo_clip(logprobs, zeros(2), vector(1.0, 1.0), bounds).values_N.sum().backward()
    assert bounds == ClipBounds(0.3, 0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.2])


def test_moments_and_divergence_of_a_doubled_probability() -> None:
    assert second_moments(log_ratios(2.0), zeros(1)).item() == pytest.approx(0.4804530139)  # (ln 2)²
    assert divergence(log_ratios(2.0), zeros(1)).item() == pytest.approx(0.3068528194)  # 2 − 1 − ln 2


def test_token_mean_counts_every_token_alike() -> None:
    assert token_mean_weights(torch.tensor([3, 0, 1])).tolist() == [0.25, 0.0, 0.25]


def test_sequence_mean_counts_every_sequence_with_tokens_alike() -> None:
    assert sequence_mean_weights(torch.tensor([4, 0, 1])).tolist() == [0.125, 0.0, 0.5]


def test_constant_weights_do_not_depend_on_the_length() -> None:
    assert constant_weights(torch.tensor([4, 0, 1]), constant_length=8).tolist() == [0.0625, 0.0, 0.0625]


def test_a_batch_without_loss_tokens_weighs_nothing() -> None:
    nothing = torch.tensor([0, 0])
    assert token_mean_weights(nothing).tolist() == [0.0, 0.0]
    assert sequence_mean_weights(nothing).tolist() == [0.0, 0.0]
    assert constant_weights(nothing, 8).tolist() == [0.0, 0.0]


def test_tensors_of_another_rank_shape_or_dtype_are_refused_with_what_was_found() -> None:
    bounds = ClipBounds(0.2, 0.2)
    with pytest.raises(ValueError, match=r"float64 \[1, 1\]"):
        ppo_clip(zeros(1)[None], zeros(1)[None], zeros(1)[None], bounds)
    with pytest.raises(ValueError, match=r"float64 \[2\], torch.float64 \[3\]"):
        ppo_clip(zeros(2), zeros(3), zeros(2), bounds)
    with pytest.raises(ValueError, match="bfloat16"):
        m2po_keep(zeros(2).bfloat16(), zeros(2), 0.01)
    with pytest.raises(ValueError, match=r"keep_N must be bool \[2\], found torch.float64"):
        masked_ratio(zeros(2), zeros(2), zeros(2), zeros(2))
    with pytest.raises(ValueError, match=r"int64 lengths \[B\], found torch.float64"):
        token_mean_weights(zeros(2))


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_token_without_an_advantage_adds_nothing_however_large_its_ratio(dual_clip: float | None) -> None:
    logprobs_N = torch.tensor([0.0], requires_grad=True)
    behaviour_N, advantages_N = torch.tensor([-300.0]), torch.tensor([0.0])
    for loss in (
        ppo_clip(logprobs_N, behaviour_N, advantages_N, WIDE_OPEN, dual_clip),
        masked_ratio(logprobs_N, behaviour_N, advantages_N, torch.tensor([True]), dual_clip),
    ):
        (gradient,) = torch.autograd.grad(loss.values_N.sum(), logprobs_N)
        assert (loss.values_N.tolist(), gradient.tolist(), loss.silenced_N.tolist()) == ([0.0], [0.0], [False])
