"""What holds of the losses for any tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.losses import (
    ClipBounds,
    clippable,
    divergence,
    m2po_clip_bounds,
    m2po_keep,
    masked_ratio,
    ppo_clip,
    second_moments,
    sequence_mean_weights,
    token_mean_weights,
)

DIFFERENCES = st.floats(-8.0, 8.0, allow_nan=False)
ADVANTAGES = st.floats(-5.0, 5.0, allow_nan=False)
TOKENS = st.lists(st.tuples(DIFFERENCES, ADVANTAGES), min_size=1, max_size=40)
THRESHOLDS = st.sampled_from([0.004, 0.01, 0.04, 0.5])
LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=20)


def tensors(tokens: list[tuple[float, float]]) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities with gradient, behaviour, advantages)"""
    differences, advantages = zip(*tokens, strict=True)
    logprobs = torch.tensor(differences, dtype=torch.float64, requires_grad=True)
    return logprobs, torch.zeros(len(tokens), dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)


def gradient(value: Tensor, logprobs: Tensor) -> Tensor:
    return torch.autograd.grad(value, logprobs)[0]


@given(TOKENS, THRESHOLDS)
def test_what_the_token_mask_keeps_satisfies_the_constraint(tokens: list[tuple[float, float]], threshold: float) -> None:
    logprobs, behaviour, _ = tensors(tokens)
    keep = m2po_keep(logprobs, behaviour, threshold)
    moments = second_moments(logprobs, behaviour)
    if keep.any():
        assert moments[keep].mean().item() <= threshold * (1 + 1e-12)
    if keep.any() and not keep.all():
        assert moments[~keep].min() >= moments[keep].max()


@given(TOKENS, THRESHOLDS)
def test_the_token_mask_drops_no_more_than_it_must(tokens: list[tuple[float, float]], threshold: float) -> None:
    logprobs, behaviour, _ = tensors(tokens)
    keep = m2po_keep(logprobs, behaviour, threshold)
    moments = second_moments(logprobs, behaviour)
    if not keep.all():
        with_smallest_dropped = torch.cat([moments[keep], moments[~keep].min()[None]])
        assert with_smallest_dropped.mean().item() > threshold * (1 - 1e-12)


@given(TOKENS, THRESHOLDS)
def test_dropped_tokens_have_no_gradient_and_kept_ones_that_of_their_ratio(
    tokens: list[tuple[float, float]], threshold: float
) -> None:
    logprobs, behaviour, advantages = tensors(tokens)
    keep = m2po_keep(logprobs, behaviour, threshold)
    slope = gradient(masked_ratio(logprobs, behaviour, advantages, keep).values_N.sum(), logprobs)
    expected = torch.where(keep, -logprobs.detach().exp() * advantages, 0.0)
    assert torch.allclose(slope, expected)


@given(TOKENS, THRESHOLDS, st.randoms())
def test_bounds_do_not_depend_on_the_order_of_tokens(
    tokens: list[tuple[float, float]], threshold: float, random: object
) -> None:
    shuffled = list(tokens)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    first, second = (m2po_clip_bounds(*tensors(each), threshold) for each in (tokens, shuffled))
    # Moments that are equal up to rounding may change places, and with them nothing but rounding.
    assert first.eps_low == pytest.approx(second.eps_low, abs=1e-9)
    assert first.eps_high == pytest.approx(second.eps_high, abs=1e-9)


@given(TOKENS, THRESHOLDS)
def test_bounds_keep_within_their_caps(tokens: list[tuple[float, float]], threshold: float) -> None:
    bounds = m2po_clip_bounds(*tensors(tokens), threshold)
    assert 0.0 <= bounds.eps_low <= 0.95
    assert 0.0 <= bounds.eps_high <= 20.0


@given(TOKENS, st.floats(0.0, 0.9), st.floats(0.0, 5.0))
def test_a_silenced_token_is_clippable_and_has_no_gradient(
    tokens: list[tuple[float, float]], eps_low: float, eps_high: float
) -> None:
    logprobs, behaviour, advantages = tensors(tokens)
    loss = ppo_clip(logprobs, behaviour, advantages, ClipBounds(eps_low, eps_high))
    slope = gradient(loss.values_N.sum(), logprobs)
    assert (slope[loss.silenced_N] == 0).all()
    assert clippable(logprobs, behaviour, advantages)[loss.silenced_N].all()


@given(TOKENS)
def test_wide_bounds_leave_the_plain_policy_gradient(tokens: list[tuple[float, float]]) -> None:
    logprobs, behaviour, advantages = tensors(tokens)
    slope = gradient(ppo_clip(logprobs, behaviour, advantages, ClipBounds(1.0, 1e9)).values_N.sum(), logprobs)
    assert torch.allclose(slope, -logprobs.detach().exp() * advantages)


@given(TOKENS)
def test_divergence_is_never_negative(tokens: list[tuple[float, float]]) -> None:
    logprobs, behaviour, _ = tensors(tokens)
    assert (divergence(logprobs, behaviour) >= 0).all()


@given(LENGTHS)
def test_weights_of_all_tokens_sum_to_one(lengths: list[int]) -> None:
    lengths_tensor = torch.tensor(lengths)
    for weights in (token_mean_weights(lengths_tensor), sequence_mean_weights(lengths_tensor)):
        total = float((weights.double() * lengths_tensor).sum())
        assert math.isclose(total, 1.0 if sum(lengths) else 0.0, abs_tol=1e-5)
