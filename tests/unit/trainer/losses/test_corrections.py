"""Weights of corrections against values worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from storage.errors import ConfigError
from trainer.losses.corrections import (
    CORRECTIONS,
    LOG_RATIO_MAX,
    CustomCorrection,
    IcePop,
    NoCorrection,
    Rejection,
    TisSequence,
    TisToken,
    check_weights,
)

SEQUENCES = torch.tensor([0, 0, 1, 1, 1, 2])
RATIOS = (1.5, 3.0, 0.5, 0.4, 2.0, 1.0)
"""Products 4.5, 0.4 and 1; geometric means √4.5 = 2.1213, 0.4^⅓ = 0.7368 and 1; farthest 3, 2.5
and 1.
"""


def weights(correction: Any, ratios: tuple[float, ...] = RATIOS) -> list[float]:
    behaviour_N = -torch.arange(1.0, len(ratios) + 1).double()
    proximal_N = torch.tensor(ratios, dtype=torch.float64).log() + behaviour_N
    made = correction.make().token_weights(proximal_N, behaviour_N, SEQUENCES[: len(ratios)])
    return [float(weight) for weight in made]


def test_a_token_weight_is_its_ratio_up_to_the_cap() -> None:
    assert weights(TisToken()) == pytest.approx([1.5, 2.0, 0.5, 0.4, 2.0, 1.0])
    assert weights(TisToken(cap=2.5)) == pytest.approx([1.5, 2.5, 0.5, 0.4, 2.0, 1.0])


def test_a_sequence_weight_is_the_product_of_its_ratios_up_to_the_cap() -> None:
    assert weights(TisSequence()) == pytest.approx([2.0, 2.0, 0.4, 0.4, 0.4, 1.0])
    assert weights(TisSequence(cap=10.0)) == pytest.approx([4.5, 4.5, 0.4, 0.4, 0.4, 1.0])


def test_icepop_sets_ratios_outside_of_its_bounds_to_0() -> None:
    assert (IcePop().low, IcePop().high) == (0.5, 5.0)
    assert weights(IcePop(low=0.49)) == pytest.approx([1.5, 3.0, 0.5, 0.0, 2.0, 1.0])
    assert weights(IcePop(low=0.45, high=1.6)) == pytest.approx([1.5, 0.0, 0.5, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("ratio", "limit", "kept"),
    [
        ("geometric_mean", 2.2, [1, 1, 1]),
        ("geometric_mean", 2.1, [0, 1, 1]),
        ("geometric_mean", 1.3, [0, 0, 1]),  # 1 / 0.7368 = 1.357
        ("max", 3.1, [1, 1, 1]),
        ("max", 2.9, [0, 1, 1]),
        ("max", 2.4, [0, 0, 1]),  # 1 / 0.4 = 2.5
    ],
)
def test_a_sequence_beyond_the_limit_is_rejected(ratio: str, limit: float, kept: list[int]) -> None:
    correction = Rejection.model_validate({"ratio": ratio, "limit": limit})
    assert weights(correction) == [float(kept[number]) for number in (0, 0, 1, 1, 1, 2)]


@pytest.mark.parametrize(
    "correction", [TisToken(), TisSequence(), IcePop(), Rejection(limit=1.5), TisToken(cap=1e6)]
)
def test_equal_policies_have_weight_1_and_far_ones_a_finite_weight(correction: Any) -> None:
    assert weights(correction, (1.0,) * 6) == pytest.approx([1.0] * 6)
    far = correction.make().token_weights(
        torch.tensor([0.0, -1e30]), torch.tensor([-1e30, 0.0]), torch.tensor([0, 1])
    )
    assert bool(far.isfinite().all())
    assert 0 <= float(far.max()) <= math.exp(LOG_RATIO_MAX)
    empty = torch.zeros(0)
    assert correction.make().token_weights(empty, empty, torch.zeros(0).long()).shape == (0,)


def test_no_gradient_flows_through_a_weight() -> None:
    proximal_N = torch.zeros(2, requires_grad=True)
    for correction in (TisToken(), TisSequence(), IcePop(), Rejection(limit=2.0)):
        made = correction.token_weights(proximal_N, torch.ones(2), torch.tensor([0, 0]))
        assert not made.requires_grad


def test_without_a_correction_there_is_nothing_to_compute() -> None:
    assert NoCorrection().make() is None
    assert all(model.model_fields["name"].default == name for name, model in CORRECTIONS.items())


class Half:
    """Half of every token, or whatever a test wants returned."""

    def __init__(self, factor: float = 0.5) -> None:
        if factor < 0:
            raise KeyError("negative")
        self.factor = factor

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        return torch.full_like(proximal_N, self.factor)


class WithoutWeights:
    pass


def custom(name: str, **args: float) -> CustomCorrection:
    return CustomCorrection(path=f"{__name__}:{name}", args=args)


def test_a_custom_correction_is_built_with_its_arguments() -> None:
    assert weights(custom("Half", factor=0.25)) == [0.25] * 6


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("WithoutWeights", {}, r"train\.loss\.correction\.path: .* has no token_weights"),
        ("Half", {"share": 1.0}, r"correction\.path: .*Half does not take args .'share': 1\.0"),
        ("Half", {"factor": -1.0}, r"correction\.args: .* refuses .*KeyError: 'negative'"),
        ("Missing", {}, r"correction\.path: the module .* has no 'Missing'"),
    ],
)
def test_an_invalid_custom_correction_is_refused(
    name: str, args: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        custom(name, **args).make()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(3), r"of shape \[2\], not torch\.float32 \[3\]"),
        (torch.ones(2).long(), r"of shape \[2\], not torch\.int64 \[2\]"),
        ([1.0, 1.0], r"of shape \[2\], not list \[\]"),
        (torch.tensor([1.0, math.nan]), "finite weights of at least 0"),
        (torch.tensor([1.0, -0.5]), "finite weights of at least 0"),
    ],
)
def test_invalid_weights_are_refused(result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_weights(result, 2)


class Wrong(Half):
    """Returns or raises what a test wants."""

    result: Any = None

    def token_weights(self, proximal_N: Tensor, behaviour_N: Tensor, sequence_N: Tensor) -> Tensor:
        if isinstance(self.result, Exception):
            raise self.result
        made: Tensor = self.result
        return made


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"it must return floating-point weights of shape \[6\], not NoneType"),
        (torch.full((6,), 1e39, dtype=torch.float64), "it must return finite weights"),
        (KeyError("oops"), "KeyError: 'oops'"),
    ],
)
def test_a_fault_of_a_custom_correction_names_setting_and_class(
    monkeypatch: pytest.MonkeyPatch, result: Any, message: str
) -> None:
    monkeypatch.setattr(Wrong, "result", result)
    where = rf"^train\.loss\.correction\.path: token_weights of {__name__}:Wrong failed: "
    with pytest.raises(ConfigError, match=where + message) as raised:
        weights(custom("Wrong"))
    assert isinstance(raised.value.__cause__, type(result) if message[:3] == "Key" else ValueError)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), torch.AcceleratorError()])
def test_an_error_of_the_device_in_a_custom_correction_is_raised_as_it_is(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(Wrong, "result", error)
    with pytest.raises(type(error)):
        weights(custom("Wrong"))
