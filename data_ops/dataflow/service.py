"""The dataflow: one plain function that turns finished shards into batches and writes orders within
the budget.

    shards ──probe──▶ take in ──▶ one Assembly per policy ──▶ batches
    weights ─latest─▶ admission ──▶ Ordering ──▶ orders

Everything it holds in memory can be rebuilt from the store, so it may be killed between any two
writes; and because every write is created once, two dataflows on one run do no harm: the slower one
sees a conflict and rebuilds. It knows nothing of Prefect, engines or losses. How shards are taken
in (inline, or as parallel tasks) is handed in.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from data_ops.algorithms import curators
from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow.admission import orders_to_admit
from data_ops.dataflow.batch_assembly import BatchAssembly, Span, complaint, no_span
from data_ops.dataflow.order_writer import OrderWriter
from data_ops.dataflow.shard_ingest import IngestedShard, prepare
from storage import layout
from storage.coordination.lifetime import Lifetime, backoff_s
from storage.errors import ConflictError, CorruptError, TransientError
from storage.records.batches import Fate
from storage.records.control import ServiceState, WaitReason
from storage.records.progress import DataflowProgress
from storage.records.rollouts import Shard
from storage.run import orders, shards
from storage.run.quarantine import quarantine_object
from storage.store.object_store import ObjectStore

PROBES_MAX = 256
"""Outstanding orders looked at in one round; the next round goes on behind them."""
SHARDS_PER_ROUND_MAX = 64
"""Shards taken in in one round: bounds the memory that they need at once."""
ORDERS_PER_ROUND_MAX = 64

TakeIn = Callable[[Sequence[int]], Sequence[IngestedShard]]
"""`intake.prepare` for each of the orders, in any order and on any number of threads."""

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
        take_in: TakeIn | None = None,
        clock: Callable[[], float] = time.time,
        span: Span = no_span,
    ) -> None:
        """Raises ConfigError for prompts or algorithms that cannot be used, CorruptError naming an
        unreadable order or batch.
        """
        self._run, self._config, self._policies, self._seed = run, config, policies, seed
        self._take_in = take_in or self._take_in_here
        self._clock, self._span = clock, span
        self._stream = config.prompts.stream()
        self.restore()

    @property
    def done(self) -> bool:
        """Whether every policy has all of its batches."""
        return not self._unfinished()

    @property
    def starved(self) -> bool:
        """Whether a trainer waits for a batch, as far as the last round saw."""
        return any(assembly.starved for assembly in self._assemblies)

    def round(self) -> bool:
        """Do whatever can be done now; whether that was anything. Raises TransientError, and can
        then be called again.
        """
        try:
            taken_in = self._take_in_shards()
            made = self._feed()
            if self.done:
                orders.create_end(
                    self._run, self._ordering.next_number
                )  # tells the workers to leave
            return taken_in or made
        except ConflictError as conflict:
            self._rebuild(conflict)
            return True

    def feed(self) -> None:
        """All of a round but the look at shards: batches of what waits already for the trainers,
        orders for the workers.

        Raises TransientError, and can then be called again.
        """
        try:
            self._feed()
        except ConflictError as conflict:
            self._rebuild(conflict)

    def _feed(self) -> bool:
        for assembly in self._unfinished():
            with self._span("store"):
                assembly.look_for_version()
        made = sum(assembly.make_batches() for assembly in self._unfinished())
        written = self._write_orders()
        return bool(made) or written

    def _rebuild(self, conflict: ConflictError) -> None:
        log.warning("another dataflow was faster, rebuilding from the store: %s", conflict)
        self.restore()

    def restore(self) -> None:
        """Rebuild the whole state from the store, as a new dataflow would; when that fails, the old
        state stands whole.
        """
        config, run, seed = self._config, self._run, self._seed
        # Several policies wait for rows of the same shards: each shard is read once.
        read_shard = cache(self._read_shard)
        with self._span("store"):
            ordering = OrderWriter(
                run, self._stream, curators(config.curate), config.prompts_per_order, seed
            )
            assemblies = [
                BatchAssembly(
                    run, policy, data, config, seed, read_shard, clock=self._clock, span=self._span
                )
                for policy, data in self._policies.items()
            ]
        self._ordering, self._assemblies = ordering, assemblies
        self._outstanding = {
            number for number in range(self._ordering.next_number) if self._is_open(number)
        }
        self._probed = -1

    @property
    def complaint(self) -> str:
        """What a person should know about a run that makes no headway; empty otherwise."""
        return complaint(self._unfinished())

    def progress(self) -> DataflowProgress:
        """Counts for the heartbeat; fates count since the dataflow was started or rebuilt."""
        policies = {assembly.policy: assembly for assembly in self._assemblies}

        def total(fate: Fate) -> dict[str, int]:
            return {policy: each.totals[fate] for policy, each in policies.items()}

        return DataflowProgress(
            closed_below=min(each.books.closed_below for each in policies.values()),
            orders=self._ordering.next_number,
            batches={policy: each.books.last_step for policy, each in policies.items()},
            waiting={policy: each.books.num_waiting for policy, each in policies.items()},
            trained=total("trained"),
            replayed=total("replayed"),
            filtered=total("filtered"),
            expired=total("expired"),
        )

    def versions(self) -> dict[str, int]:
        """The newest weights known of each policy."""
        return {
            assembly.policy: assembly.version
            for assembly in self._assemblies
            if assembly.version is not None
        }

    def _unfinished(self) -> list[BatchAssembly]:
        return [assembly for assembly in self._assemblies if not assembly.done]

    def _is_open(self, number: int) -> bool:
        """Whether anybody still has to hear of the order's shard: a policy that needs batches, or
        the curators.
        """
        if not self._ordering.is_seen(number):
            return True
        return any(not assembly.books.is_closed(number) for assembly in self._unfinished())

    def _take_in_shards(self) -> bool:
        with self._span("store"):
            found = self._find_shards()
        if not found:
            return False
        with self._span("algorithms"):
            for prepared in sorted(self._take_in(found), key=lambda prepared: prepared.order):
                self._fold(prepared)
        return True

    def _take_in_here(self, numbers: Sequence[int]) -> list[IngestedShard]:
        return [
            prepare(self._run, number, self._config, list(self._policies)) for number in numbers
        ]

    def _find_shards(self) -> list[int]:
        """Outstanding orders that have been answered, ascending; a bounded look that goes around in
        a ring.
        """
        ring = sorted(self._outstanding)
        start = bisect_right(ring, self._probed)
        found: list[int] = []
        for number in (ring[start:] + ring[:start])[:PROBES_MAX]:
            if len(found) == SHARDS_PER_ROUND_MAX:
                break
            self._probed = number
            if shards.exists(self._run, number):
                found.append(number)
        return sorted(found)

    def _fold(self, prepared: IngestedShard) -> None:
        """Enter one shard everywhere where its order is still open."""
        if prepared.shard is None:
            self._quarantine(prepared.order, prepared.problem)
        for assembly in self._unfinished():
            assembly.take_in(prepared)
        self._ordering.see(prepared.order, prepared.shard)
        self._outstanding.discard(prepared.order)

    def _write_orders(self) -> bool:
        config = self._config
        needs = [assembly.need(self._outstanding) for assembly in self._assemblies]
        number = min(
            orders_to_admit(needs, config.max_staleness, config.prompts_per_order),
            ORDERS_PER_ROUND_MAX,
        )
        for _ in range(number):
            with self._span("algorithms"):
                order = self._ordering.draft(config.samples_per_prompt, self._clock())
            with self._span("store"):
                orders.create(self._run, order)
            self._ordering.advance(order)
            self._outstanding.add(order.number)
            for assembly in self._assemblies:
                assembly.admit(order.number)
        return number > 0

    def _read_shard(self, number: int) -> Shard | None:
        try:
            return shards.read(self._run, number)
        except CorruptError as error:
            self._quarantine(number, str(error))
            return None

    def _quarantine(self, number: int, problem: str) -> None:
        log.warning("%s is unreadable and quarantined: %s", layout.shard(number), problem)
        quarantine_object(self._run, layout.shard(number), problem)


def serve(
    lifetime: Lifetime,
    config: DataConfig,
    policies: Mapping[str, PolicyData],
    seed: int,
    take_in: TakeIn | None = None,
) -> None:
    """Run the dataflow until every policy has all of its batches, or the service must stop.

    While every trainer has work, shards gather, so that more of them are taken in at once. A store
    that is away is waited for. Raises ConfigError and CorruptError as `Dataflow` does.
    """
    heartbeat = lifetime.heartbeat
    dataflow: Dataflow | None = None
    failures = 0
    while not lifetime.should_stop():
        busy = False
        try:
            dataflow = dataflow or Dataflow(
                lifetime.run, config, policies, seed, take_in=take_in, span=heartbeat.span
            )
            busy = dataflow.round()
            failures = 0
            state, wait_reason = _state(dataflow, busy)
            heartbeat.update(
                state=state,
                wait_reason=wait_reason,
                note=dataflow.complaint,
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
                note=f"the store does not answer: {error}",
            )
        if failures or not busy:
            with heartbeat.span("wait"):
                lifetime.wait(max(config.poll_interval_s, backoff_s(failures)))


def _state(dataflow: Dataflow, busy: bool) -> tuple[ServiceState, WaitReason]:
    """State and wait reason for the heartbeat after a round."""
    idle = WaitReason.NONE if busy else WaitReason.SHARDS
    reason = WaitReason.UNTRAINABLE if dataflow.complaint else idle
    return ServiceState.WORKING if busy else ServiceState.WAITING, reason


def _gather(dataflow: Dataflow, config: DataConfig, lifetime: Lifetime) -> bool:
    """Wait while shards gather, so that one task takes in several; returns whether it waited.

    Meanwhile batches are made of the rows that are already there; a trainer that has no batch left
    ends the wait. Raises TransientError.
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
