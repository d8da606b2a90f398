"""The fate of every sequence of a run, from the batches of all policies.

Tens of bytes are kept of a sequence, in one array that is sorted by order. Batches are read before
shards are listed: what a batch names exists then, and later shards wait.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from storage import layout
from storage.errors import UNREADABLE, NotFoundError
from storage.records.batches import Batch, SequenceKey
from storage.records.types import Int64
from storage.run import batches
from storage.store.object_store import ObjectStore
from storage.store.ordered_map import ordered_map

READERS = 8
WAITING, TRAINED, REPLAYED, UNKNOWN = "waiting", "trained", "replayed", "unknown"
NOT_INGESTED = "not_ingested"
NOT_LISTED = "not_listed"


class SequenceFate(NamedTuple):
    """The fate of one sequence for one policy. Example: `SequenceFate("trained", "", 7, ())`."""

    fate: str
    """`trained`, `filtered`, `expired`, `waiting`; `unknown` when no readable batch has it."""
    reason: str
    """Of `filtered` and `expired`: as in the ledger. Of `waiting`: `not_ingested` when no batch has
    ingested the shard; else empty.
    """
    batch: int
    """The batch that gave it this fate; 0 for none."""
    replays: tuple[int, ...]
    """Batches that replay it, each once, ascending."""


@dataclass(frozen=True)
class OrderFates:
    """The fates of one order's sequences."""

    settled: Mapping[tuple[str, SequenceKey], SequenceFate]
    ingested: frozenset[str]
    """Policies of which a batch has ingested the order."""

    def of(self, policy: str, key: SequenceKey) -> SequenceFate:
        """Return the fate of a sequence in which the policy sampled a token."""
        found = self.settled.get((policy, key))
        if found is not None:
            return found
        if policy in self.ingested:
            return SequenceFate(UNKNOWN, NOT_LISTED, 0, ())
        return SequenceFate(WAITING, NOT_INGESTED, 0, ())


class RunFates:
    """The fates of all sequences, as of the newest batches."""

    def __init__(self, run: ObjectStore) -> None:
        self.problems: list[str] = []
        """Batches that cannot be read."""
        self._policies: list[str] = []
        self._kinds: dict[tuple[str, str], int] = {}
        """(fate, reason) → its code in `_rows`."""
        self._ingested: dict[str, set[int]] = {}
        parts = [part for policy in _policies(run) for part in self._read(run, policy)]
        rows = np.concatenate([np.zeros((0, 7), dtype=np.int64), *parts])
        self._rows = rows[np.argsort(rows[:, 0], kind="stable")]
        """[N, 7] order, group, episode, sequence, policy, kind, batch; ascending by order."""
        self._names = list(self._kinds)

    def of_order(self, order: int) -> OrderFates:
        """Return the fates of one order's sequences."""
        orders = self._rows[:, 0]
        first, end = np.searchsorted(orders, order), np.searchsorted(orders, order, "right")
        settled: dict[tuple[str, SequenceKey], SequenceFate] = {}
        for *key, policy, kind, batch in self._rows[first:end].tolist():
            place = self._policies[policy], SequenceKey(*key)
            fate, reason = self._names[kind]
            settled[place] = _later(settled.get(place), SequenceFate(fate, reason, batch, ()))
        ingested = (policy for policy, orders in self._ingested.items() if order in orders)
        return OrderFates(settled, frozenset(ingested))

    def _read(self, run: ObjectStore, policy: str) -> Iterator[Int64]:
        """Yield the rows of every batch of one policy."""
        code = len(self._policies)
        self._policies.append(policy)
        self._ingested[policy] = set()
        waiting: list[SequenceKey] = []

        def read(step: int) -> tuple[int, "_BatchKeys | str"]:
            try:
                return step, _keys(batches.read(run, policy, step))
            except (NotFoundError, *UNREADABLE) as error:
                return step, str(error)

        steps = batches.steps(run, policy)
        with ordered_map(read, steps, threads=READERS, budget=2 * READERS) as results:
            for step, found in results:
                if isinstance(found, str):
                    self.problems.append(found)
                    continue
                self._ingested[policy].update(found.ingested)
                waiting = found.waiting
                yield self._rows_of(found.settled, code, step)
        yield self._rows_of([(key, WAITING, "") for key in waiting], code, 0)

    def _rows_of(
        self, settled: "list[tuple[SequenceKey, str, str]]", policy: int, step: int
    ) -> Int64:
        rows = [
            (*key, policy, self._kinds.setdefault((fate, reason), len(self._kinds)), step)
            for key, fate, reason in settled
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 7)


@dataclass(frozen=True)
class _BatchKeys:
    """What is kept of a batch."""

    settled: list[tuple[SequenceKey, str, str]]
    """(sequence, fate, reason)"""
    waiting: list[SequenceKey]
    ingested: tuple[int, ...]


def _keys(batch: Batch) -> _BatchKeys:
    rows = [(row.key, REPLAYED if row.replay else TRAINED, "") for row in batch.rows]
    entries = [(entry.key, str(entry.fate), entry.reason) for entry in batch.ledger]
    return _BatchKeys(rows + entries, list(batch.waiting), batch.shards)


def _policies(run: ObjectStore) -> list[str]:
    return [name for name in run.folders(layout.BATCHES) if layout.NAME.fullmatch(name)]


def _later(before: SequenceFate | None, new: SequenceFate) -> SequenceFate:
    """Return the fate of a sequence that a later row names: a first fate stays, and replays add."""
    if new.fate == REPLAYED:
        before = before or SequenceFate(UNKNOWN, NOT_LISTED, 0, ())
        if before.replays[-1:] == (new.batch,):  # a batch may have it thousands of times
            return before
        return before._replace(replays=(*before.replays, new.batch))
    if before is None or before.fate == UNKNOWN:
        return new._replace(replays=before.replays if before else ())
    return before
