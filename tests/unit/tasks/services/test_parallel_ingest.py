"""Shards ingested by parallel tasks: their distribution over tasks, and the end of a window of
tasks.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from prefect.task_runners import TaskRunner

from data_ops.dataflow.ingest_transfer import IngestedShards
from data_ops.dataflow.shard_ingest import ingest_shard
from flows import run_dataflow
from storage.run import runs, shards
from storage.store.object_store import ObjectStore
from tasks.recipes import loader
from tasks.services import parallel_ingest
from tasks.services.parallel_ingest import ParallelIngest
from tests.support.runs.builders import shard


class Future:
    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters

    def result(self) -> IngestedShards:
        return parallel_ingest.ingest_orders(**self.parameters)


class InlineRunner(TaskRunner[Any]):
    """Runs each task when its result is requested, without Prefect's engine."""

    def __init__(self) -> None:
        self.submitted: list[list[int]] = []

    def duplicate(self) -> "InlineRunner":
        return InlineRunner()

    def submit(self, task: Any, parameters: dict[str, Any], *_: Any, **__: Any) -> Future:
        assert task is parallel_ingest.ingest_task
        self.submitted.append(parameters["orders"])
        return Future(parameters)


@pytest.fixture
def store(memory_store: ObjectStore) -> Iterator[ObjectStore]:
    """A run of the default recipe with seven finished orders."""
    config = loader.load("multi_policy_tiny").model_dump(mode="json")
    run = runs.create_run(memory_store, "r", config)
    for number in range(7):
        shards.create(run, shard(order=number))
    yield memory_store
    parallel_ingest._open_run.cache_clear()


def test_each_task_ingests_a_few_shards_and_results_keep_their_order(
    store: ObjectStore,
) -> None:
    runner = InlineRunner()
    ingested = ParallelIngest(store, "r", 3, runner)([6, 0, 1, 2, 5, 3, 4])
    assert runner.submitted == [[6, 0, 1], [2, 5, 3], [4]]
    assert [each.order for each in ingested] == [6, 0, 1, 2, 5, 3, 4]
    config = loader.load("multi_policy_tiny")
    expected = ingest_shard(store.sub("runs/r"), 5, config.data, list(config.policies), {})
    assert (
        [row.key for row in ingested[4].policies["solver"].rows]
        == [row.key for row in expected.policies["solver"].rows]
        == [(5, 0, 0, 0), (5, 0, 1, 0)]
    )
    assert ingested[4].shard is not None, "nothing is read twice within a process"


def test_a_window_is_full_when_all_its_tasks_are_used(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_ingest, "TASKS_PER_WINDOW_MAX", 3)
    ingest = ParallelIngest(store, "r", 3, InlineRunner())
    ingest([0, 1, 2])
    ingest([3])
    assert not ingest.is_full
    assert len(ingest([4, 5, 6])) == 3
    assert ingest.is_full


def test_a_full_window_is_followed_by_the_next_until_the_dataflow_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[tuple[str, str, int, int]] = []
    ends = iter(["full", "full", "done"])

    def window(run_id: str, member: str, attempt: int, number: int) -> str:
        begun.append((run_id, member, attempt, number))
        return next(ends)

    monkeypatch.setattr(run_dataflow, "window_of_dataflow", window)
    assert run_dataflow.dataflow.fn("r", "dataflow", 2) is None
    assert begun == [("r", "dataflow", 2, number) for number in range(3)]


def test_a_stopped_dataflow_ends_in_the_state_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dataflow, "window_of_dataflow", lambda *_: "stopped")
    monkeypatch.setattr(run_dataflow, "drained", lambda: "drained")
    assert run_dataflow.dataflow.fn("r") == "drained"  # type: ignore[comparison-overlap]  # the state's stand-in
