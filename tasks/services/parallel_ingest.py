"""Ingest shards in parallel Prefect tasks, on the task runner that `data.task_runner` selects.

    ParallelIngest ──the run's address, order numbers──▶ tasks of threads, processes or machines
                   ◀──objects within a process, Arrow bytes between processes──

A task costs the control plane some ten milliseconds of CPU (docs/benchmarks.md), so it ingests up
to `shards_per_task` shards. A task is given names only. A worker process opens the run by its
address, with the credentials of its own environment, and reads the stored configuration.
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
    store: ObjectStore
    config: DataConfig
    policies: tuple[str, ...]
    vocab_sizes: VocabSizes


def ingest_orders(run: str, orders: list[int]) -> IngestedShards:
    """Ingest the shards of these orders of the run at the address `run`.

    Raises TransientError, ConfigError for a filter that cannot be imported here, and CorruptError
    for a configuration of another release.
    """
    opened = _open_run(run)
    return IngestedShards(
        [
            ingest_shard(
                opened.store, order, opened.config, opened.policies, opened.vocab_sizes.read()
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

    def __init__(self, run: ObjectStore, shards_per_task: int, runner: TaskRunner[Any]) -> None:
        self._address, self._shards_per_task, self._runner = run.address, shards_per_task, runner
        self._tasks_left = TASKS_PER_WINDOW_MAX

    def __call__(self, orders: Sequence[int]) -> list[IngestedShard]:
        size = self._shards_per_task
        futures = [
            self._runner.submit(
                ingest_task, {"run": self._address, "orders": list(orders[at : at + size])}
            )
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
def _open_run(address: str) -> _OpenRun:
    """Open a run once per process; its configuration never changes."""
    store_credentials.load()
    store = open_store(address)
    config = read_config(store)
    policies = tuple(config.policies)
    return _OpenRun(store, config.data, policies, VocabSizes(store, policies))
