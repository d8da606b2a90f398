from collections.abc import Mapping

import numpy as np
import pytest

from storage.run.fates import BatchFates
from tasks.monitoring.training_curves import read_history, read_step, read_steps, sample
from tests.support.runs.small_run import SmallRun


def two_steps(name: str) -> SmallRun:
    small_run = SmallRun(name)
    small_run.version("solver", 0)
    for step in (1, 2):
        small_run.batch("solver", step, reward__mean=0.25 * step)
        small_run.version("solver", step, loss=float(step), tokens=6.0)
    return small_run


def of_step(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those measured during the publication of the version."""
    return {name: value for name, value in metrics.items() if not name.startswith("weights/")}


def test_a_point_joins_the_metrics_of_the_batch_and_the_manifest() -> None:
    step = read_step(two_steps("history-step").run, "solver", 2)
    assert step is not None
    assert of_step(step.metrics) == {
        "dataflow/reward/mean": 0.5,
        "trainer/loss": 2.0,
        "trainer/tokens": 6.0,
    }
    assert step.staleness == {0: 1, 1: 1}
    assert step.fates == BatchFates(
        {("trained", ""): 2, ("filtered", "zero_advantage"): 1}, waiting=1, ingested=(0,)
    )


def test_curves_have_a_gap_where_no_metric_exists() -> None:
    history = read_history(two_steps("history-curves").run, "solver", 2)
    assert history.numbers == [0, 1, 2]
    np.testing.assert_array_equal(history.series("trainer/loss"), [np.nan, 1.0, 2.0])
    assert history.staleness() == {0: 3, 1: 1}
    assert history.has("trainer/loss")
    assert not history.has("trainer/kl/mean")


def test_a_point_with_a_damaged_batch_keeps_the_metrics_of_the_manifest() -> None:
    small_run = two_steps("history-damaged")
    small_run.run.put("batches/solver/00000002.arrow", b"damage")
    step = read_step(small_run.run, "solver", 2)
    assert step is not None
    assert of_step(step.metrics) == {"trainer/loss": 2.0, "trainer/tokens": 6.0}


def test_a_batch_without_a_version_is_a_point_without_training_metrics() -> None:
    small_run = two_steps("history-ahead")
    small_run.batch("solver", 3, reward__mean=0.9)
    step = read_step(small_run.run, "solver", 3)
    assert step is not None
    assert step.metrics == {"dataflow/reward/mean": 0.9}
    assert [item.number for item in read_steps(small_run.run, "solver", range(1, 10))] == [1, 2]


def test_a_long_history_is_sampled_with_both_ends() -> None:
    history = read_history(two_steps("history-sampled").run, "solver", 2, steps_max=2)
    assert history.numbers == [0, 2]
    assert history.num_steps == 3


@pytest.mark.parametrize(
    ("count", "limit", "numbers"), [(0, 4, []), (3, 4, [0, 1, 2]), (10, 4, [0, 3, 6, 9])]
)
def test_samples_are_spread_evenly(count: int, limit: int, numbers: list[int]) -> None:
    assert sample(count, limit) == numbers


def test_complete_steps_are_not_read_again() -> None:
    small_run = two_steps("history-again")
    small_run.batch("solver", 3, reward__mean=0.9)
    known = {step.number: step for step in read_history(small_run.run, "solver", 3).steps}
    for step in (1, 2):
        small_run.run.put(f"batches/solver/{step:08d}.arrow", b"never read again")
    small_run.version("solver", 3, loss=3.0)
    history = read_history(small_run.run, "solver", 3, known=known)
    assert history.series("trainer/loss").tolist()[1:] == [1.0, 2.0, 3.0]
    assert history.series("dataflow/reward/mean").tolist()[1:] == [0.25, 0.5, 0.9]
