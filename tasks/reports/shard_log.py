"""The log of all shards: worker, time, tokens and failures of each, for lanes and throughput.

Times are those of the workers' clocks; they are used for figures only.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from storage import layout
from storage.errors import UNREADABLE, NotFoundError
from storage.records.rollouts import Episode, Shard, failures_by_kind
from storage.run import fates, shards
from storage.run.quarantine import is_set_aside, read_quarantine
from storage.store.object_store import ObjectStore
from tasks.monitoring.training_curves import READERS


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
    sequences: Mapping[str, int]
    """policy → sequences in which it sampled a token."""


@dataclass(frozen=True)
class ShardLog:
    """All shards that are not in quarantine."""

    played: tuple[PlayedShard, ...]
    """In the order of their numbers."""
    unreadable: tuple[int, ...] = ()
    """Orders whose shard cannot be read, and is not in quarantine."""

    def sequences(self, policy: str) -> dict[int, int]:
        """Return order → sequences in which the policy sampled a token."""
        return {
            shard.order: shard.sequences[policy]
            for shard in self.played
            if policy in shard.sequences
        }


def read_shard_log(run: ObjectStore, known: ShardLog = ShardLog(())) -> ShardLog:
    """Summarize every shard. Those of `known`, an earlier reading, are not read again."""
    quarantined = read_quarantine(run)
    numbers = layout.numbers(run.list(f"{layout.SHARDS}/"), layout.shard)
    seen = {shard.order: shard for shard in known.played}

    def read(number: int) -> PlayedShard | None:
        return seen.get(number) or _played(run, number)

    orders = [number for number in numbers if not is_set_aside(quarantined, number)]
    with ThreadPoolExecutor(READERS, thread_name_prefix="shards") as pool:
        played = tuple(shard for shard in pool.map(read, orders) if shard is not None)
    readable = {shard.order for shard in played}
    return ShardLog(played, tuple(order for order in orders if order not in readable))


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
        rates[shard.region] = rates.get(shard.region, np.zeros(buckets)) + tokens / np.diff(edges)
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
        sequences=fates.sequences_by_policy(shard),
    )


def _episodes(shard: Shard) -> Iterator[Episode]:
    return (episode for group in shard.groups for episode in group.episodes)
