"""When each worker played what: one line for each shard, and what follows from them (lanes,
throughput, play accuracy).

Times are the workers' own clocks; they draw pictures and decide nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from storage.errors import UNREADABLE, NotFoundError
from storage.records.rollouts import NOT_SAMPLED, Episode, Shard, failures_by_kind
from storage.run import orders, shards
from storage.store.object_store import ObjectStore
from tasks.monitoring.training_curves import READERS, sample

SHARDS_READ_MAX = 2000
"""Shards that one log reads; a longer run is sampled evenly."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """One shard in a line."""

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
    played: tuple[Played, ...]
    """In the order of their numbers."""
    num_orders: int
    """Orders of the run; more than were read when they were sampled."""

    @property
    def share(self) -> float:
        """Share of the run's orders that was read: sums over the log are divided by it."""
        return min(1.0, SHARDS_READ_MAX / self.num_orders) if self.num_orders else 1.0


def read_shard_log(run: ObjectStore, limit: int = SHARDS_READ_MAX) -> ShardLog:
    """Every finished order, or `limit` of them evenly spread; those that cannot be read are left
    out.
    """
    num_orders = orders.next_number(run)
    with ThreadPoolExecutor(READERS, thread_name_prefix="shards") as pool:
        found = list(pool.map(lambda number: _played(run, number), sample(num_orders, limit)))
    return ShardLog(tuple(one for one in found if one is not None), num_orders)


def throughput(
    log: ShardLog, start_s: float, buckets: int = 60
) -> tuple[list[float], dict[str, list[float]]]:
    """Middles of equal spans of time in minutes since `start_s`, and region → sampled tokens per
    second in each.

    A shard's tokens count evenly over the time it was played.
    """
    if not log.played:
        return [], {}
    end_s = max(max(one.finished_s for one in log.played), start_s + 1e-3)
    edges = np.linspace(start_s, end_s, buckets + 1)
    rates: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    for one in log.played:
        span_s = max(one.finished_s - one.started_s, 1e-3)
        overlap_s = np.minimum(edges[1:], one.started_s + span_s) - np.maximum(
            edges[:-1], one.started_s
        )
        tokens = np.clip(overlap_s, 0.0, None) / span_s * one.tokens
        rates[one.region] = (
            rates.get(one.region, np.zeros(buckets)) + tokens / np.diff(edges) / log.share
        )
    middles = ((edges[:-1] + edges[1:]) / 2 - start_s) / 60
    return middles.tolist(), {region: values.tolist() for region, values in sorted(rates.items())}


def by_worker(played: Sequence[Played]) -> dict[str, list[Played]]:
    """Worker → its shards in order of start; workers in the order of region and name."""
    lanes: dict[str, list[Played]] = {}
    for one in sorted(played, key=lambda one: (one.region, one.worker, one.started_s)):
        lanes.setdefault(one.worker, []).append(one)
    return lanes


def _played(run: ObjectStore, number: int) -> Played | None:
    try:
        shard = shards.read(run, number)
    except (NotFoundError, *UNREADABLE):
        return None
    episodes = list(_episodes(shard))
    return Played(
        order=shard.order,
        worker=shard.worker,
        region=shard.region,
        started_s=shard.started_s,
        finished_s=shard.finished_s,
        tokens=sum(
            int((s.owners != NOT_SAMPLED).sum()) for episode in episodes for s in episode.sequences
        ),
        episodes=len(episodes),
        failed=failures_by_kind(episodes),
        newest={policy: max(versions) for policy, versions in shard.weights.items() if versions},
    )


def _episodes(shard: Shard) -> Iterator[Episode]:
    return (episode for group in shard.groups for episode in group.episodes)
