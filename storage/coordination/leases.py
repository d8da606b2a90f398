"""Leases: a worker's claim on an order, so that other workers leave the order of a live worker
alone and take over that of a dead one.

    attempt 0 ──renewed──▶ ──renewed──▶ … not renewed for ttl_s, or released ──▶ attempt 1

A lease saves double work and decides nothing: two workers may hold one order for a while, and the
shard's put-if-absent keeps one result. Expiry is measured on the observer's own monotonic clock, so
the clocks of machines need not agree.
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
from storage.records.numbers import COUNT_MAX
from storage.store.galloping_search import first_absent
from storage.store.object_store import ObjectStore, read_twice

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 10_000
"""Leases of one order. An order with so many is an error: its leases are no work of workers."""
UNREADABLE_MAX = 16
"""Unreadable leases that are counted, from the newest one back."""


@dataclass(frozen=True)
class _Sighting:
    """The state of a lease when an observer last found it changed."""

    attempt: int
    renewals: int
    since_s: float
    """Time on the observer's clock."""


class LeaseWatch:
    """One observer's record of the leases of others, by which it decides that one expired.

    For one thread. A new observer waits for a whole `ttl_s`.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._sightings: dict[int, _Sighting] = {}

    def expired(self, lease: Lease) -> bool:
        """Return whether the lease was not renewed for `ttl_s`, by the reads of this observer.

        Call it with every read of the lease.
        """
        now_s = self._clock()
        sighting = self._sightings.get(lease.order)
        if sighting is None or (sighting.attempt, sighting.renewals) != (
            lease.attempt,
            lease.renewals,
        ):
            self._sightings[lease.order] = _Sighting(lease.attempt, lease.renewals, now_s)
            return False
        return now_s - sighting.since_s >= self.ttl_s

    def attempt_of(self, order: int) -> int:
        """Return the newest attempt of an order that was read: searches start from it."""
        sighting = self._sightings.get(order)
        return sighting.attempt if sighting else 0

    def forget(self, order: int) -> None:
        """Drop the record of an order."""
        self._sightings.pop(order, None)


def take(run: ObjectStore, order: int, worker: str, region: str, watch: LeaseWatch) -> Lease | None:
    """Create a lease on `order`: its first, or the one after an expired or released one.

    The caller checks `lost` of the result, the number of earlier leases that expired.

    Returns:
        None while another worker has the order.

    Raises:
        CorruptError: the order has more than ATTEMPTS_MAX leases.
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
    """Store the lease with one renewal more and return it.

    Raises:
        ConflictError: the lease is lost; drop the order's work.
    """
    return _overwrite(run, lease, released=False)


def release(run: ObjectStore, lease: Lease) -> None:
    """Release the order for other workers; nothing happens where the lease is lost already."""
    try:
        _overwrite(run, lease, released=True)
    except ConflictError:
        return


def read_newest(run: ObjectStore, order: int, start: int = 0) -> Lease | None:
    """Read the lease of the highest attempt, found by probing upwards from attempt `start`.

    An unreadable lease counts as expired, and the order is open at once.

    Returns:
        None when there is no lease.

    Raises:
        CorruptError: the order has more than ATTEMPTS_MAX leases.
    """

    def exists(attempt: int) -> bool:
        return attempt <= ATTEMPTS_MAX and run.exists(layout.lease(order, attempt))

    try:
        first = read(run, order, start)
    except NotFoundError:
        return None
    except CorruptError:
        first = None  # counted below
    newest = first_absent(exists, start + 1) - 1
    if newest == start and first is not None:
        return first
    if newest >= ATTEMPTS_MAX:
        raise CorruptError(
            f"order {order} has more than {ATTEMPTS_MAX:,} leases, which no workers made: delete "
            f"{run.url}/{layout.LEASES}/{order:08d}.*"
        )
    num_unreadable = 0
    for attempt in range(newest, max(newest - UNREADABLE_MAX, -1), -1):
        try:
            lease = read(run, order, attempt)
        except NotFoundError:
            continue  # deleted meanwhile
        except CorruptError as error:
            log.warning("an unreadable lease counts as expired: %s", error)
            num_unreadable += 1
            continue
        if not num_unreadable:
            return lease
        return _open_lease(order, newest, lost=_lost_up_to(lease) + num_unreadable)
    return _open_lease(order, newest, lost=num_unreadable) if num_unreadable else None


def _open_lease(order: int, attempt: int, lost: int) -> Lease:
    """A released lease in place of an unreadable one."""
    return Lease(order=order, attempt=attempt, worker="", region="", lost=lost, released=True)


def _lost_up_to(lease: Lease | None) -> int:
    """How many leases expired, once `lease` is over."""
    return min(lease.lost + (not lease.released), COUNT_MAX) if lease else 0


def _overwrite(run: ObjectStore, lease: Lease, released: bool) -> Lease:
    """Overwrite a lease, one call at a time and by its owner only, after it was read back.

    Raises:
        ConflictError: the lease is gone, or another worker has the order.
    """
    key = layout.lease(lease.order, lease.attempt)
    try:
        stored = read(run, lease.order, lease.attempt)
    except NotFoundError:
        raise ConflictError(f"{key} is gone") from None
    if stored.write_id != lease.write_id or stored.released:
        raise ConflictError(f"{key} is no longer {lease.worker}'s")
    if run.exists(layout.lease(lease.order, lease.attempt + 1)):
        raise ConflictError(f"{key} expired and was superseded by attempt {lease.attempt + 1}")
    renewals = min(stored.renewals + 1, COUNT_MAX)
    changed = replace(stored, renewals=renewals, released=released)
    run.put(key, encode(changed))
    return changed


def read(run: ObjectStore, order: int, attempt: int) -> Lease:
    """Read one lease; NotFoundError for none, CorruptError for an invalid one."""
    key = layout.lease(order, attempt)
    lease = read_twice(lambda: decode(Lease, run.get(key), key))
    if (lease.order, lease.attempt) != (order, attempt):
        raise CorruptError(f"{key} holds the lease of order {lease.order}, attempt {lease.attempt}")
    return lease
