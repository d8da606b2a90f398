import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

from tasks.promotion.gate import paired_bootstrap
from tasks.promotion.gate.comparison import Comparison
from tasks.promotion.gate.paired_bootstrap import (
    PairedBootstrap,
    bootstrap_bounds,
    sign_flip_p_value,
)

DIFFERENCES = np.array([0.5, -0.25, 0.0, 0.75, 0.5])


def all_resamples(differences: np.ndarray) -> np.ndarray:
    """The means of all P^P ordered resamples, each equally probable."""
    indices = itertools.product(range(len(differences)), repeat=len(differences))
    return np.array([differences[list(index)].mean() for index in indices])


def exact_p_value(differences: np.ndarray) -> float:
    """Share of all 2^P sign patterns whose sum is at least the observed one."""
    patterns = itertools.product((1, -1), repeat=len(differences))
    observed = differences.sum()
    return float(np.mean([np.dot(signs, differences) >= observed - 1e-9 for signs in patterns]))


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_bounds_are_quantiles_of_all_resamples(confidence: float) -> None:
    means = np.sort(all_resamples(DIFFERENCES))
    low, high = bootstrap_bounds(DIFFERENCES, confidence, 200_000, np.random.default_rng(0))
    for bound, share in ((low, 1 - confidence), (high, confidence)):
        # the share of exact means up to the bound is the asked one, but for the steps of the means
        assert np.mean(means < bound - 1e-9) <= share + 0.005
        assert np.mean(means <= bound + 1e-9) >= share - 0.005


@pytest.mark.parametrize(
    "differences",
    [
        DIFFERENCES,
        -DIFFERENCES,
        np.array([1.0, 1.0, 1.0, 0.0]),
        np.array([1.0, -1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_p_value_is_the_share_of_all_sign_patterns(differences: np.ndarray) -> None:
    p_value = sign_flip_p_value(differences, 100_000, np.random.default_rng(0))
    assert p_value == pytest.approx(exact_p_value(differences), abs=0.006)


def test_equal_teams_have_a_p_value_of_one_and_bounds_of_zero() -> None:
    equal = np.array([1.0, 0.0, 0.5])
    assert PairedBootstrap(resamples=100).compare(equal, equal, 0.95) == Comparison(0.0, 0.0, 1.0)


def test_the_smallest_p_value_counts_the_observed_outcome_itself() -> None:
    rng = np.random.default_rng(0)
    assert sign_flip_p_value(np.ones(100), 999, rng) == 1 / 1000


def test_the_result_depends_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    champion, candidate = np.random.default_rng(5).random((2, 40))
    first = PairedBootstrap(seed=3).compare(champion, candidate, 0.9)
    assert PairedBootstrap(seed=3).compare(champion, candidate, 0.9) == first
    assert PairedBootstrap(seed=4).compare(champion, candidate, 0.9) != first
    monkeypatch.setattr(paired_bootstrap, "DRAWS_MAX", 100 * 40)  # a hundred resamples at a time
    in_parts = PairedBootstrap(seed=3).compare(champion, candidate, 0.9)
    assert (in_parts.low, in_parts.high) == pytest.approx((first.low, first.high))
    assert in_parts.p_value == first.p_value


def test_chunks_give_the_asked_number_of_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired_bootstrap, "DRAWS_MAX", 10)
    assert paired_bootstrap._chunks(10, 3) == [3, 3, 3, 1]
    assert paired_bootstrap._chunks(6, 3) == [3, 3]
    assert paired_bootstrap._chunks(2, 100) == [1, 1]


def test_the_bounds_equal_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    differences = rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0], size=120, p=[0.05, 0.15, 0.5, 0.2, 0.1])
    expected = stats.bootstrap(
        (differences,), np.mean, n_resamples=50_000, confidence_level=0.9, method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    low, high = bootstrap_bounds(differences, 0.95, 50_000, np.random.default_rng(3))
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=0.003)
    permuted = stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", alternative="greater",
        n_resamples=20_000, rng=np.random.default_rng(4),
    ).pvalue  # fmt: skip
    p_value = sign_flip_p_value(differences, 50_000, np.random.default_rng(5))
    assert p_value == pytest.approx(permuted, abs=0.003)


def test_many_different_values_are_drawn_from_the_same_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    champion, candidate = np.random.default_rng(6).random((2, 200))
    differences = candidate + 0.04 - champion

    def drawn(values_max: int, seed: int) -> np.ndarray:
        """Lower and upper bound, and the p value."""
        monkeypatch.setattr(paired_bootstrap, "VALUES_MAX", values_max)
        rng = np.random.default_rng(seed)
        bounds = bootstrap_bounds(differences, 0.95, 20_000, rng)
        return np.array([*bounds, sign_flip_p_value(differences, 20_000, rng)])

    by_problem = np.array([drawn(0, seed) for seed in range(10)])
    by_value = np.array([drawn(200, seed) for seed in range(10, 20)])
    assert not np.array_equal(by_problem, by_value)
    deviations = np.sqrt((by_problem.var(axis=0, ddof=1) + by_value.var(axis=0, ddof=1)) / 10)
    assert 0.01 < by_value[0, 2] < 0.99
    assert (np.abs(by_problem.mean(axis=0) - by_value.mean(axis=0)) < 3 * deviations).all()


def test_right_and_wrong_answers_keep_the_numbers_of_stored_decisions() -> None:
    champion, candidate = np.random.default_rng(7).integers(0, 2, (2, 30)).astype(float)
    compared = PairedBootstrap(resamples=1000).compare(champion, candidate, 0.95)
    assert compared == Comparison(-1 / 30, 0.3, 176 / 1001)


class ByProblem(np.random.Generator):
    """Draws nothing for each different value, which takes ten times as long where most differ."""

    def multinomial(self, *args: object, **options: object) -> Any:
        raise AssertionError("a number for each value")

    binomial = multinomial


@pytest.mark.parametrize(
    ("num_values", "is_by_problem"), [(10_000, True), (1251, True), (1250, False)]
)
def test_a_number_is_drawn_for_each_problem_where_most_values_differ(
    num_values: int, is_by_problem: bool
) -> None:
    differences = np.arange(10_000) % num_values + 1.0
    for test in (
        partial(bootstrap_bounds, differences, 0.95),
        partial(sign_flip_p_value, differences),
    ):
        expected = nullcontext() if is_by_problem else pytest.raises(AssertionError)
        with expected:
            test(10, ByProblem(np.random.PCG64(0)))
