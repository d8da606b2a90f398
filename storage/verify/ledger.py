"""Invariants 1, 2, 5, 6 and 7 over one policy's batches: a fold that holds every entry of the books
against the shards.

waiting ─┬─ + sequences of the shards that batch n took in
         ├─ − trained (rows), filtered, expired (ledger)       ⇒  must equal what batch n says still waits
         └─ a fate for a sequence that does not wait is a fault: twice, too early, or never played
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from storage import layout
from storage.errors import AstraFlowError, TransientError
from storage.records.batches import Batch, BatchRow, SequenceKey
from storage.run import batches
from storage.store.object_store import ObjectStore
from storage.verify.missing_numbers import gaps
from storage.verify.shards import ShardAudit, row_digest

Broken = Callable[[int, str, str], None]
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Terms:
    """What the run promises of a policy. Example of a completed run of 80 steps:
    `Terms(128, 8, 80)`.
    """

    batch_size: int
    """Rows of every batch."""
    max_staleness: int
    due: int
    """The batch and the version that must exist, with all before them; −1 where none must, yet."""


@dataclass(frozen=True, kw_only=True)
class PolicyBooks:
    """What became of the sequences that hold tokens of a policy."""

    batches: int = 0
    trained: int = 0
    replayed: int = 0
    filtered: int = 0
    expired: int = 0
    waiting: int = 0
    """Not yet decided: waiting after the last batch, or in a shard that no batch has taken in."""


@dataclass(kw_only=True)
class _Fold:
    """The books as the objects so far imply them."""

    waiting: set[SequenceKey] = field(default_factory=set)
    settled: dict[SequenceKey, str] = field(default_factory=dict)
    """sequence → key of the batch that settled it."""
    trained: set[SequenceKey] = field(default_factory=set)
    taken_in: set[int] = field(default_factory=set)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("trained", "replayed", "filtered", "expired"), 0)
    )


def audit_books(
    run: ObjectStore,
    policy: str,
    steps: Sequence[int],
    terms: Terms,
    audit: ShardAudit,
    set_aside: Mapping[str, str],
    broken: Broken,
    progress: Progress,
) -> PolicyBooks:
    """Fold over the policy's batches, whose numbers `steps` are, in order, and report what does not
    fit.
    """
    known = audit.seen_by.get(policy, {})
    fold = _Fold()
    last = max([0, *steps])
    missing = gaps(steps, 1, max(last, terms.due) + 1)
    for step in missing.first:
        why = f"batch {last} exists" if step < last else "and the run is completed"
        broken(1, layout.batch(policy, step), f"batch {step} is missing, {why}")
    if missing.more:
        broken(1, f"{layout.BATCHES}/{policy}", f"and {missing.more:,} more batches are missing")
    for at, step in enumerate(steps):
        progress(f"batches of {policy}", (at + 1) / len(steps))
        where = layout.batch(policy, step)
        try:
            batch = batches.read(run, policy, step)
        except TransientError:
            raise
        except AstraFlowError as error:
            broken(1, where, str(error))
            continue
        if len(batch.rows) != terms.batch_size:
            broken(
                1,
                where,
                f"has {len(batch.rows)} rows; every batch of {policy} has {terms.batch_size}",
            )
        _take_in(batch, where, known, fold, audit, set_aside, broken)
        _settle(batch, where, known, fold, terms.max_staleness, broken)
        _compare_waiting(batch, where, fold, broken)
    untouched = sum(
        len(sequences) for order, sequences in known.items() if order not in fold.taken_in
    )
    return PolicyBooks(batches=len(steps), waiting=len(fold.waiting) + untouched, **fold.counts)


def _take_in(
    batch: Batch,
    where: str,
    known: Mapping[int, Mapping[SequenceKey, str]],
    fold: _Fold,
    audit: ShardAudit,
    set_aside: Mapping[str, str],
    broken: Broken,
) -> None:
    for order in batch.shards:
        if order in fold.taken_in:
            broken(6, where, f"takes in shard {order} a second time")
            continue
        if order not in audit.readable and layout.shard(order) not in set_aside:
            broken(6, where, f"took in shard {order}, which does not exist or cannot be read")
        fold.taken_in.add(order)
        fold.waiting |= known.get(order, {}).keys()
    # Counted, not listed: `closed_below` may say anything.
    beyond = {order for order in fold.taken_in if order >= batch.closed_below}
    closed_beyond = {order for order in batch.closed if order >= batch.closed_below}
    if closed_beyond != beyond or len(fold.taken_in) - len(beyond) != batch.closed_below:
        num_closed = batch.closed_below + len(closed_beyond)
        broken(
            6,
            where,
            f"counts {num_closed} shards as taken in; the batches up to it name "
            f"{len(fold.taken_in)}",
        )


def _settle(
    batch: Batch,
    where: str,
    known: Mapping[int, Mapping[SequenceKey, str]],
    fold: _Fold,
    max_staleness: int,
    broken: Broken,
) -> None:
    for row in batch.rows:
        _check_row(batch.step, row, where, known, max_staleness, broken)
        if row.replay:
            fold.counts["replayed"] += 1
            if row.key not in fold.trained:
                broken(2, where, f"replays {_name(row.key)}, which was never trained on")
            continue
        _close(row.key, "trained", where, fold, broken)
        fold.trained.add(row.key)
    for entry in batch.ledger:
        _close(entry.key, entry.fate, where, fold, broken)


def _close(key: SequenceKey, fate: str, where: str, fold: _Fold, broken: Broken) -> None:
    """A waiting sequence gets its one fate."""
    fold.counts[fate] += 1
    if key in fold.waiting:
        fold.waiting.discard(key)
    elif key in fold.settled:
        broken(
            2 if fate == "trained" else 6,
            where,
            f"{_name(key)} is {fate}, but {fold.settled[key]} had settled it",
        )
    else:
        broken(6, where, f"{_name(key)} is {fate}, but no shard taken in so far holds it")
    fold.settled[key] = where


def _check_row(
    step: int,
    row: BatchRow,
    where: str,
    known: Mapping[int, Mapping[SequenceKey, str]],
    max_staleness: int,
    broken: Broken,
) -> None:
    stored = known.get(row.key.order, {}).get(row.key)
    if stored is not None and stored != row_digest(row):
        broken(7, where, f"{_name(row.key)} is not as its shard holds it")
    if not np.isfinite(row.advantages).all():
        broken(7, where, f"{_name(row.key)} has an advantage that is not a finite number")
    trained = row.versions[row.loss_mask]
    if not trained.size:
        return
    newest, staleness = int(np.max(trained)), step - 1 - row.min_version
    if staleness > max_staleness and not row.replay:
        broken(
            5,
            where,
            f"{_name(row.key)} has staleness {staleness}; at most {max_staleness} is allowed",
        )
    if newest > step - 1:
        broken(
            5,
            where,
            f"{_name(row.key)} has tokens of version {newest}, which batch {step} cannot know",
        )


def _compare_waiting(batch: Batch, where: str, fold: _Fold, broken: Broken) -> None:
    listed = set(batch.waiting)
    for key in sorted(fold.waiting - listed):
        broken(6, where, f"{_name(key)} has vanished: no fate, and not waiting")
    for key in sorted(listed - fold.waiting):
        broken(
            6, where, f"{_name(key)} is listed as waiting, but it is settled or was never taken in"
        )
    # What the batch says is where the dataflow went on from; following it keeps one fault from
    # being reported at every step.
    fold.waiting = listed


def _name(key: SequenceKey) -> str:
    return f"order {key.order}, prompt {key.group}, episode {key.episode}, sequence {key.sequence}"
