import math

import numpy as np
import pytest

from storage.errors import ConfigError
from tasks.promotion.gate.comparison import Comparison
from tasks.promotion.gate.mcnemar import McNemar, adjusted_wald_bounds, mcnemar_p_value

NORMAL_95 = 1.6448536269514722


@pytest.mark.parametrize(
    ("wins", "losses"), [(0, 0), (1, 0), (0, 1), (5, 0), (5, 1), (4, 6), (30, 12)]
)
def test_the_p_value_counts_the_outcomes_of_fair_coins(wins: int, losses: int) -> None:
    trials = wins + losses
    ways = [math.comb(trials, count) for count in range(wins, trials + 1)]
    assert mcnemar_p_value(wins, losses) == pytest.approx(sum(ways) / 2**trials)
    assert mcnemar_p_value(wins, losses, mid_p=True) == pytest.approx(
        (sum(ways) - ways[0] / 2) / 2**trials
    )


def test_a_p_value_of_many_problems_is_not_lost_to_rounding() -> None:
    assert mcnemar_p_value(50_000, 50_000) == pytest.approx(0.5, abs=0.002)
    assert 0 < mcnemar_p_value(700, 300) < 1e-30


def test_the_bounds_follow_the_published_formula() -> None:
    plus, minus, size = 21 / 102, 9 / 102, 102
    spread = math.sqrt((plus + minus - (plus - minus) ** 2) / size)
    low, high = adjusted_wald_bounds(20, 8, 100, 0.95)
    assert low == pytest.approx(plus - minus - NORMAL_95 * spread)
    assert high == pytest.approx(plus - minus + NORMAL_95 * spread)
    assert low > 0


def test_the_bounds_never_leave_the_range_of_a_difference() -> None:
    assert adjusted_wald_bounds(0, 1, 1, 0.999) == (-1.0, pytest.approx(0.857, abs=0.2))
    assert adjusted_wald_bounds(1, 0, 1, 0.999)[1] == 1.0


def test_wins_are_problems_that_only_the_candidate_solves() -> None:
    champion = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    candidate = np.array([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    assert McNemar().compare(champion, candidate, 0.9) == Comparison(
        *adjusted_wald_bounds(3, 1, 6, 0.9), pytest.approx(5 / 16)
    )
    mid_p = McNemar(mid_p=True).compare(champion, candidate, 0.9).p_value
    assert mid_p == pytest.approx(3 / 16)


def test_graded_accuracies_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"accuracy 0\.25; play one sample .* paired_bootstrap"):
        McNemar().compare(np.array([1.0, 0.0]), np.array([1.0, 0.25]), 0.95)


def test_the_exact_p_value_equals_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for wins, losses in ((3, 9), (17, 4), (250, 210)):
        expected = stats.binomtest(wins, wins + losses, 0.5, alternative="greater").pvalue
        assert mcnemar_p_value(wins, losses) == pytest.approx(expected)
