"""Taking in one shard: read it, route it, drop what the filters drop, and put advantages on the
rest.

    shards/00000007.arrow ──read──▶ route ──▶ per policy: filters ──▶ advantages ──▶ Prepared ──▶ books

`prepare` is a pure function of stored objects and of the config: it may run anywhere, in parallel,
and again after a crash. This module knows nothing of what was taken in before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from data_ops.algorithms import filters
from data_ops.algorithms.advantages import AdvantageConfig, group_advantages
from data_ops.algorithms.policy_groups import PolicyGroup, route
from data_ops.algorithms.protocols import Filter
from data_ops.config import DataConfig
from storage.errors import CorruptError
from storage.records.batches import BatchRow, LedgerEntry, SequenceKey
from storage.records.rollouts import Shard
from storage.run import shards
from storage.store.object_store import ObjectStore

PARTIAL_GROUP = "partial_group"
NO_TRAINED_TOKEN = "no_trained_token"


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyIntake:
    """What one shard holds for one policy: every sequence is in `rows` or in `entries`."""

    rows: tuple[BatchRow, ...] = ()
    """Kept, with advantages."""
    entries: tuple[LedgerEntry, ...] = ()
    """Filtered, each with its reason."""
    rewards: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """[N] of every sequence that could be trained on, before filtering: what people want to watch.
    """
    num_groups: int = 0
    num_groups_kept: int = 0
    """Groups of which at least one row is kept."""


@dataclass(frozen=True, eq=False)
class IngestedShard:
    """One shard, ready for the books. An unreadable one has a `problem`, no `shard` and nothing for
    any policy.
    """

    order: int
    policies: Mapping[str, PolicyIntake]
    shard: Shard | None
    problem: str = ""


def prepare(
    run: ObjectStore, order: int, config: DataConfig, policies: Sequence[str]
) -> IngestedShard:
    """Take in the shard of `order`. Raises TransientError or NotFoundError of the store; unreadable
    bytes are an answer.
    """
    try:
        shard = shards.read(run, order)
    except CorruptError as error:
        return IngestedShard(order, {}, None, str(error))
    chain = filters(config.filter)
    routed = route(shard, policies)
    return IngestedShard(
        order, {policy: take_in(routed[policy], config, chain) for policy in policies}, shard
    )


def take_in(
    groups: Sequence[PolicyGroup], config: DataConfig, chain: Sequence[tuple[str, Filter]]
) -> PolicyIntake:
    """Filter one policy's groups of a shard, and give advantages to what is kept."""
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
    return PolicyIntake(
        rows=tuple(rows),
        entries=tuple(entries),
        rewards=rewards,
        num_groups=len(groups),
        num_groups_kept=num_groups_kept,
    )


def with_advantages(group: PolicyGroup, config: AdvantageConfig) -> list[BatchRow]:
    """The group's rows, each with its one advantage on every token that is trained on.

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


def all_rows(shard: Shard, policy: str, config: DataConfig) -> dict[SequenceKey, BatchRow]:
    """Every row of one policy in the shard, whatever the filters say: what a restart finds its
    waiting rows in.
    """
    return {
        row.key: row
        for group in route(shard, [policy])[policy]
        for row in with_advantages(group, config.advantage)
    }


def _refusal(group: PolicyGroup, config: DataConfig, chain: Sequence[tuple[str, Filter]]) -> str:
    """Why the whole group is dropped; empty when it is kept."""
    if group.num_failed and not config.keep_partial_groups:
        return PARTIAL_GROUP
    if not group.rows:
        return ""
    return next((name for name, algorithm in chain if not algorithm.keep(group)), "")
