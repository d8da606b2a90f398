"""The dataflow service: make batches of finished shards, and write orders within the staleness
budget.

    shards ──probe──▶ ingest ──▶ one BatchAssembly per policy ──▶ batches
    weights ─poll──▶ admission ──▶ OrderWriter ──▶ orders

All of its state can be rebuilt from the store, so it may be killed between any two writes. Every
write is created once, so two dataflows on one run do no harm: the slower one gets a ConflictError
and rebuilds. How shards are ingested and batches written (inline, or as tasks) are parameters.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from data_ops.algorithms import curators
from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow.admission import orders_to_admit
from data_ops.dataflow.batch_assembly import (
    BatchAssembly,
    Span,
    WriteBatch,
    no_span,
    stall_reason,
)
from data_ops.dataflow.model_limits import RunLimits
from data_ops.dataflow.order_writer import OrderWriter
from data_ops.dataflow.shard_ingest import IngestedShard, ingest_shard
from data_ops.prompts.frozen import stream_of
from storage import layout
from storage.coordination.lifetime import Lifetime, SameFailure, backoff_s
from storage.errors import ConflictError, CorruptError, NotFoundError, TransientError
from storage.records.batches import Fate
from storage.records.control import ServiceState, WaitReason
from storage.records.progress import DataflowProgress
from storage.records.rollouts import Shard
from storage.run import batches, orders, shards
from storage.run.quarantine import quarantine_object, read_quarantine
from storage.store.object_store import ObjectStore

PROBES_MAX = 256
"""Outstanding orders probed in one round; the next round goes on behind them."""
SHARDS_PER_ROUND_MAX = 64
"""Shards ingested in one round: bounds the memory that they need at once."""
ORDERS_PER_ROUND_MAX = 64

Ingest = Callable[[Sequence[int]], Sequence[IngestedShard]]
"""`ingest_shard` for each of the orders, in any sequence, on any number of threads or processes."""

log = logging.getLogger(__name__)


class Dataflow:
    """The dataflow of one run. After an error of the store, `round` may simply be called again."""

    def __init__(
        self,
        run: ObjectStore,
        config: DataConfig,
        policies: Mapping[str, PolicyData],
        seed: int,
        *,
        max_tokens: int,
        ingest: Ingest | None = None,
        write_batch: WriteBatch = batches.create,
        clock: Callable[[], float] = time.time,
        span: Span = no_span,
    ) -> None:
        """`max_tokens` is `rollout.engine.max_tokens` of the run: longer sequences are filtered.

        Raises ConfigError for prompts or algorithms that cannot be used, CorruptError naming an
        unreadable batch or unreadable prompts.
        """
        self._run, self._config, self._policies, self._seed = run, config, policies, seed
        self._ingest = ingest or self._ingest_here
        self._limits = RunLimits(run, list(policies), max_tokens)
        self._write_batch, self._clock, self._span = write_batch, clock, span
        self._stream = stream_of(run, "data.prompts", config.prompts)
        self.restore()

    @property
    def done(self) -> bool:
        """Whether every policy has all of its batches."""
        return not self._unfinished()

    @property
    def starved(self) -> bool:
        """Whether a trainer waits for a batch, as of the last round."""
        return any(assembly.starved for assembly in self._assemblies)

    def round(self) -> bool:
        """Do whatever can be done now; return whether that was anything. Raises TransientError, and
        can then be called again.
        """
        try:
            ingested = self._ingest_shards() or self._close_unreadable_order()
            made = self._feed()
            if self.done:
                orders.create_end(self._run, self._order_writer.next_number)  # workers then leave
            return ingested or made
        except ConflictError as conflict:
            self._rebuild(conflict)
            return True

    def feed(self) -> None:
        """Do a round without ingesting shards: make batches of waiting rows, and write orders.

        Raises TransientError, and can then be called again.
        """
        try:
            self._feed()
        except ConflictError as conflict:
            self._rebuild(conflict)

    def _feed(self) -> bool:
        for assembly in self._unfinished():
            with self._span("store"):
                assembly.poll_version()
        made = sum(assembly.make_batches() for assembly in self._unfinished())
        written = self._write_orders()
        return bool(made) or written

    def _rebuild(self, conflict: ConflictError) -> None:
        log.warning("another dataflow was faster, rebuilding from the store: %s", conflict)
        self.restore()

    def restore(self) -> None:
        """Rebuild the whole state from the store, as a new dataflow would.

        When that fails, the old state remains.
        """
        config, run, seed = self._config, self._run, self._seed
        # Several policies wait for rows of the same shards: each shard is read once.
        read_shard = cache(self._read_shard)
        with self._span("store"):
            quarantined = read_quarantine(run)
            order_writer = OrderWriter(
                run,
                self._stream,
                curators(config.curate),
                config.prompts_per_order,
                seed,
                config.start.model_dump(mode="json"),
            )
            limits = self._limits.read()
            assemblies = [
                BatchAssembly(
                    run,
                    policy,
                    data,
                    config,
                    seed,
                    read_shard,
                    limits=limits[policy],
                    write_batch=self._write_batch,
                    clock=self._clock,
                    span=self._span,
                )
                for policy, data in self._policies.items()
            ]
        self._order_writer, self._assemblies = order_writer, assemblies
        self._outstanding = {
            number for number in range(self._order_writer.next_number) if self._is_open(number)
        }
        self._probed = self._checked = -1
        for key, problem in quarantined.items():
            numbers = layout.numbers([key], layout.order) + layout.numbers([key], layout.shard)
            for number in self._outstanding.intersection(numbers):
                self._close(IngestedShard(order=number, problem=problem), None)

    @property
    def stall_reason(self) -> str:
        """Why a run makes no progress, for a person; empty when it does."""
        return stall_reason(self._unfinished())

    def progress(self) -> DataflowProgress:
        """Return counts for the heartbeat; totals are those since the last start or rebuild."""
        policies = {assembly.policy: assembly for assembly in self._assemblies}

        def total(fate: Fate) -> dict[str, int]:
            return {policy: each.totals[fate] for policy, each in policies.items()}

        return DataflowProgress(
            closed_below=min(each.ledger.closed_below for each in policies.values()),
            orders=self._order_writer.next_number,
            batches={policy: each.ledger.last_step for policy, each in policies.items()},
            waiting={policy: each.ledger.num_waiting for policy, each in policies.items()},
            trained=total("trained"),
            replayed=total("replayed"),
            filtered=total("filtered"),
            expired=total("expired"),
        )

    def versions(self) -> dict[str, int]:
        """Return each policy's newest version at the last poll."""
        return {
            assembly.policy: assembly.version
            for assembly in self._assemblies
            if assembly.version is not None
        }

    def _unfinished(self) -> list[BatchAssembly]:
        return [assembly for assembly in self._assemblies if not assembly.done]

    def _is_open(self, number: int) -> bool:
        """Return whether the order's shard is still to be ingested, for a policy that needs batches
        or for the curators.
        """
        if not self._order_writer.is_seen(number):
            return True
        return any(not assembly.ledger.is_closed(number) for assembly in self._unfinished())

    def _ingest_shards(self) -> bool:
        with self._span("store"):
            finished = self._probe_shards()
        if not finished:
            return False
        with self._span("algorithms"):
            for ingested in sorted(self._ingest(finished), key=lambda ingested: ingested.order):
                self._fold(ingested)
        return True

    def _ingest_here(self, numbers: Sequence[int]) -> list[IngestedShard]:
        policies, limits = list(self._policies), self._limits.read()
        return [
            ingest_shard(self._run, number, self._config, policies, limits) for number in numbers
        ]

    def _probe_shards(self) -> list[int]:
        """Return outstanding orders that have a shard, ascending. Each call probes a bounded number
        of orders, in turn.
        """
        finished: list[int] = []
        for number in self._outstanding_after(self._probed)[:PROBES_MAX]:
            if len(finished) == SHARDS_PER_ROUND_MAX:
                break
            self._probed = number
            if shards.exists(self._run, number):
                finished.append(number)
        return sorted(finished)

    def _outstanding_after(self, number: int) -> list[int]:
        """Return the outstanding orders: those above `number`, then the others, each ascending."""
        ring = sorted(self._outstanding)
        start = bisect_right(ring, number)
        return ring[start:] + ring[:start]

    def _close_unreadable_order(self) -> bool:
        """Read one outstanding order, in turn, and close it when it is damaged or lost: no worker
        can lease it. Return whether it was closed.

        The quarantine decides, also after a restart: a shard that a worker creates later is not
        ingested.
        """
        if not self._outstanding:
            return False
        number = self._checked = self._outstanding_after(self._checked)[0]
        try:
            with self._span("store"):
                orders.read(self._run, number, self._config.episodes_per_order)
            return False
        except (CorruptError, NotFoundError) as error:
            problem = str(error)
        if shards.exists(self._run, number):
            return False  # a worker had read it before
        if not self._run.exists(layout.RUN):
            return False  # the whole run is missing: an unmounted folder
        self._quarantine(layout.order(number), problem)
        self._close(IngestedShard(order=number, problem=problem), None)
        return True

    def _fold(self, ingested: IngestedShard) -> None:
        """Enter one shard everywhere where its order is still open."""
        order, shard = ingested.order, ingested.shard
        if ingested.problem:
            self._quarantine(layout.shard(order), ingested.problem)
        elif shard is None and self._order_writer.needs_shards:
            shard = self._read_shard(order)  # it was ingested by another process
        self._close(ingested, shard)

    def _close(self, ingested: IngestedShard, shard: Shard | None) -> None:
        for assembly in self._unfinished():
            assembly.ingest(ingested)
        self._order_writer.see(ingested.order, shard, ingested.num_sampled)
        self._outstanding.discard(ingested.order)

    def _write_orders(self) -> bool:
        config = self._config
        needs = [assembly.need(self._outstanding) for assembly in self._assemblies]
        number = min(
            orders_to_admit(needs, config.max_staleness, config.prompts_per_order),
            ORDERS_PER_ROUND_MAX,
        )
        for _ in range(number):
            with self._span("algorithms"):
                order = self._order_writer.draft(config.samples_per_prompt, self._clock())
            with self._span("store"):
                orders.create(self._run, order)
            self._order_writer.advance(order)
            self._outstanding.add(order.number)
            for assembly in self._assemblies:
                assembly.admit(order.number)
        return number > 0

    def _read_shard(self, number: int) -> Shard | None:
        try:
            return shards.read(self._run, number)
        except (CorruptError, NotFoundError) as error:
            if isinstance(error, NotFoundError) and not self._run.exists(layout.RUN):
                raise  # the whole run is missing: an unmounted folder
            self._quarantine(layout.shard(number), str(error))
            return None

    def _quarantine(self, key: str, problem: str) -> None:
        log.warning("%s is damaged or lost, and quarantined: %s", key, problem)
        quarantine_object(self._run, key, problem)


