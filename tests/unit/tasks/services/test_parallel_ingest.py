"""Shards ingested by parallel tasks: their division into tasks, and the end of a window of tasks."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

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
from tests.support.runs.builders import batch, episode, group, sequence, shard


class Future:
    """A task that takes `shard_seconds` for each of its shards."""

    def __init__(self, parameters: dict[str, Any], shard_seconds: float) -> None:
        self.parameters, self.task_run_id, self._shard_seconds = parameters, uuid4(), shard_seconds

    def result(self) -> IngestedShards:
        shards = parallel_ingest.ingest_orders(**self.parameters).shards
        return IngestedShards(shards, self._shard_seconds * len(shards))


class InlineRunner(TaskRunner[Any]):
    """Runs each task when its result is requested, without Prefect's engine."""

    def __init__(self, shard_seconds: float = 1.0) -> None:
        self.submitted: list[list[int]] = []
        self.shard_seconds = shard_seconds

    def duplicate(self) -> "InlineRunner":
        return InlineRunner()

    def submit(self, task: Any, parameters: dict[str, Any], *_: Any, **__: Any) -> Future:
        assert task is parallel_ingest.ingest_task
        self.submitted.append(parameters["orders"])
        return Future(parameters, self.shard_seconds)


@pytest.fixture
def store(memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A run of the default recipe with seven finished orders, on a machine of two CPUs."""
    monkeypatch.setattr(parallel_ingest, "NUM_CPUS", 2)
    config = loader.load("multi_policy_tiny").model_dump(mode="json")
    run = runs.create_run(memory_store, "r", config)
    for number in range(7):
        shards.create(run, shard(order=number))
    yield memory_store
    parallel_ingest._open_run.cache_clear()


def test_shards_are_divided_evenly_over_the_cpus_and_results_keep_their_order(
    store: ObjectStore,
) -> None:
    runner = InlineRunner()
    ingested = ParallelIngest(store, "r", 16, runner)([6, 0, 1, 2, 5, 3, 4])
    assert runner.submitted == [[6, 0], [1, 2], [5, 3], [4]]
    assert [each.order for each in ingested] == [6, 0, 1, 2, 5, 3, 4]
    config = loader.load("multi_policy_tiny")
    expected = ingest_shard(store.sub("runs/r"), 5, config.data, list(config.policies), {})
    assert (
        [row.key for row in ingested[4].policies["solver"].rows]
        == [row.key for row in expected.policies["solver"].rows]
        == [(5, 0, 0, 0), (5, 0, 1, 0)]
    )
    assert ingested[4].shard is not None, "nothing is read twice within a process"


@pytest.mark.parametrize(
    ("shard_seconds", "sizes"),
    [(0.001, [7]), (0.025, [4, 3]), (0.034, [3, 3, 1]), (0.2, [2, 2, 2, 1])],
)
def test_shards_that_took_little_time_share_a_task(
    store: ObjectStore, shard_seconds: float, sizes: list[int]
) -> None:
    runner = InlineRunner(shard_seconds)
    ingest = ParallelIngest(store, "r", 16, runner)
    ingest([0])
    runner.submitted.clear()
    ingest(range(7))
    assert list(map(len, runner.submitted)) == sizes


def test_a_task_has_at_most_as_many_shards_as_the_recipe_says(store: ObjectStore) -> None:
    runner = InlineRunner(shard_seconds=0.0)
    ingest = ParallelIngest(store, "r", 3, runner)
    ingest([0])
    runner.submitted.clear()
    ingest(range(7))
    assert runner.submitted == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_window_is_full_when_all_its_tasks_are_used(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_ingest, "TASKS_PER_WINDOW_MAX", 3)
    ingest = ParallelIngest(store, "r", 3, InlineRunner(shard_seconds=0.0))
    ingest([0])
    ingest([1, 2, 3])
    assert not ingest.is_full
    assert len(ingest([4, 5, 6])) == 3
    assert ingest.is_full


def test_a_batch_is_a_task_of_the_window_too(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_ingest, "TASKS_PER_WINDOW_MAX", 1)
    monkeypatch.setattr(parallel_ingest, "write_batch_task", lambda *_, **__: None)
    ingest = ParallelIngest(store, "r", 3, InlineRunner())
    assert not ingest.is_full
    ingest.write_batch(store.sub("runs/r"), batch())
    assert ingest.is_full


def test_a_task_filters_sequences_that_are_longer_than_the_engines_contexts(
    store: ObjectStore,
) -> None:
    longest = loader.load("multi_policy_tiny").rollout.engine.max_tokens
    episodes = [episode(sequence((11,), (2,) * answer)) for answer in (longest - 1, longest)]
    shards.create(store.sub("runs/r"), shard(group(*episodes), order=7))
    (ingested,) = parallel_ingest.ingest_orders(store.address, "r", [7]).shards
    groups = ingested.policies["solver"]
    assert [entry.reason for entry in groups.entries] == ["too_long", "zero_advantage"]


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
