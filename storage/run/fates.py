"""What became of a policy's sequences, counted from its batches and from the shards of the run.

    batches ──of_batch──▶ BatchFates ─┐
    shards ──▶ number of sequences ───┴─ledger_counts──▶ LedgerCounts

`verify`, the report and `astraflow episodes` count with these functions, so that their numbers
agree.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from storage.records.batches import Batch, Fate
from storage.records.rollouts import Shard


@dataclass(frozen=True)
class BatchFates:
    """The counts of one batch.

    Example: `BatchFates({("trained", ""): 64}, waiting=7, ingested=(3,))`.
    """

    fates: Mapping[tuple[Fate, str], int]
    """(fate, reason) → sequences since the batch before."""
    waiting: int
    """Sequences that wait after the batch."""
    ingested: tuple[int, ...]
    """Orders whose shards were ingested since the batch before."""


@dataclass(frozen=True, kw_only=True)
class LedgerCounts:
    """Number of batches, and of sequences with tokens of a policy by their fate."""

    batches: int = 0
    trained: int = 0
    replayed: int = 0
    filtered: int = 0
    expired: int = 0
    waiting: int = 0
    """Not decided yet: waiting after the last batch, or in a shard that no batch ingested."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Reason → filtered sequences."""


def of_batch(batch: Batch) -> BatchFates:
    """Count the fates in one batch."""
    fates: Counter[tuple[Fate, str]] = Counter(
        ("replayed" if row.replay else "trained", "") for row in batch.rows
    )
    fates.update((entry.fate, entry.reason) for entry in batch.ledger)
    return BatchFates(fates, len(set(batch.waiting)), batch.shards)


def sequences_by_policy(shard: Shard) -> Counter[str]:
    """Count the sequences of a shard by each policy that sampled a token in them."""
    return Counter(
        policy
        for group in shard.groups
        for episode in group.episodes
        for sequence in episode.sequences
        for policy, _ in sequence.sampled_by()
    )


def ledger_counts(
    num_batches: int, counted: Iterable[BatchFates], sequences: Mapping[int, int]
) -> LedgerCounts:
    """Sum up one policy's batches, and the sequences that no batch has ingested.

    Args:
        num_batches: batches that exist, readable or not.
        counted: the readable ones, in their order.
        sequences: order → sequences with tokens of the policy, of each shard that can be read and
            is not in quarantine.
    """
    fates: Counter[tuple[Fate, str]] = Counter()
    ingested: set[int] = set()
    waiting = 0
    for batch in counted:
        fates.update(batch.fates)
        ingested.update(batch.ingested)
        waiting = batch.waiting
    by_fate: Counter[Fate] = Counter()
    for (fate, _), count in fates.items():
        by_fate[fate] += count
    not_ingested = sum(count for order, count in sequences.items() if order not in ingested)
    return LedgerCounts(
        batches=num_batches,
        trained=by_fate["trained"],
        replayed=by_fate["replayed"],
        filtered=by_fate["filtered"],
        expired=by_fate["expired"],
        waiting=waiting + not_ingested,
        reasons={reason: count for (fate, reason), count in fates.items() if fate == "filtered"},
    )
