"""One policy's line from finished shards to committed batches: its books, yield, metrics and
weights version.

    Prepared ──take_in──▶ books ──▶ make_batches ──▶ batches/{policy}/…
                                └─▶ need ──▶ admission

This module knows nothing of prompts, orders to come, or other policies.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from textwrap import shorten

from data_ops.algorithms import samplers
from data_ops.algorithms.protocols import Sample
from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow.admission import Lag, Need, Yield
from data_ops.dataflow.batch_metrics import Intake, batch_metrics
from data_ops.dataflow.ledger import Ledger
from data_ops.dataflow.shard_ingest import IngestedShard, PolicyIntake, all_rows
from storage import layout
from storage.errors import CorruptError
from storage.records.batches import Batch, BatchRow, SequenceKey
from storage.records.rollouts import Shard, failures_by_kind
from storage.run import batches
from storage.store.object_store import ObjectStore
from storage.weights import manifests

REPLAY_BATCHES_MAX = 64
"""How far back replay algorithms can look."""

BARREN_GROUPS = 64
"""So many groups in a row without a row to train on are worth a word to a person: the run may go on
like this for ever.
"""
ERROR_CHARACTERS_MAX = 160
EQUAL_REWARDS = "all of a group's rewards were equal; prompts of another difficulty or more samples_per_prompt may help"
LEFT_OUT = "groups with a failed episode, or with equal rewards, are left out"

ReadShard = Callable[[int], Shard | None]
"""The shard of an order; None when its bytes cannot be read (any more)."""
Span = Callable[[str], AbstractContextManager[None]]


def no_span(component: str) -> AbstractContextManager[None]:
    """Measures nothing."""
    return nullcontext()


def complaint(assemblies: Iterable["BatchAssembly"]) -> str:
    """What a person should know of policies for which nothing that is played can be trained on, the
    same words once; empty when there is none.
    """
    policies: dict[tuple[int, str], list[str]] = {}
    for assembly in assemblies:
        if assembly.untrainable_groups[0]:
            policies.setdefault(assembly.untrainable_groups, []).append(assembly.policy)
    return "; ".join(
        f"the last {groups} groups held nothing to train {' or '.join(names)} on: {why}"
        for (groups, why), names in policies.items()
    )


class BatchAssembly:
    """Batches of one policy. After an error of the store every method may simply be called
    again.
    """

    def __init__(
        self,
        run: ObjectStore,
        policy: str,
        data: PolicyData,
        config: DataConfig,
        seed: int,
        read_shard: ReadShard,
        *,
        clock: Callable[[], float] = time.time,
        span: Span = no_span,
    ) -> None:
        """Goes on from the policy's newest batch; `read_shard` finds the rows that wait after it
        again.

        Raises CorruptError naming the batch when that cannot be read.
        """
        self.policy = policy
        self._run, self._data, self._config, self._seed = run, data, config, seed
        self._clock, self._span = clock, span
        self._samplers: Sequence[Sample] = samplers(config.sample)
        self.version: int | None = None
        """The newest weights known."""
        self.totals: Counter[str] = Counter()
        """Sequences by fate, in the batches made here."""
        self._yield = Yield(config.samples_per_prompt)
        self._lag = Lag()
        self._admitted: dict[int, int] = {}
        """Orders on the way → the newest version at their admission; those of an earlier process
        are not known.
        """
        self._barren = 0
        """Groups taken in since one was kept."""
        self._episodes = 0
        """Episodes of those groups."""
        self._failures: Counter[str] = Counter()
        """Errors of the failed episodes among them."""
        self._failure_kinds: Counter[str] = Counter()
        self._finished_s: dict[int, float] = {}
        newest = self._newest_batch()
        self._intake = Intake(newest.metrics if newest else None)

        def rows_of(order: int) -> Mapping[SequenceKey, BatchRow]:
            shard = read_shard(order)
            if shard is None:
                return {}
            self._finished_s[order] = shard.finished_s
            return all_rows(shard, policy, config)

        self.books = Ledger.restore(policy, data.batch_size, config.max_staleness, newest, rows_of)

    @property
    def done(self) -> bool:
        """Whether the policy has all of its batches."""
        return self.books.last_step >= self._data.steps

    @property
    def starved(self) -> bool:
        """Whether the trainer has used up every batch there is, or may have."""
        return not self.done and (self.version is None or self.version >= self.books.last_step)

    @property
    def untrainable_groups(self) -> tuple[int, str]:
        """How many groups in a row held nothing to train on, when a person should know of it, and
        why; else 0.
        """
        if self._barren < BARREN_GROUPS:
            return 0, ""
        failed = self._failures.total()
        if not failed:
            return self._barren, EQUAL_REWARDS
        error, count = self._failures.most_common(1)[0]
        kinds = ", ".join(f"{number} {kind}" for kind, number in self._failure_kinds.most_common())
        why = (
            f"{failed} of {self._episodes} episodes failed ({kinds}), "
            f"{count} of them with {shorten(error, ERROR_CHARACTERS_MAX)}"
        )
        return self._barren, why if failed == self._episodes else f"{why}; {LEFT_OUT}"

    def look_for_version(self) -> None:
        """Ask the store for newer weights."""
        self.version = manifests.latest(self._run, self.policy, start=self.version or 0)

    def admit(self, order: int) -> None:
        """An order was written."""
        self._admitted[order] = self.version or 0

    def take_in(self, prepared: IngestedShard) -> None:
        """Enter a shard into the books; nothing happens when its order is closed already."""
        intake, shard = prepared.policies.get(self.policy), prepared.shard
        admitted = self._admitted.pop(prepared.order, None)
        if intake is None or shard is None:
            self.books.take_in(prepared.order)
        elif self.books.take_in(prepared.order, intake.rows, intake.entries):
            self._finished_s[prepared.order] = shard.finished_s
            self._intake.add(intake, shard)
            self._count_barren(intake, shard)
            self._yield.observe(len(shard.groups), len(intake.rows))
            if admitted is not None and intake.rows:
                self._lag.observe(admitted, min(row.min_version for row in intake.rows))

    def make_batches(self) -> int:
        """Commit every batch that may be made now; how many. Raises ConflictError when another
        dataflow made one.
        """
        made = 0
        self.books.expire()
        while self._may_make_batch() and self._make_batch():
            made += 1
        return made

    def need(self, outstanding: Collection[int]) -> Need:
        """What admission must know, with these orders on the way."""
        on_the_way = sum(not self.books.is_closed(order) for order in outstanding)
        return Need(
            steps=self._data.steps,
            batches=self.books.last_step,
            version=self.version,
            batch_size=self._data.batch_size,
            waiting=self.books.num_waiting,
            groups=on_the_way * self._config.prompts_per_order,
            group_yield=self._yield.value,
            lag=self._lag.value,
        )

    def _count_barren(self, intake: PolicyIntake, shard: Shard) -> None:
        if intake.rows:
            self._barren, self._episodes = 0, 0
            self._failures.clear()
            self._failure_kinds.clear()
            return
        episodes = [episode for group in shard.groups for episode in group.episodes]
        self._barren += len(shard.groups)
        self._episodes += len(episodes)
        self._failures.update(episode.error for episode in episodes if episode.error is not None)
        self._failure_kinds.update(failures_by_kind(episodes))

    def _may_make_batch(self) -> bool:
        if self.version is None or self.done:
            return False
        return self.version >= self.books.next_step - 1 - self._config.batches_ahead

    def _make_batch(self) -> bool:
        with self._span("algorithms"):
            batch = self.books.assemble(self._samplers, self._seed, self._trained)
            if batch is None:
                return False
            now_s = self._clock()
            metrics = {**self._intake.metrics(), **batch_metrics(batch, self._finished_s, now_s)}
            batch = replace(batch, metrics=metrics, created_s=now_s)
        with self._span("store"):
            batches.create(self._run, batch)
        self.books.advance(batch)
        self._intake.clear()
        self.totals.update(entry.fate for entry in batch.ledger)
        self.totals.update("replayed" if row.replay else "trained" for row in batch.rows)
        return True

    def _trained(self, count: int) -> tuple[BatchRow, ...]:
        """Up to `count` rows of the newest batches that were no replays there, the newest batch
        first.
        """
        rows: list[BatchRow] = []
        last = self.books.last_step
        for step in range(last, max(0, last - REPLAY_BATCHES_MAX), -1):
            if len(rows) >= count:
                break
            rows.extend(
                row for row in batches.read(self._run, self.policy, step).rows if not row.replay
            )
        return tuple(rows[:count])

    def _newest_batch(self) -> Batch | None:
        step = batches.next_step(self._run, self.policy) - 1
        if step < 1:
            return None
        try:
            newest = batches.read(self._run, self.policy, step)
            _refuse_orders_to_come(self._run, newest)
        except CorruptError as error:
            raise CorruptError(
                f"{layout.batch(self.policy, step)} is unreadable, and the run cannot go on "
                "without its books; "
                f"put a good copy of the object back ({error})"
            ) from error
        # A policy that has all of its batches uses none of its waiting rows any more: spare reading
        # them.
        return newest if step < self._data.steps else replace(newest, waiting=())


def _refuse_orders_to_come(run: ObjectStore, batch: Batch) -> None:
    """CorruptError when the batch has taken in an order that does not exist: orders are written
    before anybody can answer them. Every later order would count as taken in already, and the run
    would train on nothing more.
    """
    last = max(batch.closed_below - 1, *batch.closed, -1)
    if last >= 0 and not run.exists(layout.order(last)):
        raise CorruptError(f"it has taken in order {last}, which does not exist")
