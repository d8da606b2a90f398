import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from storage.coordination import leases
from storage.coordination.leases import ATTEMPTS_MAX, UNREADABLE_MAX, LeaseWatch
from storage.errors import ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import encode
from storage.records.control import Lease
from storage.records.numbers import COUNT_MAX
from storage.store.object_store import ObjectStore


class Clock:
    """A clock that only a test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


REQUESTS_MAX = 100


@dataclass
class ManyLeases:
    """Objects in which order 7 has `num_leases` released leases, the newest `num_unreadable` of
    them damaged. Counts requests, and fails after REQUESTS_MAX of them.
    """

    num_leases: int
    num_unreadable: int = 0
    requests: int = 0

    def __getattr__(self, verb: str) -> Any:
        raise AssertionError(f"{verb} is not called")

    def exists(self, key: str) -> bool:
        self._count()
        return self._attempt(key) < self.num_leases

    def read(self, key: str) -> bytes:
        self._count()
        attempt = self._attempt(key)
        if attempt >= self.num_leases:
            raise NotFoundError(key)
        if attempt >= self.num_leases - self.num_unreadable:
            return b"{"
        lease = Lease(order=7, attempt=attempt, worker="a", region="", lost=3, released=True)
        return encode(lease)

    def create(self, key: str, body: bytes) -> bool:
        assert self._attempt(key) == self.num_leases == json.loads(body)["attempt"]
        return True

    def _attempt(self, key: str) -> int:
        order, attempt, suffix = key.removeprefix("leases/").split(".")
        assert (int(order), suffix) == (7, "json")
        return int(attempt)

    def _count(self) -> None:
        self.requests += 1
        assert self.requests <= REQUESTS_MAX, "the search for the newest lease has no bound"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> LeaseWatch:
    return LeaseWatch(ttl_s=20.0, clock=clock)


def take(store: ObjectStore, worker: str, watch: LeaseWatch) -> Lease | None:
    return leases.take(store, 7, worker, "us-east", watch)


def taken(store: ObjectStore, worker: str, watch: LeaseWatch) -> Lease:
    lease = take(store, worker, watch)
    assert lease is not None
    return lease


def test_an_order_without_a_lease_is_leased_at_attempt_0(
    memory_store: ObjectStore, watch: LeaseWatch
) -> None:
    lease = taken(memory_store, "a", watch)
    assert (lease.order, lease.attempt, lease.worker, lease.region, lease.renewals) == (
        7,
        0,
        "a",
        "us-east",
        0,
    )
    assert memory_store.list() == ["leases/00000007.0000.json"]


def test_a_renewed_lease_is_never_taken_over(
    memory_store: ObjectStore, watch: LeaseWatch, clock: Clock
) -> None:
    lease = taken(memory_store, "a", LeaseWatch(20.0))
    for renewals in range(1, 20):
        assert take(memory_store, "b", watch) is None
        clock.now_s += 19.0
        lease = leases.renew(memory_store, lease)
        assert lease.renewals == renewals


def test_an_unrenewed_lease_is_taken_over_after_its_ttl(
    memory_store: ObjectStore, watch: LeaseWatch, clock: Clock
) -> None:
    taken(memory_store, "a", LeaseWatch(20.0))
    assert take(memory_store, "b", watch) is None
    clock.now_s += 19.9
    assert take(memory_store, "b", watch) is None
    clock.now_s += 0.1
    assert taken(memory_store, "b", watch).attempt == 1


def test_a_new_observer_waits_a_full_ttl(memory_store: ObjectStore, clock: Clock) -> None:
    taken(memory_store, "a", LeaseWatch(20.0, clock))
    clock.now_s += 1000.0
    assert take(memory_store, "b", LeaseWatch(20.0, clock)) is None


def test_the_wait_restarts_at_a_new_attempt(
    memory_store: ObjectStore, watch: LeaseWatch, clock: Clock
) -> None:
    taken(memory_store, "a", LeaseWatch(20.0))
    assert take(memory_store, "c", watch) is None
    clock.now_s += 20.0
    released = leases.read_newest(memory_store, 7)
    assert released is not None
    leases.release(memory_store, released)
    taken(memory_store, "b", LeaseWatch(20.0))
    assert take(memory_store, "c", watch) is None
    clock.now_s += 20.0
    assert taken(memory_store, "c", watch).attempt == 2


def test_a_released_lease_is_open_immediately(memory_store: ObjectStore, watch: LeaseWatch) -> None:
    leases.release(memory_store, taken(memory_store, "a", watch))
    assert taken(memory_store, "b", watch).attempt == 1


def test_expired_leases_are_counted_and_released_ones_are_not(
    memory_store: ObjectStore, watch: LeaseWatch, clock: Clock
) -> None:
    def after_ttl() -> Lease:
        assert take(memory_store, "b", watch) is None
        clock.now_s += 20.0
        return taken(memory_store, "b", watch)

    result = [taken(memory_store, "a", watch), after_ttl()]
    leases.release(memory_store, result[-1])
    result.append(taken(memory_store, "a", watch))
    leases.release(memory_store, leases.renew(memory_store, result[-1]))
    result += [taken(memory_store, "a", watch), after_ttl()]
    assert [(lease.attempt, lease.lost) for lease in result] == [
        (0, 0),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
    ]
    stored = leases.read_newest(memory_store, 7)
    assert stored is not None
    assert stored.lost == 2


def test_an_unreadable_lease_protects_no_order_and_counts_as_expired(
    memory_store: ObjectStore, watch: LeaseWatch, clock: Clock
) -> None:
    taken(memory_store, "a", watch)
    assert take(memory_store, "b", watch) is None
    clock.now_s += 20.0
    owned = taken(memory_store, "b", watch)
    assert (owned.attempt, owned.lost) == (1, 1)
    memory_store.put("leases/00000007.0001.json", b"{")
    later = taken(memory_store, "c", watch)
    assert (later.attempt, later.lost) == (2, 2)
    assert (
        take(memory_store, "d", watch) is None
    )  # it is valid, even if earlier ones cannot be read
    with pytest.raises(CorruptError):
        leases.renew(memory_store, owned)


def test_the_largest_numbers_of_a_lease_remain_what_they_are(
    memory_store: ObjectStore, watch: LeaseWatch, clock: Clock
) -> None:
    lease = replace(taken(memory_store, "a", watch), lost=COUNT_MAX, renewals=COUNT_MAX)
    memory_store.put("leases/00000007.0000.json", encode(lease))
    assert leases.renew(memory_store, lease) == leases.read(memory_store, 7, 0) == lease
    assert take(memory_store, "b", watch) is None
    clock.now_s += 20.0
    assert taken(memory_store, "b", watch) == leases.read(memory_store, 7, 1)
    memory_store.put("leases/00000007.0002.json", b"{")
    assert taken(memory_store, "c", watch) == leases.read(memory_store, 7, 3)
    assert leases.read(memory_store, 7, 3).lost == COUNT_MAX


def test_a_release_overwrites_a_concurrent_renewal(
    memory_store: ObjectStore, watch: LeaseWatch
) -> None:
    lease = taken(memory_store, "a", watch)
    leases.renew(memory_store, lease)
    leases.release(memory_store, lease)  # by an owner that has not read the renewal
    newest = leases.read_newest(memory_store, 7)
    assert newest is not None
    assert (newest.renewals, newest.released) == (2, True)


def test_one_of_two_observers_of_an_expired_lease_gets_it(
    memory_store: ObjectStore, clock: Clock
) -> None:
    taken(memory_store, "a", LeaseWatch(20.0))
    watches = [LeaseWatch(20.0, clock), LeaseWatch(20.0, clock)]
    assert [take(memory_store, "b", watches[0]), take(memory_store, "c", watches[1])] == [
        None,
        None,
    ]
    clock.now_s += 20.0
    assert taken(memory_store, "b", watches[0]).attempt == 1
    assert take(memory_store, "c", watches[1]) is None


def test_the_loser_of_a_create_race_gets_no_lease(
    memory_store: ObjectStore, watch: LeaseWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken(memory_store, "a", watch)
    monkeypatch.setattr(leases, "read_newest", lambda *args: None)  # read before the winner wrote
    assert take(memory_store, "b", watch) is None


def test_a_renewal_by_a_superseded_owner_fails(
    memory_store: ObjectStore, watch: LeaseWatch, clock: Clock
) -> None:
    stalled = taken(memory_store, "a", LeaseWatch(20.0))
    take(memory_store, "b", watch)
    clock.now_s += 20.0
    taken(memory_store, "b", watch)
    with pytest.raises(ConflictError, match="expired and was superseded by attempt 1"):
        leases.renew(memory_store, stalled)
    leases.release(memory_store, stalled)
    newest = leases.read_newest(memory_store, 7)
    assert newest is not None
    assert (newest.worker, newest.released) == ("b", False)


def test_a_lease_with_another_write_id_cannot_be_renewed(
    memory_store: ObjectStore, watch: LeaseWatch
) -> None:
    lease = taken(memory_store, "a", watch)
    with pytest.raises(ConflictError, match="is no longer a's"):
        leases.renew(memory_store, replace(lease, write_id="0" * 32))


def test_a_released_or_vanished_lease_cannot_be_renewed(
    memory_store: ObjectStore, watch: LeaseWatch
) -> None:
    lease = taken(memory_store, "a", watch)
    leases.release(memory_store, lease)
    with pytest.raises(ConflictError):
        leases.renew(memory_store, lease)
    memory_store.delete("leases/00000007.0000.json")
    with pytest.raises(ConflictError, match="is gone"):
        leases.renew(memory_store, lease)


def test_releasing_twice_is_harmless(memory_store: ObjectStore, watch: LeaseWatch) -> None:
    lease = taken(memory_store, "a", watch)
    leases.release(memory_store, lease)
    leases.release(memory_store, lease)
    assert taken(memory_store, "b", watch).attempt == 1


def test_the_cached_lease_of_a_finished_order_is_dropped(
    memory_store: ObjectStore, watch: LeaseWatch, clock: Clock
) -> None:
    lease = taken(memory_store, "a", LeaseWatch(20.0))
    leases.release(memory_store, lease)
    competitor = taken(memory_store, "b", LeaseWatch(20.0))
    assert take(memory_store, "c", watch) is None
    assert watch.attempt_of(7) == competitor.attempt == 1
    watch.forget(7)
    watch.forget(7)
    assert watch.attempt_of(7) == 0
    assert not watch.expired(competitor)
    clock.now_s += 20.0
    assert watch.expired(competitor), "the wait begins when the lease is seen again"


def test_a_workers_own_lease_is_not_cached_as_a_foreign_one(
    memory_store: ObjectStore, watch: LeaseWatch, clock: Clock
) -> None:
    leases.release(memory_store, taken(memory_store, "a", LeaseWatch(20.0)))
    taken(memory_store, "a", LeaseWatch(20.0))
    assert take(memory_store, "b", watch) is None
    assert watch.attempt_of(7) == 1
    clock.now_s += 20.0
    assert taken(memory_store, "b", watch).attempt == 2
    assert watch.attempt_of(7) == 0


def test_a_lease_at_the_key_of_another_is_corrupt(memory_store: ObjectStore) -> None:
    lease = taken(memory_store, "a", LeaseWatch(20.0))
    memory_store.put(
        "leases/00000007.0000.json",
        memory_store.get("leases/00000007.0000.json").replace(b'"order":7', b'"order":8'),
    )
    with pytest.raises(
        CorruptError, match=r"leases/00000007\.0000\.json holds the lease of order 8, attempt 0"
    ):
        leases.renew(memory_store, lease)


def test_the_newest_of_many_leases_is_found_by_few_requests(watch: LeaseWatch) -> None:
    backend = ManyLeases(num_leases=1000)
    lease = taken(ObjectStore(url="memory://many", backend=backend), "b", watch)
    assert (lease.attempt, lease.lost) == (1000, 3)
    assert backend.requests <= 25


@pytest.mark.parametrize("num_leases", [ATTEMPTS_MAX + 1, 1_000_000, 10**15])
def test_an_order_with_too_many_leases_is_named_after_few_requests(
    num_leases: int, watch: LeaseWatch
) -> None:
    backend = ManyLeases(num_leases=num_leases)
    with pytest.raises(CorruptError, match=r"order 7 has more than 10,000 leases.*00000007\.\*"):
        take(ObjectStore(url="memory://many", backend=backend), "b", watch)
    assert backend.requests <= 35


def test_the_maximum_number_of_leases_is_accepted(watch: LeaseWatch) -> None:
    backend = ManyLeases(num_leases=ATTEMPTS_MAX)
    assert (
        taken(ObjectStore(url="memory://many", backend=backend), "b", watch).attempt == ATTEMPTS_MAX
    )


@pytest.mark.parametrize(
    ("num_unreadable", "lost"),
    [(1, 3 + 1), (UNREADABLE_MAX - 1, 3 + UNREADABLE_MAX - 1), (UNREADABLE_MAX, UNREADABLE_MAX)],
)
def test_unreadable_leases_are_counted_as_expired_up_to_a_limit(
    num_unreadable: int, lost: int, watch: LeaseWatch
) -> None:
    backend = ManyLeases(num_leases=500, num_unreadable=num_unreadable)
    lease = taken(ObjectStore(url="memory://many", backend=backend), "b", watch)
    assert (lease.attempt, lease.lost) == (500, lost)


def test_five_hundred_unreadable_leases_cost_few_requests(watch: LeaseWatch) -> None:
    backend = ManyLeases(num_leases=500, num_unreadable=500)
    lease = taken(ObjectStore(url="memory://many", backend=backend), "b", watch)
    assert (lease.attempt, lease.lost) == (500, UNREADABLE_MAX)
    assert backend.requests <= 60


def test_a_lease_of_another_worker_is_read_with_two_requests(watch: LeaseWatch) -> None:
    backend = ManyLeases(num_leases=1)
    newest = leases.read_newest(ObjectStore(url="memory://many", backend=backend), 7)
    assert newest is not None
    assert (newest.order, newest.attempt) == (7, 0)
    assert backend.requests == 2
