import numpy as np
import pytest

from storage.errors import ConfigError
from tasks.promotion.gate.outcomes import PairedOutcomes, pooled, problem_means

NAN = float("nan")


def test_samples_of_a_problem_are_averaged() -> None:
    means = problem_means(PairedOutcomes.of("set", "ab", [[1, 0], [0.5, 0.5]], [[1, 1], [0, 0.5]]))
    assert means.champion_P.tolist() == [0.5, 0.5]
    assert means.candidate_P.tolist() == [1.0, 0.25]
    assert (means.champion_failed, means.candidate_failed) == (0, 0)


def test_a_failed_episode_of_the_candidate_counts_as_wrong() -> None:
    means = problem_means(PairedOutcomes.of("set", "a", [[1, 1]], [[NAN, 1]]))
    assert (means.champion_P.tolist(), means.candidate_P.tolist()) == ([1.0], [0.5])
    assert (means.champion_failed, means.candidate_failed) == (0, 1)


def test_a_failed_episode_of_the_champion_leaves_out_its_sample_for_both() -> None:
    means = problem_means(PairedOutcomes.of("set", "a", [[NAN, 0]], [[1, 0]]))
    assert (means.champion_P.tolist(), means.candidate_P.tolist()) == ([0.0], [0.0])
    assert (means.champion_failed, means.candidate_failed) == (1, 0)


def test_a_sample_that_failed_for_both_counts_as_the_champions_failure() -> None:
    means = problem_means(PairedOutcomes.of("set", "a", [[NAN, 0]], [[NAN, 1]]))
    assert (means.champion_P.tolist(), means.candidate_P.tolist()) == ([0.0], [1.0])
    assert (means.champion_failed, means.candidate_failed) == (1, 0)


def test_a_problem_without_any_sample_of_the_champion_is_left_out() -> None:
    means = problem_means(PairedOutcomes.of("set", "ab", [[NAN], [1]], [[1], [0]]))
    assert (means.champion_P.tolist(), means.candidate_P.tolist()) == ([1.0], [0.0])


def test_no_problems_are_no_means() -> None:
    means = problem_means(PairedOutcomes.of("set", (), [], []))
    assert (len(means.champion_P), len(means.candidate_P)) == (0, 0)


def test_pooled_problems_count_the_same_in_every_data_set() -> None:
    one = problem_means(PairedOutcomes.of("one", "abc", [[0], [0], [NAN]], [[1], [NAN], [1]]))
    two = problem_means(PairedOutcomes.of("two", "a", [[1]], [[0]]))
    both = pooled([one, two])
    assert both.champion_P.tolist() == [0.0, 0.0, 1.0]
    assert both.candidate_P.tolist() == [1.0, 0.0, 0.0]
    assert (both.champion_failed, both.candidate_failed) == (1, 1)


@pytest.mark.parametrize(
    ("dataset", "problems", "champion", "candidate", "message"),
    [
        ("pooled", "a", [[1]], [[1]], r"'pooled' cannot name a data set"),
        ("", "a", [[1]], [[1]], r"'' cannot name a data set"),
        ("set", "aa", [[1], [1]], [[1], [1]], r"set: the problem 'a' is listed twice"),
        ("set", "ab", [[1]], [[1], [1]], r"champion's outcomes have the shape \(1, 1\) for 2 prob"),
        ("set", "a", [[1]], [1], r"candidate's outcomes have the shape \(1,\) for 1 problems"),
        ("set", "a", [[]], [[]], r"shape \(1, 0\) for 1 problems; .* at least one sample"),
        ("set", "a", [[1]], [[1, 0]], r"champion has 1 samples of each problem and the candidate 2"),
        ("set", "ab", [[1], [1]], [[1], [1.5]], r"candidate's outcomes have 1\.5 in row 1; .*\[0, 1\]"),
        ("set", "a", [[-1]], [[1]], r"champion's outcomes have -1 in row 0"),
        ("set", "a", [[float("inf")]], [[1]], r"champion's outcomes have inf in row 0"),
        ("set", "ab", [[1], [1, 0]], [[1], [1]], r"champion's outcomes are not a table of numbers"),
        ("set", "a", [["x"]], [[1]], r"champion's outcomes are not a table of numbers"),
    ],
)  # fmt: skip
def test_outcomes_that_cannot_be_paired_are_refused(
    dataset: str, problems: str, champion: object, candidate: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PairedOutcomes.of(dataset, tuple(problems), champion, candidate)  # type: ignore[arg-type]


def test_outcomes_are_copied_to_floats() -> None:
    outcomes = PairedOutcomes.of("set", "a", np.array([[True]]), np.array([[0]]))
    assert (outcomes.champion.tolist(), outcomes.candidate.tolist()) == ([[1.0]], [[0.0]])


def test_one_problem_that_is_listed_twice_among_very_many_is_named() -> None:
    problems = [*map(str, range(30_000)), "29999"]
    ones = [[1]] * len(problems)
    with pytest.raises(ConfigError, match=r"set: the problem '29999' is listed twice"):
        PairedOutcomes.of("set", problems, ones, ones)
