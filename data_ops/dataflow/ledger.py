"""One policy's ledger: closed orders, waiting rows, and the fates of all other sequences.

    ingest ──▶ waiting ──draft──▶ assemble ──▶ Batch (committed by the caller) ──▶ advance
                  └── expire ──▶ entries ─────────┘

Every sequence enters once, because its order is closed from then on, and is always in exactly one
place: waiting, an entry of a batch (made or still to be made), or a row of a batch. A batch carries
all that the next ledger needs, so a ledger is restored from the newest batch alone. No I/O.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from data_ops.algorithms.protocols import Sample, calling
from data_ops.algorithms.samplers import Draft
from storage.errors import ConfigError, CorruptError
from storage.records.batches import Batch, BatchRow, LedgerEntry, SequenceKey

TABLE_ROWS_MAX = 2**18
"""Sequences that one batch lists: its rows, final fates and waiting sequences. Those of further
orders are listed in later batches. Readers accept more (`storage.formats.arrow_sizes.ROWS_MAX`),
for the orders whose rows the batch uses.
"""
EXPIRED_REASON = "max_staleness"
UNREADABLE_SHARD = "unreadable_shard"

RowsOf = Callable[[int], Mapping[SequenceKey, BatchRow]]
"""All rows of this policy in the shard of an order (`shard_ingest.all_rows`); empty when the shard
is unreadable.
"""


class Ledger:
    """The ledger of one policy between two batches.

    Only `advance` begins the next batch: nothing changes when the commit of a batch fails.
    """

    def __init__(self, policy: str, batch_size: int, max_staleness: int) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.last_step = 0
        """Newest batch."""
        self.closed_below = 0
        """Every order below this one has been ingested."""
        self.left_out_by = ""
        """Class of the sampler that left out so many of enough rows that no batch was made."""
        self._closed: set[int] = set()
        self._waiting: dict[SequenceKey, BatchRow] = {}
        self._entries: list[LedgerEntry] = []
        self._ingested: list[int] = []

    @classmethod
    def restore(
        cls, policy: str, batch_size: int, max_staleness: int, newest: Batch | None, rows_of: RowsOf
    ) -> "Ledger":
        """Return the ledger as it was right after `newest` was made.

        `rows_of` is called for the shards of its `waiting` keys alone. A waiting row whose shard
        became unreadable is filtered as `unreadable_shard`.
        """
        ledger = cls(policy, batch_size, max_staleness)
        if newest is None:
            return ledger
        ledger.last_step = newest.step
        ledger.closed_below, ledger._closed = newest.closed_below, set(newest.closed)
        rows = {order: rows_of(order) for order in sorted({key.order for key in newest.waiting})}
        for key in newest.waiting:
            row = rows[key.order].get(key)
            if row is None:
                ledger._entries.append(LedgerEntry(key, "filtered", UNREADABLE_SHARD))
            else:
                ledger._waiting[key] = row
        return ledger

    @property
    def next_step(self) -> int:
        return self.last_step + 1

    @property
    def waiting(self) -> tuple[BatchRow, ...]:
        """The waiting rows, in arrival order."""
        return tuple(self._waiting.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Final fates since the newest batch."""
        return tuple(self._entries)

    def is_closed(self, order: int) -> bool:
        return order < self.closed_below or order in self._closed

    def ingest(
        self, order: int, rows: Iterable[BatchRow] = (), entries: Iterable[LedgerEntry] = ()
    ) -> bool:
        """Close `order` with all of its sequences; an unreadable shard has none.

        Return False, and change nothing, when the order is closed already.
        """
        if self.is_closed(order):
            return False
        self._closed.add(order)
        while self.closed_below in self._closed:
            self._closed.remove(self.closed_below)
            self.closed_below += 1
        self._ingested.append(order)
        self._waiting.update((row.key, row) for row in rows)
        self._entries.extend(entries)
        return True

    def expire(self) -> int:
        """Drop the waiting rows that are too stale for the next batch, which is trained at version
        `last_step`; return how many.
        """
        stale = [
            key
            for key, row in self._waiting.items()
            if self.last_step - row.min_version > self.max_staleness
        ]
        for key in stale:
            del self._waiting[key]
            self._entries.append(LedgerEntry(key, "expired", EXPIRED_REASON))
        return len(stale)

    def draft(self, seed: int, trained: Callable[[int], tuple[BatchRow, ...]]) -> Draft:
        """Return what the next batch may be made of, after `expire`."""
        draw = np.random.default_rng([seed, zlib.crc32(self.policy.encode()), self.next_step])
        return Draft(
            policy=self.policy,
            step=self.next_step,
            size=self.batch_size,
            rows=self.waiting,
            replays=(),
            trained=trained,
            draw=draw,
        )

    def assemble(
        self, samplers: Sequence[Sample], seed: int, trained: Callable[[int], tuple[BatchRow, ...]]
    ) -> Batch | None:
        """Return the next batch, of exactly `batch_size` rows, without metrics and time; None while
        there are too few rows.

        `trained(n)` returns rows of earlier batches for replay algorithms. Rows go on waiting until
        `advance`.
        """
        offered: set[BatchRow] = set()

        def candidates(count: int) -> tuple[BatchRow, ...]:
            rows = trained(count)
            offered.update(rows)
            return rows

        self.expire()
        draft = self.draft(seed, candidates)
        self.left_out_by = ""
        for sampler in reversed(samplers):
            with calling(sampler, "arrange", CorruptError):  # `trained` reads batches
                arranged = sampler.arrange(draft)
            draft = _checked(arranged, sampler)
            _check_replays(draft.replays, offered, sampler)
            num_left = len(draft.replays) + len(draft.rows)
            if num_left < self.batch_size <= self.num_waiting and not self.left_out_by:
                self.left_out_by = type(sampler).__name__
        replays = draft.replays[: self.batch_size]
        fresh = draft.rows[: self.batch_size - len(replays)]
        if len(replays) + len(fresh) < self.batch_size:
            return None
        self._check_fresh(fresh)
        used = {row.key for row in fresh}
        deferred = self._deferred(fresh, len(replays))
        closed_below = min((self.closed_below, *deferred))
        closed = (self._closed | set(range(closed_below, self.closed_below))) - deferred
        return Batch(
            policy=self.policy,
            step=self.next_step,
            rows=(*(_as_replay(row) for row in replays), *fresh),
            ledger=tuple(entry for entry in self._entries if entry.key.order not in deferred),
            waiting=tuple(
                key for key in self._waiting if key not in used and key.order not in deferred
            ),
            shards=tuple(order for order in self._ingested if order not in deferred),
            closed_below=closed_below,
            closed=tuple(sorted(closed)),
        )

    def advance(self, batch: Batch) -> None:
        """Begin the next batch: this one is committed, with its rows and its ledger."""
        if batch.step != self.next_step or batch.policy != self.policy:
            raise ValueError(
                f"batch {batch.step} of {batch.policy} does not follow batch {self.last_step} of "
                f"{self.policy}"
            )
        for row in batch.rows:
            if not row.replay:
                del self._waiting[row.key]
        deferred = set(self._ingested) - set(batch.shards)
        self._entries = [entry for entry in self._entries if entry.key.order in deferred]
        self._ingested = [order for order in self._ingested if order in deferred]
        self.last_step = batch.step

    def _deferred(self, fresh: Sequence[BatchRow], num_replays: int) -> set[int]:
        """Return ingested orders whose sequences do not fit the next batch; the oldest fit first.

        The batch uses none of their rows. For its readers such an order is not ingested yet: a
        later batch lists it, and a restart before that ingests it again.
        """
        used = {row.key.order for row in fresh}
        candidates = [order for order in self._ingested if order not in used]
        sizes = Counter(key.order for key in self._waiting)
        sizes.update(entry.key.order for entry in self._entries)
        num_listed = num_replays + sizes.total() - sum(sizes[order] for order in candidates)
        deferred: set[int] = set()
        for order in candidates:
            if num_listed + sizes[order] > TABLE_ROWS_MAX:
                deferred.add(order)
            else:
                num_listed += sizes[order]
        return deferred

    def _check_fresh(self, fresh: Sequence[BatchRow]) -> None:
        """Raise ConfigError when samplers use a waiting sequence twice, or one that does not wait,
        or that they have changed.
        """
        keys = [row.key for row in fresh]
        if len(set(keys)) < len(keys) or any(
            self._waiting.get(row.key) is not row for row in fresh
        ):
            raise ConfigError(
                f"data.sample put a row into batch {self.next_step} of {self.policy} twice, or one "
                "that does not wait or was changed; "
                "a sampler may only reorder and leave out Draft.rows (replays go into "
                "Draft.replays)"
            )


def _checked(draft: object, sampler: Sample) -> Draft:
    """Return a sampler's draft; ConfigError, naming the sampler, for anything else."""
    if isinstance(draft, Draft) and all(
        isinstance(rows, tuple) and all(isinstance(row, BatchRow) for row in rows)
        for rows in (draft.rows, draft.replays)
    ):
        return draft
    raise ConfigError(
        f"the sampler {type(sampler).__name__} of data.sample returned no Draft whose rows and "
        "replays are tuples of rows"
    )


def _check_replays(replays: Sequence[BatchRow], offered: set[BatchRow], sampler: Sample) -> None:
    """Raise ConfigError, naming the sampler, for a replay that `Draft.trained` has not returned, or
    that is one of several of its sequence.
    """
    if len({row.key for row in replays}) < len(replays) or not offered.issuperset(replays):
        raise ConfigError(
            f"the sampler {type(sampler).__name__} of data.sample replays a row twice, or one that "
            "Draft.trained did not return or that was changed; a sampler may only take "
            "Draft.replays from Draft.trained, each row once"
        )


def _as_replay(row: BatchRow) -> BatchRow:
    return row if row.replay else replace(row, replay=True)
