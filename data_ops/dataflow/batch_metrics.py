"""The `dataflow/…` metrics of one policy's batches.

`IngestMetrics` are means over everything that was ingested since the batch before, such as
`dataflow/reward/mean`, which counts every sequence before any filter. `batch_metrics` are those of
the batch's own rows, such as `dataflow/reward/batch_mean`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from data_ops.dataflow.shard_ingest import EpisodeOutcome, IngestedGroups, IngestedShard
from storage.records.batches import Batch
from storage.records.rollouts import NOT_RECORDED, FailureKind, failures_by_kind

ACCURACIES = ("first_attempt", "final")
"""Episode metrics that are 1.0 or 0.0, correct or not."""

FAILED_SHARE = "dataflow/failed_share/"
"""Followed by the kind of failure; from its first occurrence on."""
_KINDS = (*FailureKind, NOT_RECORDED)
_INGEST_NAMES = frozenset(
    (
        *("dataflow/reward/mean", "dataflow/groups_kept_share", "dataflow/episodes_failed_share"),
        *(FAILED_SHARE + kind for kind in _KINDS),
        *(f"dataflow/accuracy/{name}" for name in ACCURACIES),
    )
)

Metrics = Mapping[str, float]


class IngestMetrics:
    """Running sums over what was ingested for one policy since its newest batch."""

    def __init__(self, newest: Metrics | None = None) -> None:
        """`newest`: metrics of the newest batch, repeated while nothing new is ingested, so that no
        curve has holes.
        """
        self._last = {
            name: value for name, value in (newest or {}).items() if name in _INGEST_NAMES
        }
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def clear(self) -> None:
        """Begin the sums anew: a batch was made."""
        self._last = self.metrics()
        self._sums, self._counts = {}, {}

    def add(self, groups: IngestedGroups, shard: IngestedShard) -> None:
        """Add the policy's groups of a shard."""
        self._count("dataflow/reward/mean", groups.rewards.sum(), len(groups.rewards))
        self._count("dataflow/groups_kept_share", groups.num_groups_kept, groups.num_groups)
        episodes = shard.episodes
        failures = failures_by_kind(episodes)
        self._count("dataflow/episodes_failed_share", failures.total(), len(episodes))
        for kind in _KINDS:
            self._count(FAILED_SHARE + kind, failures[kind], len(episodes))
        for name in ACCURACIES:
            values = list(_measured(episodes, name))
            self._count(f"dataflow/accuracy/{name}", sum(values), len(values))

    def metrics(self) -> dict[str, float]:
        """Return the means since the last `clear`; those before it where nothing was added."""
        means = {name: self._sums[name] / count for name, count in self._counts.items()}
        return self._last | {
            name: mean
            for name, mean in means.items()
            if mean or name in self._last or not name.startswith(FAILED_SHARE)
        }

    def _count(self, name: str, total: float, count: int) -> None:
        if count:
            self._sums[name] = self._sums.get(name, 0.0) + float(total)
            self._counts[name] = self._counts.get(name, 0) + count


def batch_metrics(batch: Batch, finished_s: Mapping[int, float], now_s: float) -> dict[str, float]:
    """Return the metrics of a batch's rows and ledger.

    `finished_s` is when the worker finished each order, by the worker's clock, and `now_s` this
    machine's time: where clocks disagree, `dataflow/shard_to_batch_s` is off by as much (and never
    below 0).
    """
    fresh = [row for row in batch.rows if not row.replay]
    staleness = [batch.step - 1 - row.min_version for row in fresh]
    orders = {row.key.order for row in fresh}
    latencies = [max(0.0, now_s - finished_s[order]) for order in orders if order in finished_s]
    fates = [entry.fate for entry in batch.ledger]
    return {
        "dataflow/reward/batch_mean": float(np.mean([row.reward for row in batch.rows])),
        "dataflow/length/mean": float(np.mean([row.loss_mask.sum() for row in batch.rows])),
        "dataflow/filtered": float(fates.count("filtered")),
        "dataflow/expired": float(fates.count("expired")),
        "dataflow/waiting": float(len(batch.waiting)),
        "dataflow/replayed": float(len(batch.rows) - len(fresh)),
        **_spread("dataflow/staleness", staleness, {"mean": np.mean, "max": np.max, "p90": _p90}),
        **_spread(
            "dataflow/shard_to_batch_s", latencies, {"min": np.min, "p50": np.median, "max": np.max}
        ),
    }


def _spread(
    name: str, values: list[float] | list[int], stats: Mapping[str, Callable[[Any], Any]]
) -> dict[str, float]:
    return {f"{name}/{stat}": float(of(values)) for stat, of in stats.items()} if values else {}


def _p90(values: list[float] | list[int]) -> float:
    return float(np.quantile(values, 0.9))


def _measured(episodes: Iterable[EpisodeOutcome], name: str) -> Iterable[float]:
    return (
        episode.metrics[name]
        for episode in episodes
        if episode.error is None and name in episode.metrics
    )