def serve(
    lifetime: Lifetime,
    config: DataConfig,
    policies: Mapping[str, PolicyData],
    seed: int,
    ingest: Ingest | None = None,
    write_batch: WriteBatch = batches.create,
    *,
    max_tokens: int,
) -> None:
    """Run the dataflow until every policy has all of its batches, or the service must stop.

    While every trainer has work, shards gather, so that one task ingests more of them. A store that
    does not answer is polled with a growing pause. Raises ConfigError and CorruptError, as
    `Dataflow` does.
    """
    heartbeat = lifetime.heartbeat
    dataflow: Dataflow | None = None
    failures, failure = 0, SameFailure()
    while not lifetime.should_stop():
        busy = False
        try:
            dataflow = dataflow or Dataflow(
                lifetime.run,
                config,
                policies,
                seed,
                max_tokens=max_tokens,
                ingest=ingest,
                write_batch=write_batch,
                span=heartbeat.span,
            )
            busy = dataflow.round()
            failures = 0
            failure.clear()
            state, wait_reason = _state(dataflow, busy)
            heartbeat.update(
                state=state,
                wait_reason=wait_reason,
                note=dataflow.stall_reason,
                progress=dataflow.progress(),
                versions=dataflow.versions(),
            )
            if dataflow.done:
                return
            busy = _gather(dataflow, config, lifetime) or busy
        except TransientError as error:
            failures += 1
            log.warning("the store does not answer (%d times in a row): %s", failures, error)
            heartbeat.update(
                state=ServiceState.WAITING,
                wait_reason=WaitReason.STORE,
                note=f"the store does not answer: {failure.describe(error)}",
            )
        if failures or not busy:
            with heartbeat.span("wait"):
                lifetime.wait(max(config.poll_interval_s, backoff_s(failures)))


def _state(dataflow: Dataflow, busy: bool) -> tuple[ServiceState, WaitReason]:
    """State and wait reason for the heartbeat after a round."""
    idle = WaitReason.NONE if busy else WaitReason.SHARDS
    reason = WaitReason.UNTRAINABLE if dataflow.stall_reason else idle
    return ServiceState.WORKING if busy else ServiceState.WAITING, reason


def _gather(dataflow: Dataflow, config: DataConfig, lifetime: Lifetime) -> bool:
    """Wait while shards gather, so that one task ingests several; return whether it waited.

    Meanwhile batches are made of the waiting rows; a trainer without a batch ends the wait. Raises
    TransientError.
    """
    waited = False
    end_s = time.monotonic() + config.gather_interval_s
    while not dataflow.starved and (left_s := end_s - time.monotonic()) > 0:
        with lifetime.heartbeat.span("wait"):
            if lifetime.wait(min(left_s, config.poll_interval_s)):
                break
        dataflow.feed()
        waited = True
    return waited
