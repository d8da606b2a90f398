"""The data algorithms as parallel Prefect tasks: each task takes in up to `shards_per_task` shards.

A task costs the control plane some ten milliseconds of CPU (docs/benchmarks.md), so it takes in
several shards where there are several. Tasks are handed order numbers and hand back counts; the
rows stay in this process.
"""

from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from data_ops.config import DataConfig
from data_ops.dataflow.shard_ingest import IngestedShard, prepare
from storage.store.object_store import ObjectStore

TASKS_PER_WINDOW_MAX = 250
"""A flow run's memory grows by some 40 kB with each task; after so many the next window begins,
within about a second.
"""


class ParallelIntake:
    """`data_ops.dataflow.shard_ingest.prepare` over many shards at once. Needs to be called inside
    a flow.
    """

    def __init__(self, run: ObjectStore, config: DataConfig, policies: Sequence[str]) -> None:
        self._run, self._config, self._policies = run, config, list(policies)
        self._tasks_left = TASKS_PER_WINDOW_MAX
        self._prepared: dict[int, IngestedShard] = {}
        as_task = task(
            name="take-in",
            task_run_name="take in {orders}",
            cache_policy=NO_CACHE,
            persist_result=False,
        )
        self._task = as_task(self._prepare)

    def __call__(self, orders: Sequence[int]) -> list[IngestedShard]:
        size = self._config.shards_per_task
        futures = [
            self._task.submit(list(orders[at : at + size])) for at in range(0, len(orders), size)
        ]
        for future in futures:
            future.result()
        self._tasks_left -= len(futures)
        return [self._prepared.pop(order) for order in orders]

    @property
    def is_full(self) -> bool:
        """Whether this flow run has started its share of tasks, so that the next window begins."""
        return self._tasks_left <= 0

    def _prepare(self, orders: list[int]) -> int:
        """Take in the shards of these orders; returns how many sequences they held for all policies
        together.
        """
        for order in orders:
            self._prepared[order] = prepare(self._run, order, self._config, self._policies)
        return sum(
            len(intake.rewards)
            for order in orders
            for intake in self._prepared[order].policies.values()
        )
