"""The rule of the gate. Data sets are built from counts of problems: won, lost, solved by both."""

import math
from typing import Any

import numpy as np
import pytest

from storage.errors import ConfigError
from storage.records.promotions import GateRow, GateVerdict
from tasks.promotion.gate.comparison import Comparison
from tasks.promotion.gate.config import GateConfig
from tasks.promotion.gate.judgement import judge
from tasks.promotion.gate.mcnemar import adjusted_wald_bounds, mcnemar_p_value
from tasks.promotion.gate.outcomes import PairedOutcomes

NAN = math.nan


def dataset(name: str, wins: int, losses: int, both: int) -> PairedOutcomes:
    champion = [0.0] * wins + [1.0] * losses + [1.0] * both
    candidate = [1.0] * wins + [0.0] * losses + [1.0] * both
    ids = [str(number) for number in range(len(champion))]
    return PairedOutcomes.of(name, ids, [[x] for x in champion], [[x] for x in candidate])


def judged(*outcomes: PairedOutcomes, **settings: Any) -> GateVerdict:
    return judge(outcomes, GateConfig.model_validate({"test": "mcnemar", **settings}))


def row(verdict: GateVerdict, name: str) -> GateRow:
    (found,) = [row for row in verdict.rows if row.dataset == name]
    return found


def test_a_certain_gain_passes_and_its_row_has_the_numbers() -> None:
    verdict = judged(dataset("gsm8k", 20, 5, 75))
    low, high = adjusted_wald_bounds(20, 5, 100, 0.95)
    assert verdict.passed
    assert (verdict.test, verdict.confidence) == ("mcnemar", 0.95)
    assert verdict.rows == (
        GateRow(
            dataset="gsm8k", problems=100, champion_failed=0, candidate_failed=0, champion=0.8,
            candidate=0.95, gain=pytest.approx(0.15), low=low, high=high,
            p_value=mcnemar_p_value(20, 5), requirement="gain", required=0.0, passed=True,
            why=f"gain of +15.0%, at least {low:+.1%} with 95% confidence, p = 0.002",
        ),
    )  # fmt: skip
    assert verdict.reason == f"gsm8k: {verdict.rows[0].why}"


def test_identical_outcomes_are_not_promoted() -> None:
    assert not judged(dataset("set", 0, 0, 200)).passed
    assert not judged(dataset("set", 0, 0, 200), test="paired_bootstrap").passed


def test_a_gain_that_may_be_chance_is_not_promoted() -> None:
    verdict = judged(dataset("set", 8, 5, 87))
    assert not verdict.passed
    assert "it may be chance: p = 0.29, and at most 0.05 is accepted" in verdict.reason


def test_a_certain_gain_below_the_required_one_is_not_promoted() -> None:
    low = adjusted_wald_bounds(20, 5, 100, 0.95)[0]
    outcomes = dataset("set", 20, 5, 75)
    assert judged(outcomes, min_gain=low).passed
    verdict = judged(outcomes, min_gain=low + 0.001)
    assert not verdict.passed
    assert verdict.reason.endswith(f"; {low + 0.001:+.1%} is required")


def test_the_p_value_decides_where_the_bound_alone_would_pass() -> None:
    """Five wins and no loss: 1/32 is accepted at 95 %, 1/16 of four wins is not."""
    assert judged(dataset("set", 5, 0, 95)).passed
    assert not judged(dataset("set", 4, 0, 96)).passed
    assert not judged(dataset("set", 5, 0, 95), confidence=0.97).passed


def test_a_loss_that_is_not_excluded_on_another_set_rejects() -> None:
    low = adjusted_wald_bounds(2, 6, 100, 0.95)[0]
    sets = (dataset("main", 30, 2, 68), dataset("other", 2, 6, 92))
    assert judged(*sets, gain_on="main", max_loss=-low).passed
    verdict = judged(*sets, gain_on="main", max_loss=-low - 0.001)
    assert not verdict.passed
    assert [each.passed for each in verdict.rows] == [True, False]
    assert verdict.reason.startswith("other: change of -4.0%; with 95% confidence a loss of ")
    assert row(verdict, "other").required == pytest.approx(low + 0.001)


