"""Ingest one shard: read it, route it to the policies, filter its groups, compute advantages.

    shards/00000007.arrow ──read──▶ route ──▶ per policy: filters ──▶ advantages ──▶ IngestedShard

`ingest_shard` is a pure function of stored objects and of the config: it may run anywhere, in
parallel, and again after a crash. It has no state between two shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from data_ops.algorithms import filters
from data_ops.algorithms.advantages import AdvantageConfig, group_advantages
from data_ops.algorithms.policy_groups import ModelLimits, PolicyGroup, route
from data_ops.algorithms.protocols import Filter, calling, decision
from data_ops.config import DataConfig
from storage.errors import CorruptError
from storage.records.batches import BatchRow, LedgerEntry, SequenceKey
from storage.records.numbers import Number
from storage.records.rollouts import FailureKind, Shard
from storage.run import shards
from storage.store.object_store import ObjectStore

PARTIAL_GROUP = "partial_group"
NO_TRAINED_TOKEN = "no_trained_token"


@dataclass(frozen=True, eq=False, kw_only=True)
class IngestedGroups:
    """One policy's groups of a shard: every sequence is in `rows` or in `entries`."""

    rows: tuple[BatchRow, ...] = ()
    """Kept, with advantages."""
    entries: tuple[LedgerEntry, ...] = ()
    """Filtered, each with its reason."""
    rewards: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """[N] rewards of all sequences that could be trained on, before the filters: for metrics."""
    num_groups: int = 0
    num_groups_kept: int = 0
    """Groups of which at least one row is kept."""


@dataclass(frozen=True)
class EpisodeOutcome:
    """What the dataflow's metrics use of an episode."""

    error: str | None
    """Why the episode failed; None when it did not."""
    failure_kind: FailureKind | None
    """None where it did not fail, and where the worker recorded no kind."""
    metrics: Mapping[str, Number]


@dataclass(frozen=True, eq=False, kw_only=True)
class IngestedShard:
    """One shard, ready for the ledgers. One that is unreadable, or whose order is, has a `problem`
    and nothing else.
    """

    order: int
    problem: str = ""
    """Why the shard, or the order, cannot be read; empty when the shard was read."""
    policies: Mapping[str, IngestedGroups] = field(default_factory=dict)
    episodes: tuple[EpisodeOutcome, ...] = ()
    """Of all groups, in the shard's order."""
    num_groups: int = 0
    num_sampled: int = 0
    """Tokens that the policies sampled."""
    finished_s: float = 0.0
    """When the worker finished the order, by the worker's clock."""
    shard: Shard | None = None
    """The decoded shard where it was ingested by this process; None where another process did."""

    @classmethod
    def of(cls, shard: Shard, policies: Mapping[str, IngestedGroups]) -> "IngestedShard":
        """Return the ingested form of a shard, given each policy's groups of it."""
        return cls(
            order=shard.order,
            policies=policies,
            episodes=tuple(
                EpisodeOutcome(episode.error, episode.failure_kind, episode.metrics)
                for group in shard.groups
                for episode in group.episodes
            ),
            num_groups=len(shard.groups),
            num_sampled=shard.num_sampled,
            finished_s=shard.finished_s,
            shard=shard,
        )


def ingest_shard(
    run: ObjectStore,
    order: int,
    config: DataConfig,
    policies: Sequence[str],
    limits: Mapping[str, ModelLimits],
) -> IngestedShard:
    """Ingest the shard of `order` for `policies`, each with the limits of its model.

    A shard that cannot be read is a result, too. Raises TransientError or NotFoundError of the
    store.
    """
    try:
        shard = shards.read(run, order)
    except CorruptError as error:
        return IngestedShard(order=order, problem=str(error))
    chain = filters(config.filter)
    routed = route(shard, policies, limits)
    return IngestedShard.of(
        shard, {policy: ingest_groups(routed[policy], config, chain) for policy in policies}
    )


def ingest_groups(
    groups: Sequence[PolicyGroup], config: DataConfig, chain: Sequence[tuple[str, Filter]]
) -> IngestedGroups:
    """Filter one policy's groups of a shard, and compute the advantages of the kept rows."""
    rows: list[BatchRow] = []
    entries: list[LedgerEntry] = []
    num_groups_kept = 0
    for group in groups:
        entries.extend(group.refused)
        reason = _refusal(group, config, chain)
        if reason:
            entries.extend(LedgerEntry(row.key, "filtered", reason) for row in group.rows)
            continue
        kept = [row for row in with_advantages(group, config.advantage) if row.loss_mask.any()]
        entries.extend(
            LedgerEntry(row.key, "filtered", NO_TRAINED_TOKEN)
            for row in group.rows
            if not row.loss_mask.any()
        )
        num_groups_kept += bool(kept)
        rows.extend(kept)
    rewards = np.concatenate([group.rewards for group in groups]) if groups else np.zeros(0)
    return IngestedGroups(
        rows=tuple(rows),
        entries=tuple(entries),
        rewards=rewards,
        num_groups=len(groups),
        num_groups_kept=num_groups_kept,
    )


def with_advantages(group: PolicyGroup, config: AdvantageConfig) -> list[BatchRow]:
    """Return the group's rows, each with its one advantage on every token that is trained on.

    A row that is masked as a whole still counts in the group's mean and deviation: masking a cut
    answer must not make its siblings look worse.
    """
    if not group.rows:
        return []
    values = group_advantages(group.rewards, group.lengths, config)
    return [
        replace(row, advantages=np.where(row.loss_mask, np.float32(value), np.float32(0)))
        for row, value in zip(group.rows, values, strict=True)
    ]


def all_rows(
    shard: Shard, policy: str, config: DataConfig, limits: ModelLimits
) -> dict[SequenceKey, BatchRow]:
    """Return every row of one policy in the shard, before the filters.

    A restart selects the waiting rows from them. `limits` must be those of the ingestion: a row
    outside of them has no part in its group's mean and deviation.
    """
    return {
        row.key: row
        for group in route(shard, [policy], {policy: limits})[policy]
        for row in with_advantages(group, config.advantage)
    }


def _refusal(group: PolicyGroup, config: DataConfig, chain: Sequence[tuple[str, Filter]]) -> str:
    """Return why the whole group is dropped; empty when it is kept."""
    if group.num_failed and not config.keep_partial_groups:
        return PARTIAL_GROUP
    if not group.rows:
        return ""
    for name, algorithm in chain:
        with calling(algorithm, "keep"):
            if not decision(algorithm.keep(group)):
                return name
    return ""
