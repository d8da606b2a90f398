"""Distances from a reference, against values worked out by hand."""

import math

import pytest
import torch

from trainer.config import TrainConfig
from trainer.losses.reference_kl import K3_MAX, ReferenceKl

LOG2 = math.log(2)
LOGPROBS = [math.log(0.5), math.log(0.25), math.log(0.25)]
REFERENCE = [math.log(0.25), math.log(0.5), math.log(0.25)]
"""d = −log 2, log 2, 0; the ratio of the reference to the policy is ½, 2, 1."""


def kl(estimator: str) -> ReferenceKl:
    return ReferenceKl.model_validate({"estimator": estimator})


def test_a_recipe_that_names_nothing_of_a_reference_has_the_base_model_and_published_values() -> (
    None
):
    assert TrainConfig().reference is None
    named = TrainConfig.model_validate({"reference": {}}).reference
    assert named == ReferenceKl(version=0, coefficient=0.001, estimator="k3")


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [LOG2, -LOG2, 0.0], [1.0, 1.0, 1.0]),
        ("k2", [LOG2**2 / 2, LOG2**2 / 2, 0.0], [LOG2, -LOG2, 0.0]),
        ("k3", [0.5 - 1 + LOG2, 2 - 1 - LOG2, 0.0], [0.5, -1.0, 0.0]),
    ],
)
def test_an_estimate_and_its_slope_are_those_of_the_formula(
    estimator: str, values: list[float], slopes: list[float]
) -> None:
    logprobs_N = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    reference_N = torch.tensor(REFERENCE, dtype=torch.float64, requires_grad=True)
    estimates_N = kl(estimator).estimates(logprobs_N, reference_N)
    assert estimates_N.dtype == torch.float64
    assert estimates_N.tolist() == pytest.approx(values, abs=1e-12)
    estimates_N.sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx(slopes, abs=1e-12)
    assert reference_N.grad is None, "the reference is not trained"


def test_k3_of_float32_keeps_the_digits_of_a_small_distance() -> None:
    """The second value: the float32 number next to −1."""
    logprobs_N = torch.tensor([-1.0, -1.0], requires_grad=True)
    reference_N = torch.tensor([-1.0001, -1.0 + 2**-24])
    estimates_N = kl("k3").estimates(logprobs_N, reference_N)
    d = [float(reference) + 1.0 for reference in reference_N]
    assert estimates_N.tolist() == pytest.approx([each**2 / 2 for each in d], rel=1e-3)
    estimates_N.sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx([-each for each in d], rel=1e-3)


@pytest.mark.parametrize("d", [2.7, 25.0, 800.0, -11.5, -800.0])
def test_k3_of_a_token_beyond_its_limit_is_the_limit_without_a_slope(d: float) -> None:
    logprobs_N = torch.tensor([-1000.0], requires_grad=True)
    estimates_N = kl("k3").estimates(logprobs_N, logprobs_N.detach() + d)
    assert estimates_N.tolist() == [K3_MAX] == [10.0]
    estimates_N.sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == [0.0]


@pytest.mark.parametrize("d", [2.6, -10.9])
def test_k3_of_a_token_within_its_limit_has_a_slope(d: float) -> None:
    logprobs_N = torch.tensor([-20.0], dtype=torch.float64, requires_grad=True)
    estimates_N = kl("k3").estimates(logprobs_N, logprobs_N.detach() + d)
    assert estimates_N.item() == pytest.approx(math.exp(d) - 1 - d)
    estimates_N.sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.item() == pytest.approx(1 - math.exp(d))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_tensors_of_other_shapes_are_refused(estimator: str) -> None:
    with pytest.raises(ValueError, match="of one shape"):
        kl(estimator).estimates(torch.zeros(3), torch.zeros(1))
