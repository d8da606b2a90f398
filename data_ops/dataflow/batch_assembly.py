"""Assemble one policy's batches from ingested shards: its ledger, yield, metrics and version.

IngestedShard ──ingest──▶ ledger ──▶ make_batches ──▶ batches/{policy}/…
                               └─▶ need ──▶ admission
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from textwrap import shorten

from data_ops.algorithms import samplers
from data_ops.algorithms.filters import ZeroAdvantage
from data_ops.algorithms.policy_groups import ModelLimits
from data_ops.algorithms.protocols import Sample
from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow.admission import Lag, Need, Yield
from data_ops.dataflow.batch_metrics import IngestMetrics, batch_metrics
from data_ops.dataflow.ledger import Ledger
from data_ops.dataflow.shard_ingest import IngestedGroups, IngestedShard, all_rows
from storage import layout
from storage.errors import ConflictError, CorruptError, NotFoundError
from storage.records.batches import Batch, BatchRow, SequenceKey
from storage.records.rollouts import Shard, failures_by_kind
from storage.run import batches, orders
from storage.store.object_store import ObjectStore
from storage.verify.missing_numbers import gaps
from storage.weights import manifests

REPLAY_BATCHES_MAX = 64
"""How far back replay algorithms can look."""

UNTRAINABLE_GROUPS = 64
"""After this many groups in a row without a row to train on, the heartbeat has the reason: the run
may go on like this for ever.
"""
ERROR_CHARACTERS_MAX = 160
EQUAL_REWARDS = (
    "all of a group's rewards were equal; prompts of another difficulty or more samples_per_prompt "
    "may help"
)
NO_SEQUENCE = "the workflow recorded no sequence in which the policy sampled a token"

log = logging.getLogger(__name__)

ReadShard = Callable[[int], Shard | None]
"""The shard of an order; None when its bytes cannot be read (any more)."""
WriteBatch = Callable[[ObjectStore, Batch], None]
"""`batches.create`, or a form of it that is seen where people watch a run."""
Span = Callable[[str], AbstractContextManager[None]]


def no_span(component: str) -> AbstractContextManager[None]:
    """Measure nothing."""
    return nullcontext()


def stall_reason(assemblies: Iterable["BatchAssembly"]) -> str:
    """Return why no batches are made of what is played, for each policy that this is true of;
    policies that drop all groups for the same reason share a sentence. Empty when there is none.
    """
    assemblies = tuple(assemblies)
    policies: dict[tuple[int, str], list[str]] = {}
    for assembly in assemblies:
        if assembly.untrainable_groups[0]:
            policies.setdefault(assembly.untrainable_groups, []).append(assembly.policy)
    dropped = (
        f"the last {groups} groups held nothing to train {' or '.join(names)} on: {why}"
        for (groups, why), names in policies.items()
    )
    return "; ".join([*dropped, *(each.left_out for each in assemblies if each.left_out)])


class BatchAssembly:
    """Batches of one policy. After an error of the store every method may be called again."""

    def __init__(
        self,
        run: ObjectStore,
        policy: str,
        data: PolicyData,
        config: DataConfig,
        seed: int,
        read_shard: ReadShard,
        *,
        limits: ModelLimits,
        write_batch: WriteBatch = batches.create,
        clock: Callable[[], float] = time.time,
        span: Span = no_span,
    ) -> None:
        """Restore the state after the policy's newest batch; `read_shard` gives the shards of the
        rows that wait after it. `limits` are those of the policy.

        Raises CorruptError naming the batch when that is lost or cannot be read.
        """
        self.policy = policy
        self._run, self._data, self._config, self._seed = run, data, config, seed
        self._write_batch, self._clock, self._span = write_batch, clock, span
        self._samplers: Sequence[Sample] = samplers(config.sample)
        self.version = manifests.latest(run, policy)
        """The newest version at the last poll; None while there is none."""
        self.totals: Counter[str] = Counter()
        """Sequences by fate, in the batches made here."""
        self._yield = Yield(config.samples_per_prompt)
        self._lag = Lag()
        self._admitted: dict[int, int] = {}
        """Outstanding orders → the newest version at their admission, of this process alone."""
        self._untrainable = 0
        """Groups ingested since one was kept."""
        self._episodes = 0
        """Episodes of those groups."""
        self._failures: Counter[str] = Counter()
        """Errors of the failed episodes among them."""
        self._failure_kinds: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        """Sequences of those groups by the reason in the ledger."""
        self._unreadable = 0
        """Orders among them that cannot be read, or whose shard cannot."""
        self._problem = ""
        """Why the newest of those cannot be read."""
        self._finished_s: dict[int, float] = {}
        newest = self._newest_batch()
        self._metrics = IngestMetrics(newest.metrics if newest else None)

        def rows_of(order: int) -> Mapping[SequenceKey, BatchRow]:
            shard = read_shard(order)
            if shard is None:
                return {}
            self._finished_s[order] = shard.finished_s
            return all_rows(shard, policy, config, limits)

        self.ledger = Ledger.restore(policy, data.batch_size, config.max_staleness, newest, rows_of)

    @property
    def done(self) -> bool:
        """Whether the policy has all of its batches."""
        return self.ledger.last_step >= self._data.steps

    @property
    def starved(self) -> bool:
        """Whether the trainer has used up every batch there is, or may have."""
        return not self.done and (self.version is None or self.version >= self.ledger.last_step)

    @property
    def untrainable_groups(self) -> tuple[int, str]:
        """How many groups in a row held nothing to train on, and why; 0 for a few."""
        if self._untrainable < UNTRAINABLE_GROUPS:
            return 0, ""
        reasons = []
        if self._unreadable:
            reasons.append(
                f"{self._unreadable} orders or their shards cannot be read, the last one because "
                f"{shorten(self._problem, ERROR_CHARACTERS_MAX)}"
            )
        if self._episodes or not reasons:
            reasons.append(self._why_not_kept())
        return self._untrainable, "; ".join(reasons)

    @property
    def left_out(self) -> str:
        """Why a batch's worth of waiting rows makes no batch; empty where it makes one."""
        if not self.ledger.left_out_by:
            return ""
        return (
            f"{self.ledger.num_waiting} sequences of {self.policy} wait, and data.sample "
            f"({self.ledger.left_out_by}) leaves out so many of them that no batch of "
            f"{self._data.batch_size} can be made"
        )

    def _why_not_kept(self) -> str:
        """Return why the groups that were read held nothing to train on."""
        failed = self._failures.total()
        if not failed:
            return self._commonest_refusal()
        error, count = self._failures.most_common(1)[0]
        kinds = ", ".join(f"{number} {kind}" for kind, number in self._failure_kinds.most_common())
        why = (
            f"{failed} of {self._episodes} episodes failed ({kinds}), "
            f"{count} of them with {shorten(error, ERROR_CHARACTERS_MAX)}"
        )
        return why if failed == self._episodes else f"{why}; {self._commonest_refusal()}"

    def _commonest_refusal(self) -> str:
        """Return why most sequences were filtered, by the ledger's reason."""
        if not self._refusals:
            return NO_SEQUENCE
        reason, count = self._refusals.most_common(1)[0]
        if reason == ZeroAdvantage().name:
            return EQUAL_REWARDS
        total = self._refusals.total()
        return f"{count} of {total} sequences were filtered with the reason {reason}"

    def poll_version(self) -> None:
        """Look for newer weights in the store.

        Raises ConflictError when they were made of a batch that is not in this ledger: another
        dataflow made it. Where it was lost, a rebuild names it.
        """
        self.version = manifests.latest(self._run, self.policy, start=self.version or 0)
        if self.version is not None and self.version > self.ledger.last_step:
            raise ConflictError(
                f"version {self.version} of {self.policy} exists; the newest batch known here is "
                f"{self.ledger.last_step}"
            )

    def admit(self, order: int) -> None:
        """Record that an order was written."""
        self._admitted[order] = self.version or 0

    def ingest(self, shard: IngestedShard) -> None:
        """Enter a shard into the ledger; nothing happens when its order is closed already."""
        groups = shard.policies.get(self.policy)
        admitted = self._admitted.pop(shard.order, None)
        if groups is None:
            if self.ledger.ingest(shard.order) and shard.problem:
                self._count_unreadable(shard.problem)
        elif self.ledger.ingest(shard.order, groups.rows, groups.entries):
            self._finished_s[shard.order] = shard.finished_s
            self._metrics.add(groups, shard)
            self._count_untrainable(groups, shard)
            self._yield.observe(shard.num_groups, len(groups.rows))
            if admitted is not None and groups.rows:
                self._lag.observe(admitted, min(row.min_version for row in groups.rows))

    def make_batches(self) -> int:
        """Commit every batch that may be made now; return how many. Raises ConflictError when
        another dataflow made one.
        """
        made = 0
        self.ledger.expire()
        while self._may_make_batch() and self._make_batch():
            made += 1
        return made

    def need(self, outstanding: Collection[int]) -> Need:
        """Return the policy's counts for admission, with these orders outstanding."""
        num_open = sum(not self.ledger.is_closed(order) for order in outstanding)
        return Need(
            steps=self._data.steps,
            batches=self.ledger.last_step,
            version=self.version,
            batch_size=self._data.batch_size,
            waiting=self.ledger.num_waiting,
            groups=num_open * self._config.prompts_per_order,
            group_yield=self._yield.value,
            lag=self._lag.value,
        )

    def _count_untrainable(self, groups: IngestedGroups, shard: IngestedShard) -> None:
        if groups.rows:
            self._untrainable, self._episodes, self._unreadable = 0, 0, 0
            self._failures.clear()
            self._failure_kinds.clear()
            self._refusals.clear()
            return
        self._untrainable += shard.num_groups
        self._episodes += len(shard.episodes)
        self._failures.update(
            episode.error for episode in shard.episodes if episode.error is not None
        )
        self._failure_kinds.update(failures_by_kind(shard.episodes))
        self._refusals.update(entry.reason for entry in groups.entries)

    def _count_unreadable(self, problem: str) -> None:
        self._untrainable += self._config.prompts_per_order
        self._unreadable += 1
        self._problem = problem

    def _may_make_batch(self) -> bool:
        if self.version is None or self.done:
            return False
        return self.version >= self.ledger.next_step - 1 - self._config.batches_ahead

    def _make_batch(self) -> bool:
        with self._span("algorithms"):
            batch = self.ledger.assemble(self._samplers, self._seed, self._trained)
            if batch is None:
                return False
            now_s = self._clock()
            metrics = {**self._metrics.metrics(), **batch_metrics(batch, self._finished_s, now_s)}
            batch = replace(batch, metrics=metrics, created_s=now_s)
        with self._span("store"):
            self._write_batch(self._run, batch)
        self.ledger.advance(batch)
        self._metrics.clear()
        self.totals.update(entry.fate for entry in batch.ledger)
        self.totals.update("replayed" if row.replay else "trained" for row in batch.rows)
        return True

    def _trained(self, count: int) -> tuple[BatchRow, ...]:
        """Return up to `count` rows of the newest batches that were no replays there, the newest
        batch first.
        """
        rows: list[BatchRow] = []
        last = self.ledger.last_step
        for step in range(last, max(0, last - REPLAY_BATCHES_MAX), -1):
            if len(rows) >= count:
                break
            try:
                batch = batches.read(self._run, self.policy, step)
            except NotFoundError as error:
                raise CorruptError(
                    f"{layout.batch(self.policy, step)} is lost, and data.sample replays its rows; "
                    "put a good copy of the object back"
                ) from error
            rows.extend(row for row in batch.rows if not row.replay)
        return tuple(rows[:count])

    def _newest_batch(self) -> Batch | None:
        """Read the newest batch. Batches are listed, so that one after a lost one is found.

        It cannot be older than the newest version, which was made of it: a batch that was trained
        on would be made again, of other rows. A batch beyond the run's steps is none of the run.
        """
        listed = batches.steps(self._run, self.policy)
        steps = [step for step in listed if step <= self._data.steps]
        step = max(steps, default=0)
        if len(steps) < len(listed):
            log.warning(
                "%s is ignored: the run has %d steps, and it is none of them",
                layout.batch(self.policy, listed[len(steps)]),
                self._data.steps,
            )
        lost = gaps(steps, 1, step)
        if num_lost := len(lost.first) + lost.more:
            log.warning(
                "%s%s is lost, batch %d exists: put a good copy back, `astraflow verify` lists "
                "what is missing",
                layout.batch(self.policy, lost.first[0]),
                f" (and {num_lost - 1} more)" if num_lost > 1 else "",
                step,
            )
        if self.version is not None and self.version > step:
            raise CorruptError(
                f"{layout.batch(self.policy, self.version)} is lost, and the run cannot go on "
                f"without its ledger: version {self.version} was made of it; put a good copy of "
                "the object back"
            )
        if not step:
            return None
        try:
            newest = batches.read(self._run, self.policy, step)
            _refuse_unwritten_orders(self._run, newest)
        except CorruptError as error:
            raise CorruptError(
                f"{layout.batch(self.policy, step)} is unreadable, and the run cannot go on "
                "without its ledger; "
                f"put a good copy of the object back ({error})"
            ) from error
        # A policy that has all of its batches uses no waiting rows: their shards are not read.
        return newest if step < self._data.steps else replace(newest, waiting=())


def _refuse_unwritten_orders(run: ObjectStore, batch: Batch) -> None:
    """Raise CorruptError when the batch has ingested an order that was never written.

    Orders are written before their shards. Every later order would count as ingested already, and
    the run would train on nothing more; each shard that a waiting sequence names and that does not
    exist would be quarantined.
    """
    waiting = (key.order for key in batch.waiting)
    last = max((batch.closed_below - 1, *batch.closed, *waiting))
    if last >= 0 and not orders.exists(run, last) and not orders.is_lost(run, last):
        raise CorruptError(f"it has ingested order {last}, which does not exist")