def test_a_data_set_may_have_its_own_allowed_loss() -> None:
    sets = (dataset("main", 30, 2, 68), dataset("other", 2, 6, 92))
    settings: dict[str, Any] = {"gain_on": "main", "max_loss": 0.2}
    assert judged(*sets, **settings).passed
    assert not judged(*sets, **settings, max_loss_on={"other": 0.01}).passed
    assert judged(*sets, gain_on="main", max_loss=0.0, max_loss_on={"other": 0.2}).passed


def test_the_gain_of_all_sets_together_decides_by_default() -> None:
    """Neither set alone shows a gain, both together do."""
    sets = (dataset("one", 9, 3, 88), dataset("two", 9, 3, 88))
    verdict = judged(*sets)
    assert verdict.passed
    assert [each.dataset for each in verdict.rows] == ["one", "two", "pooled"]
    assert [each.requirement for each in verdict.rows] == ["loss", "loss", "gain"]
    assert row(verdict, "pooled").p_value == mcnemar_p_value(18, 6)
    assert row(verdict, "pooled").problems == 200
    assert verdict.reason.startswith("pooled: gain of +6.0%")
    assert not judged(*sets, gain_on="one").passed


def test_too_few_problems_are_never_enough() -> None:
    outcomes = dataset("set", 40, 0, 9)
    assert judged(outcomes, min_problems=49).passed
    verdict = judged(outcomes, min_problems=50)
    assert verdict.reason == "set: 49 problems were compared, 50 are needed"
    assert not verdict.passed
    sets = (dataset("main", 40, 0, 60), dataset("few", 0, 0, 10))
    assert not judged(*sets, gain_on="main", max_loss=1.0).passed


def test_a_data_set_without_problems_is_a_row_without_numbers() -> None:
    verdict = judged(PairedOutcomes.of("empty", (), [], []))
    assert not verdict.passed
    assert verdict.reason == "empty: 0 problems were compared, 50 are needed"
    (only,) = verdict.rows
    assert all(map(math.isnan, (only.champion, only.candidate, only.gain, only.low, only.p_value)))


def test_failed_episodes_of_the_candidate_are_named() -> None:
    champion, candidate = [[1.0]] * 60, [[1.0]] * 57 + [[NAN]] * 3
    ids = [str(number) for number in range(60)]
    verdict = judged(PairedOutcomes.of("set", ids, champion, candidate))
    assert verdict.reason.endswith("; 3 failed episodes of the candidate count as wrong")
    assert verdict.rows[0].candidate == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gain_on": "gsm"}, r"gate\.gain_on names the data set 'gsm', .* those are one, two"),
        ({"max_loss_on": {"three": 0.1}}, r"gate\.max_loss_on names the data set 'three'"),
    ],
)
def test_a_setting_of_a_set_that_was_not_played_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        judged(dataset("one", 1, 0, 1), dataset("two", 1, 0, 1), **settings)


def test_a_set_given_twice_and_none_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="'one' is given twice"):
        judged(dataset("one", 1, 0, 1), dataset("one", 1, 0, 1))
    with pytest.raises(ConfigError, match="no data set to compare"):
        judged()


def test_more_sets_than_a_decision_can_store_are_refused() -> None:
    many = [dataset(f"set{number}", 1, 0, 0) for number in range(101)]
    assert len(judged(*many[:100]).rows) == 101
    with pytest.raises(ConfigError, match="at most 100 data sets"):
        judged(*many)


