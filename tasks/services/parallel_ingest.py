"""Ingest shards in parallel Prefect tasks, on the task runner that `data.task_runner` selects, and
write each batch in a task that follows those of its shards.

    ParallelIngest ──store, run id, order numbers──▶ tasks of threads, processes or machines
                   ◀──objects within a process, Arrow bytes between processes──

        read, filter, advantages: orders 4–7  ──┐
        read, filter, advantages: orders 8–11 ──┴──▶ assemble batch 3 of solver

A task costs the control plane some ten milliseconds of CPU (docs/benchmarks.md). Shards are
therefore divided evenly over the CPUs, but not into tasks shorter than TASK_SECONDS_MIN, by the
measured time of the shards before them. A task is given names only. A worker process opens the
store by its address, with the credentials of its own environment, and reads the run's stored
configuration.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateDetails
from prefect.futures import PrefectFuture
from prefect.states import Completed
from prefect.task_runners import TaskRunner

from data_ops.config import DataConfig
from data_ops.dataflow.ingest_transfer import IngestedShards
from data_ops.dataflow.model_limits import RunLimits
from data_ops.dataflow.shard_ingest import IngestedShard, ingest_shard
from storage.machine.cpus import num_cpus
from storage.records.batches import Batch
from storage.run import batches, runs
from storage.store.object_store import ObjectStore, open_store
from tasks.recipes.stored_config import read_config
from tasks.services import store_credentials

TASKS_PER_WINDOW_MAX = 250
"""A flow run's memory grows by some 40 kB with each task. After this many the next window begins,
within about a second.
"""
TASK_SECONDS_MIN = 0.1
"""Shards are not divided into shorter tasks, of which Prefect's share would be over a tenth."""
TASKS_PER_CPU = 2
"""Tasks that a CPU has of one division: shards of unequal length are balanced by the second."""
NUM_CPUS = num_cpus()
RUNS_OPEN_MAX = 8
"""Runs that one worker process keeps open."""


@dataclass(frozen=True)
class _OpenRun:
    run: ObjectStore
    config: DataConfig
    policies: tuple[str, ...]
    limits: RunLimits


def ingest_orders(store: str, run_id: str, orders: list[int]) -> IngestedShards:
    """Ingest the shards of these orders of a run; `store` is the address of its store.

    Raises TransientError, ConfigError for a filter that cannot be imported here, and CorruptError
    for a configuration of another release.
    """
    start_s = time.perf_counter()
    opened = _open_run(store, run_id)
    ingested = [
        ingest_shard(opened.run, order, opened.config, opened.policies, opened.limits.read())
        for order in orders
    ]
    return IngestedShards(ingested, time.perf_counter() - start_s)


ingest_task = task(
    name="ingest",
    task_run_name="read, filter, advantages: {orders}",
    cache_policy=NO_CACHE,
    persist_result=False,
)(ingest_orders)


@task(
    name="assemble",
    task_run_name="assemble batch {step} of {policy}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def write_batch_task(policy: str, step: int, write: Callable[[], None]) -> None:
    """Call `write`. Prefect would visit every array of a batch that is a parameter."""
    write()


class ParallelIngest:
    """`ingest_orders` over many shards at once, on a started task runner, inside a flow."""

    def __init__(
        self, store: ObjectStore, run_id: str, shards_per_task: int, runner: TaskRunner[Any]
    ) -> None:
        """`shards_per_task` bounds the memory of a task, whatever its shards cost."""
        self._run = {"store": store.address, "run_id": run_id}
        self._shards_per_task, self._runner = shards_per_task, runner
        self._tasks_left = TASKS_PER_WINDOW_MAX
        self._shard_seconds = math.inf
        """Seconds per shard at the last call: none is known to be short before the first."""
        self._states: dict[int, State[bool]] = {}
        """Order → the state of the task that ingested it, without its result."""

    def __call__(self, orders: Sequence[int]) -> list[IngestedShard]:
        size = self._size_of_task(len(orders))
        futures: list[PrefectFuture[IngestedShards]] = [
            self._runner.submit(ingest_task, {**self._run, "orders": list(orders[at : at + size])})
            for at in range(0, len(orders), size)
        ]
        self._tasks_left -= len(futures)
        results = [future.result() for future in futures]
        self._shard_seconds = sum(result.seconds for result in results) / max(1, len(orders))
        for future, result in zip(futures, results, strict=True):
            details = StateDetails(task_run_id=future.task_run_id)
            ended: State[bool] = Completed(
                data=True, state_details=details
            )  # Prefect refuses one without data
            self._states.update((shard.order, ended) for shard in result.shards)
        return [shard for result in results for shard in result.shards]

    def write_batch(self, run: ObjectStore, batch: Batch) -> None:
        """`batches.create` as a task, after the tasks of its rows' shards in this window."""
        orders = {row.key.order for row in batch.rows}
        before = {id(state): state for order in orders if (state := self._states.get(order))}
        self._tasks_left -= 1
        write = partial(batches.create, run, batch)
        write_batch_task(batch.policy, batch.step, write, wait_for=list(before.values()))

    def _size_of_task(self, num_orders: int) -> int:
        """Return how many shards a task ingests."""
        even = math.ceil(num_orders / (TASKS_PER_CPU * NUM_CPUS))
        worth = math.ceil(TASK_SECONDS_MIN / max(self._shard_seconds, 1e-6))
        return max(1, min(max(even, worth), self._shards_per_task))

    @property
    def is_full(self) -> bool:
        """Whether this flow run has started its share of tasks, so that the next window begins."""
        return self._tasks_left <= 0


@lru_cache(RUNS_OPEN_MAX)
def _open_run(store: str, run_id: str) -> _OpenRun:
    """Open a run once per process; its configuration never changes."""
    store_credentials.load()
    run = runs.open_run(open_store(store), run_id)
    config = read_config(run)
    policies = tuple(config.policies)
    limits = RunLimits(run, policies, config.rollout.engine.max_tokens)
    return _OpenRun(run, config.data, policies, limits)
