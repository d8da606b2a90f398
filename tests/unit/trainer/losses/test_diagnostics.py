"""Distances between policies against values worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from trainer.losses.diagnostics import clippable, kl_k3, second_moments


def log_ratios(*ratios: float) -> Tensor:
    """Log-probabilities that require gradients and give these ratios against a behaviour of 0."""
    return torch.tensor(
        [math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True
    )


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64)


def test_only_tokens_that_moved_with_their_advantage_are_clippable() -> None:
    moved = clippable(
        vector(0.1, -0.1, 0.1, -0.1, 0.1, 0.0), zeros(6), vector(1.0, 1.0, -1.0, -1.0, 0.0, 1.0)
    )
    assert moved.tolist() == [True, False, False, True, False, False]


def test_moments_and_kl_k3_of_a_doubled_probability() -> None:
    assert second_moments(log_ratios(2.0), zeros(1)).item() == pytest.approx(
        0.4804530139
    )  # (ln 2)²
    assert kl_k3(log_ratios(2.0), zeros(1)).item() == pytest.approx(0.3068528194)  # 2 − 1 − ln 2
