"""Shards taken in by parallel tasks: how they are spread over tasks, and when a flow run has had
its share of tasks.
"""

from collections.abc import Callable
from typing import Any

import pytest

from data_ops.dataflow.shard_ingest import prepare
from flows import run_dataflow
from storage.run import shards
from storage.store.object_store import ObjectStore
from tasks.services import parallel_ingest
from tasks.services.parallel_ingest import ParallelIntake
from tests.builders import shard
from tests.dataflow_world import World, world


class Task:
    """In the place of a Prefect task: runs at once, the newest submission first when results are
    asked for.
    """

    def __init__(self, work: Callable[[list[int]], int]) -> None:
        self.work = work
        self.submitted: list[list[int]] = []

    def submit(self, orders: list[int]) -> "Future":
        self.submitted.append(orders)
        return Future(self, orders)


class Future:
    def __init__(self, task: Task, orders: list[int]) -> None:
        self.task, self.orders = task, orders

    def result(self) -> int:
        return self.task.work(self.orders)


@pytest.fixture
def made(memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run of seven answered orders; tasks need no flow."""
    monkeypatch.setattr(parallel_ingest, "task", lambda **_: Task)
    made = world(memory_store, shards_per_task=3)
    for number in range(7):
        shards.create(made.run, shard(order=number))
    return made


def intake(made: World) -> ParallelIntake:
    return ParallelIntake(made.run, made.config, list(made.policies))


def test_each_task_takes_in_a_few_shards_and_all_come_back_in_the_order_asked(made: World) -> None:
    taking = intake(made)
    found = taking([6, 0, 1, 2, 5, 3, 4])
    task: Any = taking._task
    assert task.submitted == [[6, 0, 1], [2, 5, 3], [4]]
    assert [prepared.order for prepared in found] == [6, 0, 1, 2, 5, 3, 4]
    expected = prepare(made.run, 5, made.config, list(made.policies))
    assert (
        [row.key for row in found[4].policies["solver"].rows]
        == [row.key for row in expected.policies["solver"].rows]
        != []
    )
    assert task.work([0, 1]) == 4  # sequences, of two groups of two answers each


def test_a_window_is_full_when_its_tasks_are_used_up_and_not_before(
    made: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_ingest, "TASKS_PER_WINDOW_MAX", 3)
    taking = intake(made)
    taking([0, 1, 2])
    taking([3])
    assert not taking.is_full
    assert len(taking([4, 5, 6])) == 3
    assert taking.is_full


def test_a_full_window_is_followed_by_the_next_until_the_dataflow_is_through(
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


def test_a_dataflow_that_was_stopped_ends_as_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dataflow, "window_of_dataflow", lambda *_: "stopped")
    monkeypatch.setattr(run_dataflow, "drained", lambda: "drained")
    assert run_dataflow.dataflow.fn("r") == "drained"  # type: ignore[comparison-overlap]  # the state's stand-in
