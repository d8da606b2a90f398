"""Which orders a worker works at: finds the lowest that is open, leases it, keeps the lease alive,
gives it back.

    orders   0 ✓  1 ✓  2 another's  3 mine  4 open ◀── next()      ✓: a shard stands

Plain blocking calls on the store; knows nothing of what an order asks for. A lease saves double
work and decides nothing.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from storage import layout
from storage.coordination import heartbeats, leases
from storage.errors import CorruptError, NotFoundError
from storage.records.control import Lease
from storage.records.progress import DataflowProgress
from storage.records.rollouts import Order
from storage.run import orders, shards
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)

LOOK_AHEAD_MAX = 1_024
"""Orders looked at in one search; the dataflow never has so many outstanding."""
RELOOK_S_MAX = 1.0
"""An order that another worker holds is looked at again so long after."""


@dataclass(frozen=True)
class LeasedOrder:
    """An order, and the lease this worker has on it."""

    order: Order
    lease: Lease


class OrderLeasing:
    """One worker's search for orders. May be used from several threads. A renewal waits for no
    search, only for an order that is given back: were both to overwrite a lease at a time, the
    renewal could undo the release.
    """

    def __init__(
        self,
        run: ObjectStore,
        worker: str,
        region: str,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._worker = worker
        self._region = region
        self._clock = clock
        self._watch = leases.LeaseWatch(ttl_s, clock)
        self._relook_s = min(RELOOK_S_MAX, ttl_s / 4)
        self._lock = threading.Lock()
        self._overwriting = threading.Lock()
        self._floor = 0
        self._unproven: int | None = None
        """Nobody has looked at the orders below it; None before the first search."""
        self._done: set[int] = set()
        self._held: set[int] = set()
        self._again_at_s: dict[int, float] = {}

    def next(self) -> LeasedOrder | None:
        """A lease on the lowest order that is neither done nor held; None when there is none
        now.
        """
        with self._lock:
            if self._unproven is None:
                self._floor = self._unproven = self._hinted_floor()
            number = self._floor
            while number < self._floor + LOOK_AHEAD_MAX:
                if number not in self._done and number not in self._held and self._due(number):
                    try:
                        claim = self._look(number)
                    except NotFoundError:
                        break  # orders have no gaps: this one is not written yet
                    if claim is not None:
                        return claim
                number += 1
            self._prove(self._unproven)
            return None

    def renew(self, claim: LeasedOrder) -> LeasedOrder:
        """ConflictError when the lease is lost."""
        with self._overwriting:
            return LeasedOrder(claim.order, leases.renew(self._run, claim.lease))

    def done(self, claim: LeasedOrder) -> None:
        """The order has its shard."""
        with self._lock:
            self._held.discard(claim.order.number)
            self._close(claim.order.number)

    def lost(self, claim: LeasedOrder) -> None:
        """Another worker has the order now."""
        with self._lock:
            self._held.discard(claim.order.number)
            self._put_off(claim.order.number)

    def give_back(self, claim: LeasedOrder) -> None:
        """Opens the order to others at once."""
        self.lost(claim)
        with self._overwriting:
            leases.release(self._run, claim.lease)

    def _look(self, number: int) -> LeasedOrder | None:
        if shards.exists(self._run, number):
            self._close(number)
            return None
        try:
            order = orders.read(self._run, number)
            lease = leases.take(self._run, number, self._worker, self._region, self._watch)
        except CorruptError as error:
            log.warning("order %d is left alone: %s", number, error)
            lease = None
        if lease is None:
            self._put_off(number)
            return None
        self._held.add(number)
        return LeasedOrder(order, lease)

    def _due(self, number: int) -> bool:
        return self._clock() >= self._again_at_s.get(number, 0.0)

    def _put_off(self, number: int) -> None:
        self._again_at_s[number] = self._clock() + self._relook_s

    def _close(self, number: int) -> None:
        self._watch.forget(number)
        self._again_at_s.pop(number, None)
        self._done.add(number)
        while self._floor in self._done:
            self._done.discard(self._floor)
            self._floor += 1

    def _hinted_floor(self) -> int:
        """Below it the dataflow reports to have taken in every order. Only a hint, to begin the
        search near its end; one beyond every order would hide them all.
        """
        hint = max(
            (
                beat.progress.closed_below
                for beat in heartbeats.read_all(self._run)
                if isinstance(beat.progress, DataflowProgress)
            ),
            default=0,
        )
        return hint if hint and self._run.exists(layout.order(hint - 1)) else 0

    def _prove(self, unproven: int) -> None:
        """Looks at one order below the hint each time there is nothing to do, so that a wrong hint
        hides no order for ever.
        """
        if unproven > 0:
            self._unproven = unproven - 1
            if not shards.exists(self._run, unproven - 1):
                self._floor = unproven - 1
