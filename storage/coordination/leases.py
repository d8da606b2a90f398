"""Leases: a worker's claim on an order, so that a live worker's order is left alone and a dead
one's is taken over.

    attempt 0 ──renewed by its owner──▶ … silent for ttl_s (or released) ──▶ attempt 1, created once by whoever is first

A lease saves double work, it decides nothing: two workers may hold one order for a while, and the
shard's put-if-absent keeps one result. Expiry is judged on the observer's own monotonic clock, so
clocks of machines need not agree.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from storage import layout
from storage.errors import ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import decode, encode
from storage.plain_names import new_write_id
from storage.records.control import Lease
from storage.store.object_store import ObjectStore, read_twice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Sighting:
    attempt: int
    renewals: int
    since_s: float
    """On the observer's clock: when this attempt was first seen with this many renewals."""


class LeaseWatch:
    """One observer's memory of others' leases. For one thread. A fresh observer waits a whole
    `ttl_s` of its own.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._sightings: dict[int, _Sighting] = {}

    def expired(self, lease: Lease) -> bool:
        """Whether this observer has seen the lease stand still for `ttl_s`; call it again and again
        to let it judge.
        """
        now_s = self._clock()
        seen = self._sightings.get(lease.order)
        if seen is None or (seen.attempt, seen.renewals) != (lease.attempt, lease.renewals):
            self._sightings[lease.order] = _Sighting(lease.attempt, lease.renewals, now_s)
            return False
        return now_s - seen.since_s >= self.ttl_s

    def attempt_of(self, order: int) -> int:
        """The newest attempt seen of an order: where the search for a newer one begins."""
        seen = self._sightings.get(order)
        return seen.attempt if seen else 0

    def forget(self, order: int) -> None:
        """Drop what is remembered of an order that is done."""
        self._sightings.pop(order, None)


def take(run: ObjectStore, order: int, worker: str, region: str, watch: LeaseWatch) -> Lease | None:
    """A lease on `order`: its first, or the one after an expired or released one. None while
    another's stands.

    `lost` of the result counts the leases before it that expired; the caller judges how many are
    too many.
    """
    newest = read_newest(run, order, watch.attempt_of(order))
    if newest is not None and not newest.released and not watch.expired(newest):
        return None
    attempt = newest.attempt + 1 if newest else 0
    lease = Lease(
        order=order,
        attempt=attempt,
        worker=worker,
        region=region,
        lost=_lost_up_to(newest),
        write_id=new_write_id(),
    )
    try:
        run.create(layout.lease(order, attempt), encode(lease))
    except ConflictError:
        return None
    watch.forget(order)
    return lease


def renew(run: ObjectStore, lease: Lease) -> Lease:
    """The lease with one renewal more, written down; ConflictError when it is lost: give up the
    order's work.
    """
    return _overwrite(run, lease, released=False)


def release(run: ObjectStore, lease: Lease) -> None:
    """Give the order back, open to others at once. A lease that was lost already needs no giving
    back.
    """
    try:
        _overwrite(run, lease, released=True)
    except ConflictError:
        return


def read_newest(run: ObjectStore, order: int, start: int = 0) -> Lease | None:
    """The lease of the highest attempt, searched from attempt `start` up; None when there is none.

    One that cannot be read holds no order: its place is taken by an expired one, with the order
    open at once.
    """
    newest: Lease | None = None
    attempt = start
    while True:
        try:
            newest = _read(run, order, attempt)
        except NotFoundError:
            return newest
        except CorruptError as error:
            log.warning("a lease that cannot be read holds no order: %s", error)
            newest = Lease(
                order=order,
                attempt=attempt,
                worker="",
                region="",
                lost=_lost_up_to(newest) + 1,
                released=True,
            )
        attempt += 1


def _lost_up_to(newest: Lease | None) -> int:
    """How many leases expired, once `newest` is over."""
    return newest.lost + (not newest.released) if newest else 0


def _overwrite(run: ObjectStore, lease: Lease, released: bool) -> Lease:
    """Only the owner ever overwrites a lease, one call at a time; looking first tells it that the
    store or another worker disagrees.
    """
    key = layout.lease(lease.order, lease.attempt)
    try:
        stands = _read(run, lease.order, lease.attempt)
    except NotFoundError:
        raise ConflictError(f"{key} is gone") from None
    if stands.write_id != lease.write_id or stands.released:
        raise ConflictError(f"{key} is no longer {lease.worker}'s")
    if run.exists(layout.lease(lease.order, lease.attempt + 1)):
        raise ConflictError(f"{key} expired and was superseded by attempt {lease.attempt + 1}")
    changed = replace(stands, renewals=stands.renewals + 1, released=released)
    run.put(key, encode(changed))
    return changed


def _read(run: ObjectStore, order: int, attempt: int) -> Lease:
    key = layout.lease(order, attempt)
    lease = read_twice(lambda: decode(Lease, run.get(key), key))
    if (lease.order, lease.attempt) != (order, attempt):
        raise CorruptError(f"{key} holds the lease of order {lease.order}, attempt {lease.attempt}")
    return lease
