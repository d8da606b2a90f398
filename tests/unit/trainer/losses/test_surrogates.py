"""Surrogate objectives against values worked out by hand. Behaviour log-probabilities are 0, so a
log-probability is the log ratio.
"""

import math

import pytest
import torch
from torch import Tensor

from trainer.losses.surrogates import ClipBounds, clipped_ratio, masked_ratio

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
def test_the_clipped_loss_is_the_larger_of_the_clipped_and_unclipped_one(
    ratio: float, advantage: float, value: float, slope: float, silenced: bool
) -> None:
    logprobs = log_ratios(ratio)
    loss = clipped_ratio(logprobs, zeros(1), vector(advantage), ClipBounds(0.2, 0.2))
    loss.values_N.sum().backward()
    assert loss.values_N.item() == pytest.approx(value)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope)
    assert loss.clipped_N.tolist() == [silenced]


def test_lower_and_upper_bounds_can_differ() -> None:
    loss = clipped_ratio(
        log_ratios(1.25, 1.5, 0.75), zeros(3), vector(1.0, 1.0, -1.0), ClipBounds(0.2, 0.28)
    )
    assert loss.values_N.tolist() == pytest.approx([-1.25, -1.28, 0.8])
    assert loss.clipped_N.tolist() == [False, True, True]


def test_dual_clip_limits_the_loss_of_negative_advantages_only() -> None:
    logprobs = log_ratios(5.0, 2.0, 5.0)
    loss = clipped_ratio(
        logprobs, zeros(3), vector(-1.0, -1.0, 1.0), ClipBounds(0.2, 0.2), dual_clip=3.0
    )
    loss.values_N.sum().backward()
    assert loss.values_N.tolist() == pytest.approx([3.0, 2.0, -1.2])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 2.0, 0.0])
    assert loss.clipped_N.tolist() == [True, False, True]


def test_dual_clip_applies_above_its_ratio_and_not_at_it() -> None:
    logprobs = vector(0.0, math.log(3.0) + 1e-6).requires_grad_()
    loss = clipped_ratio(
        logprobs,
        vector(-math.log(2.0), 0.0),
        vector(-1.0, -1.0),
        ClipBounds(0.2, 0.2),
        dual_clip=2.0,
    )
    assert loss.clipped_N.tolist() == [False, True]
    assert loss.values_N.tolist() == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("difference", [25.0, 100.0, 1000.0])
def test_a_ratio_of_any_size_is_limited_in_its_loss_and_gradient(difference: float) -> None:
    """e^100 overflows float32 and e^1000 float64: the gradient of a limited token must not be 0 ·
    inf.
    """
    logprobs = torch.tensor([difference, 0.0], requires_grad=True)
    nothing = torch.zeros(2)
    bad = clipped_ratio(
        logprobs, nothing, torch.tensor([-2.0, -1.0]), ClipBounds(0.2, 0.2), dual_clip=3.0
    )
    kept = masked_ratio(
        logprobs, nothing, torch.tensor([-2.0, -1.0]), torch.tensor([True, True]), dual_clip=3.0
    )
    good = clipped_ratio(logprobs, nothing, torch.tensor([2.0, -1.0]), ClipBounds(0.2, 0.2))
    for loss, value in ((bad, 6.0), (kept, 6.0), (good, -2.4)):
        (slope,) = torch.autograd.grad(loss.values_N.sum(), logprobs)
        assert loss.values_N.tolist() == pytest.approx([value, 1.0])
        assert slope.tolist() == [0.0, 1.0]
        assert loss.clipped_N.tolist() == [True, False]


def test_the_clipped_ratio_of_no_tokens_is_empty() -> None:
    loss = clipped_ratio(zeros(0), zeros(0), zeros(0), ClipBounds(0.2, 0.2))
    assert loss.values_N.tolist() == []
    assert loss.clipped_N.tolist() == []


def test_masked_ratio_has_no_bound_on_kept_tokens_and_no_gradient_on_dropped_ones() -> None:
    logprobs = log_ratios(30.0, 2.0)
    loss = masked_ratio(logprobs, zeros(2), vector(1.0, 0.5), torch.tensor([False, True]))
    loss.values_N.sum().backward()
    assert loss.values_N.tolist() == pytest.approx([0.0, -1.0])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.0])
    assert loss.clipped_N.tolist() == [True, False]


def test_a_dropped_token_with_an_infinite_ratio_has_no_effect() -> None:
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
    assert loss.clipped_N.tolist() == [True, False, False, True]


def test_tensors_of_another_rank_shape_or_dtype_are_refused_and_named() -> None:
    bounds = ClipBounds(0.2, 0.2)
    with pytest.raises(ValueError, match=r"float64 \[1, 1\]"):
        clipped_ratio(zeros(1)[None], zeros(1)[None], zeros(1)[None], bounds)
    with pytest.raises(ValueError, match=r"float64 \[2\], torch.float64 \[3\]"):
        clipped_ratio(zeros(2), zeros(3), zeros(2), bounds)
    with pytest.raises(ValueError, match="bfloat16"):
        clipped_ratio(zeros(2).bfloat16(), zeros(2), zeros(2), bounds)
    with pytest.raises(ValueError, match="float16"):
        masked_ratio(zeros(2), zeros(2).half(), zeros(2), torch.tensor([True, True]))
    with pytest.raises(ValueError, match=r"keep_N must be bool \[2\], found torch.float64"):
        masked_ratio(zeros(2), zeros(2), zeros(2), zeros(2))


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_token_without_an_advantage_adds_nothing_for_any_ratio(
    dual_clip: float | None,
) -> None:
    logprobs_N = torch.tensor([0.0], requires_grad=True)
    behaviour_N, advantages_N = torch.tensor([-300.0]), torch.tensor([0.0])
    for loss in (
        clipped_ratio(logprobs_N, behaviour_N, advantages_N, WIDE_OPEN, dual_clip),
        masked_ratio(logprobs_N, behaviour_N, advantages_N, torch.tensor([True]), dual_clip),
    ):
        (gradient,) = torch.autograd.grad(loss.values_N.sum(), logprobs_N)
        assert (loss.values_N.tolist(), gradient.tolist(), loss.clipped_N.tolist()) == (
            [0.0],
            [0.0],
            [False],
        )
