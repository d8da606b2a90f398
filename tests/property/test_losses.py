"""Properties of the losses for any tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.losses.aggregation import sequence_mean, token_mean
from trainer.losses.diagnostics import clippable, kl_k3, second_moments
from trainer.losses.m2po import adaptive_bounds, token_mask, water_filled_bounds, water_level
from trainer.losses.surrogates import ClipBounds, clipped_ratio, masked_ratio

DIFFERENCES = st.floats(-8.0, 8.0, allow_nan=False)
ADVANTAGES = st.floats(-5.0, 5.0, allow_nan=False)
TOKENS = st.lists(st.tuples(DIFFERENCES, ADVANTAGES), min_size=1, max_size=40)
THRESHOLDS = st.sampled_from([0.004, 0.01, 0.04, 0.5])
LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=20)


def tensors(tokens: list[tuple[float, float]]) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities with gradient, behaviour, advantages)"""
    differences, advantages = zip(*tokens, strict=True)
    logprobs = torch.tensor(differences, dtype=torch.float64, requires_grad=True)
    return (
        logprobs,
        torch.zeros(len(tokens), dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
    )


def gradient(value: Tensor, logprobs: Tensor) -> Tensor:
    return torch.autograd.grad(value, logprobs)[0]


@settings(deadline=None)
@given(TOKENS, THRESHOLDS)
def test_tokens_kept_by_the_token_mask_satisfy_the_constraint(
    tokens: list[tuple[float, float]], threshold: float
) -> None:
    logprobs, behaviour, _ = tensors(tokens)
    keep = token_mask(logprobs, behaviour, threshold)
    moments = second_moments(logprobs, behaviour)
    if keep.any():
        assert moments[keep].mean().item() <= threshold * (1 + 1e-12)
    if keep.any() and not keep.all():
        assert moments[~keep].min() >= moments[keep].max()


@settings(deadline=None)
@given(TOKENS, THRESHOLDS)
def test_the_token_mask_drops_the_minimum_number_of_tokens(
    tokens: list[tuple[float, float]], threshold: float
) -> None:
    logprobs, behaviour, _ = tensors(tokens)
    keep = token_mask(logprobs, behaviour, threshold)
    moments = second_moments(logprobs, behaviour)
    if not keep.all():
        with_smallest_dropped = torch.cat([moments[keep], moments[~keep].min()[None]])
        assert with_smallest_dropped.mean().item() > threshold * (1 - 1e-12)


@settings(deadline=None)
@given(TOKENS, THRESHOLDS)
def test_dropped_tokens_have_zero_gradient_and_kept_ones_that_of_their_ratio(
    tokens: list[tuple[float, float]], threshold: float
) -> None:
    logprobs, behaviour, advantages = tensors(tokens)
    keep = token_mask(logprobs, behaviour, threshold)
    slope = gradient(masked_ratio(logprobs, behaviour, advantages, keep).values_N.sum(), logprobs)
    expected = torch.where(keep, -logprobs.detach().exp() * advantages, 0.0)
    assert torch.allclose(slope, expected)


@settings(deadline=None)
@given(TOKENS, THRESHOLDS, st.randoms())
def test_bounds_do_not_depend_on_the_order_of_tokens(
    tokens: list[tuple[float, float]], threshold: float, random: object
) -> None:
    shuffled = list(tokens)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    first, second = (adaptive_bounds(*tensors(each), threshold) for each in (tokens, shuffled))
    # Moments that are equal up to rounding can change places, which changes results by rounding only.
    assert first.eps_low == pytest.approx(second.eps_low, abs=1e-9)
    assert first.eps_high == pytest.approx(second.eps_high, abs=1e-9)


@settings(deadline=None)
@given(TOKENS, THRESHOLDS)
def test_bounds_stay_within_their_caps(tokens: list[tuple[float, float]], threshold: float) -> None:
    bounds = adaptive_bounds(*tensors(tokens), threshold)
    assert 0.0 <= bounds.eps_low <= 0.95
    assert 0.0 <= bounds.eps_high <= 20.0


@settings(deadline=None)
@given(TOKENS, st.floats(0.0, 0.9), st.floats(0.0, 5.0))
def test_a_clipped_token_is_clippable_and_has_no_gradient(
    tokens: list[tuple[float, float]], eps_low: float, eps_high: float
) -> None:
    logprobs, behaviour, advantages = tensors(tokens)
    loss = clipped_ratio(logprobs, behaviour, advantages, ClipBounds(eps_low, eps_high))
    slope = gradient(loss.values_N.sum(), logprobs)
    assert (slope[loss.clipped_N] == 0).all()
    assert clippable(logprobs, behaviour, advantages)[loss.clipped_N].all()


@settings(deadline=None)
@given(TOKENS)
def test_wide_bounds_give_the_plain_policy_gradient(tokens: list[tuple[float, float]]) -> None:
    logprobs, behaviour, advantages = tensors(tokens)
    slope = gradient(
        clipped_ratio(logprobs, behaviour, advantages, ClipBounds(1.0, 1e9)).values_N.sum(),
        logprobs,
    )
    assert torch.allclose(slope, -logprobs.detach().exp() * advantages)


@settings(deadline=None)
@given(TOKENS)
def test_kl_k3_is_never_negative(tokens: list[tuple[float, float]]) -> None:
    logprobs, behaviour, _ = tensors(tokens)
    assert (kl_k3(logprobs, behaviour) >= 0).all()


@settings(deadline=None)
@given(LENGTHS)
def test_weights_of_all_tokens_sum_to_one(lengths: list[int]) -> None:
    lengths_B = np.array(lengths, dtype=np.int64)
    for weights_B in (token_mean(lengths_B), sequence_mean(lengths_B)):
        total = float((weights_B.astype(np.float64) * lengths_B).sum())
        assert math.isclose(total, 1.0 if sum(lengths) else 0.0, abs_tol=1e-5)


VALUES = st.lists(st.floats(0.0, 64.0, allow_nan=False), min_size=1, max_size=40)
MEANS = st.floats(1e-4, 10.0)


@settings(deadline=None)
@given(VALUES, MEANS)
def test_cutting_values_at_the_water_level_gives_the_mean(values: list[float], mean: float) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    level = water_level(tensor, mean)
    if tensor.mean().item() <= mean:
        assert level == math.inf
    else:
        assert tensor.clamp(max=level).mean().item() == pytest.approx(mean, rel=1e-9)


@settings(deadline=None)
@given(VALUES, MEANS, st.floats(1.0, 4.0))
def test_the_water_level_rises_with_the_mean_and_falls_when_the_values_rise(
    values: list[float], mean: float, factor: float
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    level = water_level(tensor, mean)
    assert water_level(tensor, mean * factor) >= level * (1 - 1e-9)
    assert water_level(tensor * factor, mean) <= level * (1 + 1e-9)


@settings(deadline=None)
@given(TOKENS, THRESHOLDS)
def test_water_filled_bounds_stay_within_their_limits_and_widen_with_the_threshold(
    tokens: list[tuple[float, float]], threshold: float
) -> None:
    bounds, wider = (
        water_filled_bounds(*tensors(tokens), each) for each in (threshold, 2 * threshold)
    )
    assert 0.3 <= bounds.eps_low <= wider.eps_low * (1 + 1e-12) <= 1.0 + 1e-9
    assert 0.5 <= bounds.eps_high <= wider.eps_high * (1 + 1e-12) <= 99_999.0 + 1e-3


@settings(deadline=None)
@given(TOKENS, THRESHOLDS)
def test_water_filled_bounds_hold_the_second_moment_of_the_clipped_ratios(
    tokens: list[tuple[float, float]], threshold: float
) -> None:
    """The purpose of the form: the mean of (log ρ)² of the clipped ratios over T is at most θ, up
    to the minima of ε.
    """
    logprobs, behaviour, advantages = tensors(tokens)
    bounds = water_filled_bounds(logprobs, behaviour, advantages, threshold)
    in_t = clippable(logprobs, behaviour, advantages)
    raised = bounds.eps_low == 0.3 or bounds.eps_high == 0.5
    if in_t.any() and not raised:
        ratios = logprobs.detach()[in_t].exp().clamp(1 - bounds.eps_low, 1 + bounds.eps_high)
        assert ratios.log().square().mean().item() <= threshold * (1 + 1e-6)


@settings(deadline=None)
@given(TOKENS, st.floats(1.01, 10.0))
def test_a_dual_clip_limits_the_loss_of_every_token(
    tokens: list[tuple[float, float]], dual_clip: float
) -> None:
    logprobs, behaviour, advantages = tensors(tokens)
    everything = torch.ones(len(tokens), dtype=torch.bool)
    for loss in (
        clipped_ratio(logprobs, behaviour, advantages, ClipBounds(0.2, 0.2), dual_clip),
        masked_ratio(logprobs, behaviour, advantages, everything, dual_clip),
    ):
        limit = torch.where(advantages < 0, -dual_clip * advantages, math.inf)
        assert (loss.values_N <= limit * (1 + 1e-12)).all()
