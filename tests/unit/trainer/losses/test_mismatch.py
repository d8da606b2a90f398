"""Sums and metrics of the mismatch against values worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.losses.mismatch import (
    NOT_MEASURED,
    REGIONS_MAX,
    SUMS,
    mismatch_metrics,
    mismatch_sums,
    region_of,
)

RATIOS = (1.0, 2.5, 0.25, 4.0, 1.5)
REGIONS = (0, 0, 1, NOT_MEASURED, 1)
LN2 = 0.6931471805599453


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64, requires_grad=True).log()


def test_sums_and_the_largest_distance_are_by_region_without_tokens_of_other_versions() -> None:
    behaviour_N = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], dtype=torch.float64)
    sums_RS, largest_R = mismatch_sums(
        logs(*RATIOS) + behaviour_N, behaviour_N, torch.tensor(REGIONS), 3
    )
    assert SUMS == ("tokens", "abs", "k3", "beyond")
    assert not sums_RS.requires_grad
    # k3: 2.5 − 1 − ln 2.5 = 0.5837093; 0.25 − 1 + ln 4 = 0.6362944; 1.5 − 1 − ln 1.5 = 0.0945349
    assert sums_RS.tolist() == [
        pytest.approx([2.0, math.log(2.5), 0.5837093, 1.0], abs=1e-7),
        pytest.approx([2.0, math.log(4) + math.log(1.5), 0.7308293, 1.0], abs=1e-7),
        [0.0, 0.0, 0.0, 0.0],
    ]
    assert largest_R.tolist() == pytest.approx([math.log(2.5), math.log(4), 0.0])


@pytest.mark.parametrize(("ratio", "beyond"), [(1.99, 0.0), (2.01, 1.0), (0.51, 0.0), (0.49, 1.0)])
def test_a_token_is_beyond_2x_in_either_direction(ratio: float, beyond: float) -> None:
    sums_RS, _ = mismatch_sums(logs(ratio), torch.zeros(1).double(), torch.zeros(1).long(), 1)
    assert sums_RS[0, SUMS.index("beyond")] == beyond


def test_sums_of_parts_add_up_to_those_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs_N, behaviour_N = (-torch.rand(40, generator=generator) for _ in range(2))
    region_N = torch.randint(-1, 3, (40,), generator=generator)
    whole, largest = mismatch_sums(logprobs_N, behaviour_N, region_N, 3)
    parts = [
        mismatch_sums(logprobs_N[part], behaviour_N[part], region_N[part], 3)
        for part in (slice(0, 7), slice(7, 7), slice(7, 40))
    ]
    assert torch.allclose(sum(sums for sums, _ in parts), whole, rtol=1e-14)
    assert torch.equal(torch.stack([each for _, each in parts]).amax(dim=0), largest)


def test_metrics_are_of_all_tokens_and_of_each_region() -> None:
    sums_RS = np.array([[4.0, 1.0, 0.5, 1.0], [0.0] * 4, [2.0, 2.0, 3.0, 2.0], [2.0, 3.0, 0.5, 0]])
    metrics = mismatch_metrics(sums_RS, np.array([LN2, 0, 2 * LN2, LN2]), ["eu", "mars", "us", ""])
    assert metrics == pytest.approx(
        {
            "trainer/mismatch/mean_abs": 0.75,
            "trainer/mismatch/k3": 0.5,
            "trainer/mismatch/ratio_max": 4.0,
            "trainer/mismatch/beyond_2x_share": 0.375,
            "trainer/mismatch/tokens": 8.0,
            "trainer/mismatch/mean_abs/eu": 0.25,
            "trainer/mismatch/k3/eu": 0.125,
            "trainer/mismatch/ratio_max/eu": 2.0,
            "trainer/mismatch/beyond_2x_share/eu": 0.25,
            "trainer/mismatch/tokens/eu": 4.0,
            "trainer/mismatch/mean_abs/us": 1.0,
            "trainer/mismatch/k3/us": 1.5,
            "trainer/mismatch/ratio_max/us": 4.0,
            "trainer/mismatch/beyond_2x_share/us": 1.0,
            "trainer/mismatch/tokens/us": 2.0,
        }
    )


def test_without_measured_tokens_there_are_no_metrics() -> None:
    assert mismatch_metrics(np.zeros((2, 4)), np.zeros(2), ["eu", ""]) == {}
    assert mismatch_metrics(np.zeros((0, 4)), np.zeros(0), []) == {}


def test_only_the_regions_with_the_most_tokens_have_metrics() -> None:
    count = REGIONS_MAX + 2
    sums_RS = np.ones((count, 4))
    sums_RS[:, 0] = np.arange(1, count + 1)
    metrics = mismatch_metrics(sums_RS, np.ones(count), [f"r{index}" for index in range(count)])
    measured = {region_of(name) for name in metrics} - {""}
    assert measured == {f"r{index}" for index in range(2, count)}


def test_a_ratio_that_overflows_is_infinite() -> None:
    metrics = mismatch_metrics(np.ones((1, 4)), np.array([1e4]), [""])
    assert metrics["trainer/mismatch/ratio_max"] == math.inf


def test_the_region_of_a_metric_is_found_by_its_statistic() -> None:
    assert region_of("trainer/mismatch/mean_abs/eu") == "eu"
    assert region_of("trainer/mismatch/k3/eu", "k3") == "eu"
    assert region_of("trainer/mismatch/k3/eu") == region_of("trainer/mismatch/mean_abs") == ""


@pytest.mark.parametrize("region_N", [torch.zeros(2).long(), torch.zeros(3)])
def test_regions_of_another_shape_or_dtype_are_refused(region_N: Tensor) -> None:
    with pytest.raises(ValueError, match=r"region_N must be int64 \[3\], found "):
        mismatch_sums(torch.zeros(3), torch.zeros(3), region_N, 1)
