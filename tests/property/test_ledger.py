"""The ledger balances and no sequence is used twice, for any arrival order and any crash of the
dataflow.
"""

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from data_ops.algorithms.samplers import Edf, Fifo
from data_ops.dataflow.ledger import Ledger
from storage.records.batches import Batch, BatchRow, LedgerEntry, SequenceKey
from tests.support.runs.builders import row

BATCH_SIZE = 3
MAX_STALENESS = 2
ORDERS = 24


@dataclass(frozen=True)
class Answer:
    """The content of one shard for the policy."""

    rows: tuple[BatchRow, ...]
    entries: tuple[LedgerEntry, ...]

    @property
    def keys(self) -> list[SequenceKey]:
        return [kept.key for kept in self.rows] + [entry.key for entry in self.entries]


class LedgerMachine(RuleBasedStateMachine):
    """Model of a dataflow: `shards` and `committed` are the store; `ledger` is in memory and lost
    in a crash.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[int, Answer] = {}
        self.committed: list[Batch] = []
        self.ledger = Ledger("solver", BATCH_SIZE, MAX_STALENESS)

    @rule(
        order=st.integers(0, ORDERS - 1),
        ages=st.lists(st.integers(0, MAX_STALENESS + 2), max_size=5),
        num_filtered=st.integers(0, 2),
    )
    def a_shard_arrives(self, order: int, ages: list[int], num_filtered: int) -> None:
        if order in self.shards:
            return
        versions = [max(0, len(self.committed) - age) for age in ages]
        rows = tuple(
            row(SequenceKey(order, 0, place, 0), version=version)
            for place, version in enumerate(versions)
        )
        entries = tuple(
            LedgerEntry(SequenceKey(order, 1, n, 0), "filtered", "zero_advantage")
            for n in range(num_filtered)
        )
        self.shards[order] = Answer(rows, entries)

    @rule(newest_first=st.booleans())
    def it_is_ingested(self, newest_first: bool) -> None:
        waiting = [order for order in self.shards if not self.ledger.is_closed(order)]
        for order in sorted(waiting, reverse=newest_first)[:2]:
            assert self.ledger.ingest(order, self.shards[order].rows, self.shards[order].entries)

    @rule(dies=st.booleans(), fifo=st.booleans())
    def a_batch_is_made(self, dies: bool, fifo: bool) -> None:
        batch = self.ledger.assemble([Fifo() if fifo else Edf()], 0, lambda count: ())
        assert (batch is None) == (self.ledger.num_waiting < BATCH_SIZE)
        if batch is None:
            return
        self.committed.append(batch)
        if dies:
            self.it_dies()
        else:
            self.ledger.advance(batch)

    @precondition(lambda self: self.shards)
    @rule()
    def it_dies(self) -> None:
        newest = self.committed[-1] if self.committed else None
        self.ledger = Ledger.restore("solver", BATCH_SIZE, MAX_STALENESS, newest, self._rows_of)

    def _rows_of(self, order: int) -> dict[SequenceKey, BatchRow]:
        return {kept.key: kept for kept in self.shards[order].rows}

    def _settled(self) -> Counter[SequenceKey]:
        rows = (kept.key for batch in self.committed for kept in batch.rows)
        return Counter(rows) + Counter(
            entry.key for batch in self.committed for entry in batch.ledger
        )

    @invariant()
    def every_sequence_has_one_place_in_memory(self) -> None:
        closed = [
            key
            for order, answer in self.shards.items()
            if self.ledger.is_closed(order)
            for key in answer.keys
        ]
        places = self._settled()
        places.update(kept.key for kept in self.ledger.waiting)
        places.update(entry.key for entry in self.ledger.entries)
        assert places == Counter(closed)

    @invariant()
    def every_sequence_has_one_place_in_the_store(self) -> None:
        if not self.committed:
            return
        newest = self.committed[-1]
        ingested = [order for batch in self.committed for order in batch.shards]
        assert sorted(ingested) == sorted({*range(newest.closed_below), *newest.closed})
        places = self._settled()
        places.update(newest.waiting)
        assert places == Counter(key for order in ingested for key in self.shards[order].keys)

    @invariant()
    def no_row_is_too_stale_and_every_batch_is_whole(self) -> None:
        for step, batch in enumerate(self.committed, start=1):
            assert batch.step == step
            assert len(batch.rows) == BATCH_SIZE
            assert all(step - 1 - kept.min_version <= MAX_STALENESS for kept in batch.rows)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLedger = LedgerMachine.TestCase
