"""Ingest shards in parallel Prefect tasks, on the task runner that `data.task_runner` selects.

    ParallelIngest ──store, run id, order numbers──▶ tasks of threads, processes or machines
                   ◀──objects within a process, Arrow bytes between processes──

A task costs the control plane some ten milliseconds of CPU (docs/benchmarks.md), so it ingests up
to `shards_per_task` shards. A task is given names only. A worker process opens the store by its
address, with the credentials of its own environment, and reads the run's stored configuration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import TaskRunner

from data_ops.config import DataConfig
from data_ops.dataflow.ingest_transfer import IngestedShards
from data_ops.dataflow.shard_ingest import IngestedShard, ingest_shard
from data_ops.dataflow.vocabulary import VocabSizes
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from tasks.recipes.stored_config import read_config
from tasks.services import store_credentials

TASKS_PER_WINDOW_MAX = 250
"""A flow run's memory grows by some 40 kB with each task. After this many the next window begins,
within about a second.
"""
RUNS_OPEN_MAX = 8
"""Runs that one worker process keeps open."""


@dataclass(frozen=True)
class _OpenRun:
    run: ObjectStore
    config: DataConfig
    policies: tuple[str, ...]
    vocab_sizes: VocabSizes


def ingest_orders(store: str, run_id: str, orders: list[int]) -> IngestedShards:
    """Ingest the shards of these orders of a run; `store` is the address of its store.

    Raises TransientError, ConfigError for a filter that cannot be imported here, and CorruptError
    for a configuration of another release.
    """
    opened = _open_run(store, run_id)
    return IngestedShards(
        [
            ingest_shard(
                opened.run, order, opened.config, opened.policies, opened.vocab_sizes.read()
            )
            for order in orders
        ]
    )


ingest_task = task(
    name="ingest",
    task_run_name="ingest {orders}",
    cache_policy=NO_CACHE,
    persist_result=False,
)(ingest_orders)


class ParallelIngest:
    """`ingest_orders` over many shards at once, on a started task runner, inside a flow."""

    def __init__(
        self, store: ObjectStore, run_id: str, shards_per_task: int, runner: TaskRunner[Any]
    ) -> None:
        self._run = {"store": store.address, "run_id": run_id}
        self._shards_per_task, self._runner = shards_per_task, runner
        self._tasks_left = TASKS_PER_WINDOW_MAX

    def __call__(self, orders: Sequence[int]) -> list[IngestedShard]:
        size = self._shards_per_task
        futures = [
            self._runner.submit(ingest_task, {**self._run, "orders": list(orders[at : at + size])})
            for at in range(0, len(orders), size)
        ]
        self._tasks_left -= len(futures)
        results: list[IngestedShards] = [future.result() for future in futures]
        return [shard for result in results for shard in result.shards]

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
    return _OpenRun(run, config.data, policies, VocabSizes(run, policies))
