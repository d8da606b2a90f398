"""A worker's leases on orders: find the lowest open order, lease it, renew, give back.

    orders   0 done   1 done   2 leased elsewhere   3 leased here   4 open ◀── next()

All calls block on the store. A lease only avoids double work: the shard, created once, decides.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from storage import layout
from storage.coordination import heartbeats, leases
from storage.coordination.lifetime import SameFailure
from storage.errors import UNREADABLE, AstraFlowError, CorruptError, NotFoundError, TransientError
from storage.records.control import Lease
from storage.records.progress import DataflowProgress
from storage.records.rollouts import Order
from storage.run import orders, shards
from storage.run.quarantine import is_quarantined
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)

LOOK_AHEAD_MAX = 1_024
"""Orders that are not done and are considered in one search; more than the dataflow ever has
outstanding.
"""
LOST_INTERVAL_S = 10.0
"""Time between two checks whether an absent order was lost, which costs four requests, and between
two checks whether an order that counts as done has lost its shard, which costs up to five.
"""
RECHECK_INTERVAL_MAX_S = 1.0
"""Longest time after which an order that another worker has leased is checked again."""
_DATAFLOW = layout.heartbeat("dataflow", "dataflow")
"""A run has one dataflow."""


@dataclass(frozen=True)
class LeasedOrder:
    """An order with this worker's lease on it."""

    order: Order
    lease: Lease
    overwriting: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    """Held while the lease is overwritten: a renewal that ends after the release would undo it."""