def test_a_graded_accuracy_under_mcnemar_names_setting_and_set() -> None:
    outcomes = PairedOutcomes.of("math", "a", [[1, 0]], [[1, 1]])
    with pytest.raises(ConfigError, match=r"^gate\.test: math: the test mcnemar compares right"):
        judged(outcomes)


class Fixed:
    """A user's test with a constant result."""

    def __init__(self, low: float = 0.1, high: float = 0.2, p_value: float = 0.01) -> None:
        self.result = (low, high, p_value)

    def compare(
        self, champion_P: np.ndarray, candidate_P: np.ndarray, confidence: float
    ) -> Comparison:
        return Comparison(*self.result)


class Raises(Fixed):
    def compare(
        self, champion_P: np.ndarray, candidate_P: np.ndarray, confidence: float
    ) -> Comparison:
        raise RuntimeError("no data")


NO_METHODS = object


def custom(name: str, **args: float) -> dict[str, Any]:
    return {"test": {"name": f"{__name__}:{name}", "args": args}}


def test_a_users_test_decides_by_its_import_path() -> None:
    outcomes = dataset("set", 0, 0, 60)
    verdict = judged(outcomes, **custom("Fixed"))
    assert verdict.passed
    assert (verdict.test, verdict.rows[0].low) == (f"{__name__}:Fixed", 0.1)
    assert not judged(outcomes, **custom("Fixed", p_value=0.06)).passed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (custom("Fixed", low=0.3), r"gives the bounds 0\.3 and 0\.2"),
        (custom("Fixed", low=NAN), r"gives the bounds nan"),
        (custom("Fixed", high=2.0), r"bounds are in \[-1, 1\]"),
        (custom("Fixed", p_value=-0.1), r"p is in \[0, 1\]"),
        (custom("Raises"), r"cannot compare the data set set: RuntimeError: no data"),
        (custom("Fixed", unknown=1), r"^gate\.test: .* does not take args"),
        (custom("NO_METHODS"), r"a gate test is a class with compare\(.*docs/extending/gate_tests"),
        (custom("Absent"), r"has no 'Absent'"),
    ],
)
def test_a_users_test_that_cannot_be_used_is_refused_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        judged(dataset("set", 0, 0, 60), **settings)
    assert str(caught.value).startswith("gate.test: ")


@pytest.mark.parametrize(
    ("test", "least", "most"),
    [
        ({"name": "paired_bootstrap", "resamples": 400}, 0.03, 0.06),
        ({"name": "mcnemar"}, 0.03, 0.05),
        ({"name": "mcnemar", "mid_p": True}, 0.035, 0.06),
    ],
)
def test_equal_teams_are_promoted_no_more_often_than_the_confidence_says(
    test: dict[str, Any], least: float, most: float
) -> None:
    """1,000 comparisons of two teams of equal skill, 300 problems each, a third of which differ."""
    rng = np.random.default_rng(2026)
    ids = [str(number) for number in range(300)]
    promoted = 0
    for _ in range(1000):
        skill = rng.random((300, 1))
        champion, candidate = (
            (rng.random((300, 1)) < skill).astype(float),
            (rng.random((300, 1)) < skill).astype(float),
        )
        promoted += judged(PairedOutcomes.of("set", ids, champion, candidate), test=test).passed
    assert least <= promoted / 1000 <= most


def test_equal_teams_with_dependent_samples_are_not_promoted_more_often() -> None:
    """Eight samples of a problem that agree count as one problem, not as eight observations."""
    rng = np.random.default_rng(7)
    ids = [str(number) for number in range(100)]
    promoted = 0
    for _ in range(400):
        champion, candidate = (
            np.repeat(rng.random((100, 1)) < 0.5, 8, axis=1).astype(float) for _ in range(2)
        )
        outcomes = PairedOutcomes.of("set", ids, champion, candidate)
        test = {"name": "paired_bootstrap", "resamples": 200}
        promoted += judged(outcomes, test=test).passed
    assert promoted / 400 <= 0.06
