"""The log of all shards: worker, time, tokens and failures of each, for lanes and throughput.

Times are those of the workers' clocks; they are used for figures only.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from storage.errors import UNREADABLE, NotFoundError
from storage.records.rollouts import Episode, Shard, failures_by_kind
from storage.run import orders, shards
from storage.store.object_store import ObjectStore
from tasks.monitoring.training_curves import READERS, sample

SHARDS_READ_MAX = 2000
"""Shards that one log reads; a longer run is sampled evenly."""


@dataclass(frozen=True, kw_only=True)
class PlayedShard:
    """Summary of one shard."""

    order: int
    worker: str
    region: str
    started_s: float
    finished_s: float
    tokens: int
    """Sampled tokens."""
    episodes: int
    failed: Mapping[str, int]
    """Kind of failure → episodes."""
    newest: Mapping[str, int]
    """policy → newest version that sampled a token."""


@dataclass(frozen=True)
class ShardLog:
    played: tuple[PlayedShard, ...]
    """In the order of their numbers."""
    num_orders: int
    """Orders of the run; more than `played` where the log is a sample."""

    @property
    def share(self) -> float:
        """Share of the run's orders in the log: sums over the log are divided by it."""
        return min(1.0, SHARDS_READ_MAX / self.num_orders) if self.num_orders else 1.0


def read_shard_log(run: ObjectStore, limit: int = SHARDS_READ_MAX) -> ShardLog:
    """Summarize every shard, or `limit` of them evenly spread; unreadable ones are left out."""
    num_orders = orders.next_number(run)
    with ThreadPoolExecutor(READERS, thread_name_prefix="shards") as pool:
        read = list(pool.map(lambda number: _played(run, number), sample(num_orders, limit)))
    return ShardLog(tuple(shard for shard in read if shard is not None), num_orders)


def throughput(
    log: ShardLog, start_s: float, buckets: int = 60
) -> tuple[list[float], dict[str, list[float]]]:
    """Sampled tokens per second over time, by region.

    Returns the middles of `buckets` equal spans of time, in minutes since `start_s`, and region →
    rate in each span. A shard's tokens are spread evenly over its time.
    """
    if not log.played:
        return [], {}
    end_s = max(max(shard.finished_s for shard in log.played), start_s + 1e-3)
    edges = np.linspace(start_s, end_s, buckets + 1)
    rates: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for shard in log.played:
        span_s = max(shard.finished_s - shard.started_s, 1e-3)
        overlap_s = np.minimum(edges[1:], shard.started_s + span_s) - np.maximum(
            edges[:-1], shard.started_s
        )
        tokens = np.clip(overlap_s, 0.0, None) / span_s * shard.tokens
        rates[shard.region] = (
            rates.get(shard.region, np.zeros(buckets)) + tokens / np.diff(edges) / log.share
        )
    middles = ((edges[:-1] + edges[1:]) / 2 - start_s) / 60
    return middles.tolist(), {region: values.tolist() for region, values in sorted(rates.items())}


def by_worker(played: Sequence[PlayedShard]) -> dict[str, list[PlayedShard]]:
    """Worker → its shards in order of start; workers in the order of region and name."""
    lanes: dict[str, list[PlayedShard]] = {}
    for shard in sorted(played, key=lambda shard: (shard.region, shard.worker, shard.started_s)):
        lanes.setdefault(shard.worker, []).append(shard)
    return lanes


def _played(run: ObjectStore, number: int) -> PlayedShard | None:
    try:
        shard = shards.read(run, number)
    except (NotFoundError, *UNREADABLE):
        return None
    episodes = list(_episodes(shard))
    return PlayedShard(
        order=shard.order,
        worker=shard.worker,
        region=shard.region,
        started_s=shard.started_s,
        finished_s=shard.finished_s,
        tokens=shard.num_sampled,
        episodes=len(episodes),
        failed=failures_by_kind(episodes),
        newest={policy: max(versions) for policy, versions in shard.weights.items() if versions},
    )


def _episodes(shard: Shard) -> Iterator[Episode]:
    return (episode for group in shard.groups for episode in group.episodes)
