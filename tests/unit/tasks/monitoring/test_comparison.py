"""Runs side by side: accuracies, paired gains, settings that differ."""

from pathlib import Path

from storage.run import evaluations
from tasks.monitoring.comparison import RunsCompared, Scored, compare
from tasks.reports.comparison_page import figures, render_comparison
from tests.support.runs.small_run import RECIPE, SmallRun

SOLO = Scored("chained_addition", "single_turn")
TEAM = Scored("chained_addition", "actor_and_verify")
NAMES = ("first", "other")


def two_runs(name: str, second: list[float]) -> list[SmallRun]:
    """A run that solved the first 20 of 40 problems alone, and one with the results `second`."""
    first = SmallRun(name, RECIPE, run_id="first")
    other = SmallRun(name, RECIPE.replace("steps: 4", "steps: 8"), run_id="other")
    first.evaluation(0, [0.0] * 40, [0.0] * 40)
    first.evaluation(3, [1.0] * 20 + [0.0] * 20, [1.0] * 40)
    other.evaluation(2, second, [1.0] * len(second))
    return [first, other]


def compared(name: str, second: list[float]) -> RunsCompared:
    return compare(two_runs(name, second)[0].store, NAMES)


def test_gains_are_of_common_problems_of_the_newest_evaluations() -> None:
    gains = {gain.scored: gain for gain in compared("comparison-gain", [1.0] * 30).gains}
    solo, team = gains[SOLO], gains[TEAM]
    assert (solo.run_id, solo.n) == ("other", 30)
    assert solo.gain == 10 / 30
    assert 0.1 < solo.low < 0.25 < solo.gain < 0.4 < solo.high < 0.6
    assert (team.gain, team.low, team.high) == (0, 0, 0)


def test_a_failed_episode_counts_as_wrong() -> None:
    gains = compared("comparison-failed", [float("nan")] * 40).gains
    assert next(gain.gain for gain in gains if gain.scored == SOLO) == -0.5


def test_only_settings_that_differ_are_listed() -> None:
    settings = compared("comparison-settings", [1.0]).settings
    assert [(row.key, row.values) for row in settings] == [("steps", ("4", "8"))]


def test_long_settings_that_differ_at_their_end_are_listed_and_look_different(
    tmp_path: Path,
) -> None:
    for name, end in zip(NAMES, "ab", strict=True):
        path = tmp_path / f"{'x' * 210}{end}.jsonl"
        path.write_text('{"question": "1+1", "answer": "2"}\n')
        recipe = RECIPE.replace("builtin: chained_addition", f"path: {path}")
        run = SmallRun("comparison-long", recipe, run_id=name)
    (row,) = compare(run.store, NAMES).settings
    assert row.key == "data.prompts.path"
    assert all(len(value) < 220 for value in row.values)
    assert row.values[0] != row.values[1]


def test_curves_have_every_evaluation_in_order() -> None:
    run, other = compared("comparison-curves", [1.0]).runs
    assert [(point.version, point.accuracy, point.n) for point in run.curves[SOLO]] == [
        (0, 0.0, 40),
        (3, 0.5, 40),
    ]
    assert [point.version for point in other.curves[TEAM]] == [2]


def test_runs_without_a_common_data_set_have_no_gain() -> None:
    first, other = (SmallRun("comparison-apart", run_id=name) for name in NAMES)
    first.evaluation(1, [1.0], [1.0], dataset="gsm8k")
    other.evaluation(1, [1.0], [1.0], dataset="aime")
    assert compare(first.store, NAMES).gains == ()


def test_an_evaluation_that_cannot_be_read_is_named_and_left_out() -> None:
    first, _ = two_runs("comparison-damaged", [1.0] * 40)
    key = evaluations.keys(first.run)[-1]
    first.run.put(key, b"torn")
    run, _ = compare(first.store, NAMES).runs
    assert any(key in problem for problem in run.problems)
    assert [point.version for point in run.curves[SOLO]] == [0]


def test_the_page_shows_curves_gains_and_settings_and_escapes_text() -> None:
    first, other = (SmallRun("comparison-page", run_id=name) for name in NAMES)
    for run in (first, other):
        run.evaluation(1, [1.0, 0.0], [1.0, 0.0], dataset="<script>x</script>")
    result = compare(first.store, NAMES)
    page = render_comparison(result, "http://mlflow/#/compare-runs?runs=[1]")
    assert "<script>" not in page
    assert "&lt;script&gt;x" in page
    assert "The same runs in MLflow" in page
    drawn = figures(result.runs)
    assert len(drawn) == 4
    assert all(name in figure.svg for figure in drawn for name in NAMES)