class OrderLeasing:
    """One worker's leases. Thread-safe.

    A renewal waits for no search and for no other order, only for the release of its own lease.
    """

    def __init__(
        self,
        run: ObjectStore,
        worker: str,
        region: str,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        episodes_max: int = orders.EPISODES_MAX,
    ) -> None:
        """Create the leases of a worker; `episodes_max` as for `orders.read`."""
        self._run = run
        self._episodes_max = episodes_max
        self._worker = worker
        self._region = region
        self._clock = clock
        self._watch = leases.LeaseWatch(ttl_s, clock)
        self._recheck_interval_s = min(RECHECK_INTERVAL_MAX_S, ttl_s / 4)
        self._lock = threading.Lock()
        self._floor = 0
        """Every order below it is done, as far as was checked or the dataflow reported."""
        self._unchecked_below: int | None = None
        """Orders below it are done by the dataflow's report alone; None before the first search."""
        self._done: set[int] = set()
        self._leased: set[int] = set()
        self._recheck_at_s: dict[int, float] = {}
        self._to_recheck: list[int] = []
        """Orders that count as done and will be checked again, the next one last."""
        self._recheck_done_at_s = clock()
        self._failure = SameFailure()
        self._absent_until_s = (-1, 0.0)
        self._skipped: dict[int, str] = {}
        """Open orders that are damaged or lost, each with the reason for a person."""

    def next(self) -> LeasedOrder | None:
        """Lease the lowest order that is neither done nor leased; None when there is none.

        Raises TransientError, which says what a person can do once the same one was raised before.
        """
        with self._lock:
            try:
                leased = self._search()
            except TransientError as error:
                raise TransientError(self._failure.describe(error)) from error
            self._failure.clear()
            if leased is None:
                self._recheck_done()
            return leased

    def _search(self) -> LeasedOrder | None:
        if self._unchecked_below is None:
            self._floor = self._unchecked_below = self._reported_floor()
        number, num_open = self._floor, 0
        while num_open < LOOK_AHEAD_MAX:
            if self._is_candidate(number):
                try:
                    leased = self._try_lease(number)
                except NotFoundError as error:
                    if not self._is_lost(number):
                        break  # orders have no gaps: this one is not written yet
                    self._skip(number, error)
                    leased = None
                if leased is not None:
                    return leased
            num_open += not self._is_done(number)
            number += 1
        return None

    def _is_lost(self, number: int) -> bool:
        """Return whether an absent order was written before; checked at an interval."""
        absent, until_s = self._absent_until_s
        if number == absent and self._clock() < until_s:
            return False
        if orders.is_lost(self._run, number):
            return True
        self._absent_until_s = (number, self._clock() + LOST_INTERVAL_S)
        return False

    @property
    def problem(self) -> str:
        """Why the lowest of the skipped orders cannot be leased; empty when none is skipped."""
        skipped = dict(self._skipped)  # no lock: a search holds it while the store responds
        return skipped[min(skipped)] if skipped else ""

    def renew(self, leased: LeasedOrder) -> LeasedOrder:
        """Renew the lease; ConflictError when it is lost."""
        with leased.overwriting:
            return replace(leased, lease=leases.renew(self._run, leased.lease))

    def done(self, leased: LeasedOrder) -> None:
        """Record that the order has its shard."""
        with self._lock:
            self._leased.discard(leased.order.number)
            self._mark_done(leased.order.number)

    def lost(self, leased: LeasedOrder) -> None:
        """Record that this worker no longer has the order."""
        with self._lock:
            self._leased.discard(leased.order.number)
            self._recheck_later(leased.order.number)

    def give_back(self, leased: LeasedOrder) -> None:
        """Release the lease, so that other workers may take the order at once."""
        self.lost(leased)
        with leased.overwriting:
            leases.release(self._run, leased.lease)

    def _is_done(self, number: int) -> bool:
        return number < self._floor or number in self._done

    def _is_candidate(self, number: int) -> bool:
        return (
            not self._is_done(number)
            and number not in self._leased
            and self._clock() >= self._recheck_at_s.get(number, 0.0)
        )

    def _try_lease(self, number: int) -> LeasedOrder | None:
        """Lease one order; None when it is done, leased elsewhere or unreadable."""
        if shards.exists(self._run, number):
            self._mark_done(number)
            return None
        try:
            order = orders.read(self._run, number, self._episodes_max)
            lease = leases.take(self._run, number, self._worker, self._region, self._watch)
        except CorruptError as error:
            self._skip(number, error)
            return None
        if lease is None:
            self._recheck_later(number)
            return None
        self._leased.add(number)
        self._skipped.pop(number, None)
        return LeasedOrder(order, lease)

    def _skip(self, number: int, error: AstraFlowError) -> None:
        """Pass over an order that is damaged or lost; forever, when the dataflow has closed it."""
        if is_quarantined(self._run, layout.order(number)):
            self._mark_done(number)
            return
        if number not in self._skipped:
            log.warning("order %d is skipped: %s", number, error)
        self._skipped[number] = f"{layout.order(number)} cannot be leased: {error}"
        self._recheck_later(number)

    def _recheck_later(self, number: int) -> None:
        self._recheck_at_s[number] = self._clock() + self._recheck_interval_s

    def _mark_done(self, number: int) -> None:
        self._watch.forget(number)
        self._recheck_at_s.pop(number, None)
        self._skipped.pop(number, None)
        self._done.add(number)
        while self._floor in self._done:
            self._done.discard(self._floor)
            self._floor += 1

    def _reported_floor(self) -> int:
        """Return the order below which the dataflow reports all orders as ingested.

        The report is a hint that saves requests. One beyond the newest order counts as 0, since it
        would hide all orders; so does one that cannot be read.
        """
        try:
            beat = heartbeats.parse(self._run.get(_DATAFLOW), _DATAFLOW)
            assert isinstance(beat.progress, DataflowProgress)  # its key has the kind
            floor = beat.progress.closed_below
            return floor if floor and self._run.exists(layout.order(floor - 1)) else 0
        except (NotFoundError, *UNREADABLE):
            return 0

    def _recheck_done(self) -> None:
        """Check one order that counts as done, and open it if it has no shard.

        Called while there is nothing to lease; does something at an interval. A wrong report hides
        no order for ever, nor does a shard that was lost before a batch listed it: after a restart,
        the dataflow waits for it. It waits for no order in quarantine, nor for such a shard.
        """
        if self._clock() < self._recheck_done_at_s:
            return
        self._recheck_done_at_s = self._clock() + LOST_INTERVAL_S
        with suppress(TransientError):  # others answered in this search, and it is only a recheck
            self._to_recheck = self._to_recheck or self._next_rechecks()
            if not self._to_recheck:
                return
            number = self._to_recheck.pop()
            if not (
                shards.exists(self._run, number)
                or is_quarantined(self._run, layout.order(number))
                or is_quarantined(self._run, layout.shard(number))
            ):
                self._reopen(number)

    def _next_rechecks(self) -> list[int]:
        """Return the orders to check next, the first one last: downwards, those that are done but
        that the dataflow does not report as ingested, then one that is done by a report alone.
        """
        reported = self._reported_floor()
        unchecked = range(self._unchecked_below or 0)[-1:]
        self._unchecked_below = max((self._unchecked_below or 0) - 1, 0)
        done = (number for number in sorted(self._done) if number >= reported)
        return [*unchecked, *range(reported, self._floor), *done]

    def _reopen(self, number: int) -> None:
        """Undo `_mark_done`; the orders above remain done."""
        log.warning("order %d counted as done and has no shard: it is leased again", number)
        if number < self._floor:
            self._done.update(range(number + 1, self._floor))
            self._floor = number
        else:
            self._done.discard(number)
