import threading
from dataclasses import replace
from typing import Any

import pytest

from rollout.service import order_leasing
from rollout.service.order_leasing import (
    LOST_INTERVAL_S,
    RECHECK_INTERVAL_MAX_S,
    OrderLeasing,
)
from storage import layout
from storage.coordination import leases
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import SAME_FAILURES
from storage.errors import ConflictError, TransientError
from storage.records.control import Lease
from storage.records.progress import DataflowProgress
from storage.records.rollouts import Order, Prompt
from storage.run import orders, shards
from storage.run.quarantine import quarantine_object
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore
from tests.support.patience import PATIENCE_S
from tests.support.runs import builders
from tests.support.runs.dataflow_world import UnreachableBackend

TTL_S = 12.0
ADVICE = (
    "; if this object alone fails, put a good copy of it back; an order or shard can also be "
    "deleted, and then counts as lost"
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def write_orders(run: ObjectStore, count: int) -> None:
    for number in range(count):
        prompt = Prompt(f"p/{number}", {"question": "1+1=?", "answer": "2"})
        orders.create(
            run,
            Order(
                number=number,
                prompts=(prompt,),
                samples_per_prompt=2,
                seed=number,
                seen=(),
                cursor={},
            ),
        )


def claims_of(
    run: ObjectStore, clock: Clock, worker: str = "a", ttl_s: float = TTL_S
) -> OrderLeasing:
    return OrderLeasing(run, worker, "us-east", ttl_s, clock)


def numbers(*claims: OrderLeasing) -> list[int | None]:
    result = [each.next() for each in claims]
    return [claim.order.number if claim else None for claim in result]


def poll(claims: OrderLeasing, clock: Clock, count: int) -> list[int | None]:
    """Search `count` times, at the interval at which orders that count as done are checked."""
    found = []
    for _ in range(count):
        clock.now_s += LOST_INTERVAL_S
        found += numbers(claims)
    return found


def test_the_lowest_open_orders_are_leased_first_and_once(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 3)
    shards.create(memory_store, builders.shard(order=0))
    claims = claims_of(memory_store, Clock())
    assert numbers(claims, claims, claims) == [1, 2, None]


def test_two_workers_share_the_orders(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 4)
    clock = Clock()
    a, b = claims_of(memory_store, clock, "a"), claims_of(memory_store, clock, "b")
    assert numbers(a, b, b, a, a, b) == [0, 1, 2, 3, None, None]


def test_a_released_order_is_soon_open_to_others(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 1)
    clock = Clock()
    a, b = claims_of(memory_store, clock, "a"), claims_of(memory_store, clock, "b")
    held = a.next()
    assert held is not None
    assert numbers(b) == [None]
    a.give_back(held)
    assert numbers(a) == [None]  # others have the first turn
    clock.now_s += 1.0  # orders of other workers are polled again after a second
    taken = b.next()
    assert taken is not None
    assert taken.lease == Lease(
        order=0, attempt=1, worker="b", region="us-east", write_id=taken.lease.write_id
    )


def test_an_order_that_could_not_be_released_is_leased_again_after_the_ttl(
    memory_store: ObjectStore,
) -> None:
    run = memory_store.sub("r")
    write_orders(run, 1)
    clock, backend = Clock(), UnreachableBackend(run.backend)
    claims = claims_of(replace(run, backend=backend, patience_s=1e-6), clock)
    held = claims.next()
    assert held is not None
    backend.key = "r/leases/00000000"
    with pytest.raises(TransientError):
        claims.give_back(held)
    backend.key = ""
    clock.now_s += 1.0
    assert numbers(claims) == [None]
    clock.now_s += TTL_S
    assert numbers(claims) == [0]


def test_an_order_of_a_dead_worker_is_leased_after_the_ttl(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 1)
    clock = Clock()
    a, b = claims_of(memory_store, clock, "a"), claims_of(memory_store, clock, "b")
    held = a.next()
    assert held is not None
    assert numbers(b) == [None]
    clock.now_s += TTL_S - 1
    held = a.renew(held)
    assert numbers(b) == [None]
    clock.now_s += TTL_S - 1
    assert numbers(b) == [None]
    clock.now_s += 1
    assert numbers(b) == [0]
    with pytest.raises(ConflictError):
        a.renew(held)


def test_an_order_answered_by_another_worker_is_not_searched_again(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 2)
    clock = Clock()
    a, b = claims_of(memory_store, clock, "a"), claims_of(memory_store, clock, "b")
    assert numbers(a, b, b) == [0, 1, None]
    shards.create(memory_store, builders.shard(order=0))
    clock.now_s += TTL_S + 2
    assert numbers(b) == [None]
    assert leases.read_newest(memory_store, 0).attempt == 0  # type: ignore[union-attr]  # it exists: worker a made it
    assert (b._watch._sightings, b._recheck_at_s) == ({}, {})


def test_an_unreadable_lease_does_not_protect_an_order(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 1)
    memory_store.put("leases/00000000.0000.json", b'{"format":1,"wri')
    claim = claims_of(memory_store, Clock()).next()
    assert claim is not None
    assert (claim.lease.attempt, claim.lease.lost) == (1, 1)


class SlowRenewal:
    """A backend whose first overwrite blocks until `go` is set."""

    def __init__(self, backend: Backend) -> None:
        self.under_way, self.go = threading.Event(), threading.Event()
        self._backend = backend

    def write(self, key: str, body: bytes) -> None:
        if not self.under_way.is_set():
            self.under_way.set()
            assert self.go.wait(PATIENCE_S)
        self._backend.write(key, body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_a_concurrent_renewal_does_not_undo_a_release(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 1)
    slow = SlowRenewal(memory_store.backend)
    claims = claims_of(replace(memory_store, backend=slow), Clock())
    held = claims.next()
    assert held is not None
    renewed = claims_of(memory_store, Clock()).renew(held)
    renews = threading.Thread(target=claims.renew, args=(renewed,))
    gives_back = threading.Thread(target=claims.give_back, args=(held,))
    renews.start()
    assert slow.under_way.wait(PATIENCE_S)
    gives_back.start()
    gives_back.join(0.2)  # it waits for the renewal; otherwise it would be finished by now
    slow.go.set()
    renews.join()
    gives_back.join()
    newest = leases.read_newest(memory_store, 0)
    assert newest is not None
    assert (newest.released, newest.renewals) == (True, 3)
    with pytest.raises(ConflictError, match="is no longer a's"):
        claims.renew(held)


def test_an_unreadable_order_is_skipped_and_the_next_one_is_found(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 2)
    memory_store.put("orders/00000000.json", b"{")
    assert numbers(claims_of(memory_store, Clock())) == [1]


def test_a_hint_avoids_requests_for_old_orders(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 6)
    for number in range(4):
        shards.create(memory_store, builders.shard(order=number))
    with HeartbeatWriter(memory_store, "dataflow", "dataflow", attempt=0, interval_s=60.0) as pulse:
        pulse.update(progress=DataflowProgress(closed_below=4))
    claims = claims_of(memory_store, Clock())
    assert numbers(claims, claims) == [4, 5]
    assert claims._floor == 4


def test_a_false_hint_hides_no_order_permanently(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 4)
    shards.create(memory_store, builders.shard(order=2))
    with HeartbeatWriter(memory_store, "dataflow", "dataflow", attempt=0, interval_s=60.0) as pulse:
        pulse.update(progress=DataflowProgress(closed_below=3))
    clock = Clock()
    claims = claims_of(memory_store, clock)
    result = [number for number in poll(claims, clock, 8) if number is not None]
    assert result == [3, 1, 0]


def test_a_hint_beyond_the_last_order_is_ignored(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 2)
    with HeartbeatWriter(memory_store, "dataflow", "dataflow", attempt=0, interval_s=60.0) as pulse:
        pulse.update(progress=DataflowProgress(closed_below=2**53))
    claims = claims_of(memory_store, Clock())
    assert numbers(claims, claims) == [0, 1]


def test_a_lost_order_hides_no_later_order_and_is_reported(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 4)
    memory_store.delete("orders/00000001.json")
    memory_store.put("orders/00000002.json", b"{")
    claims = claims_of(memory_store, Clock())
    assert numbers(*[claims] * 3) == [0, 3, None]
    assert claims.problem.startswith("orders/00000001.json cannot be leased: there is no object")


def test_a_damaged_order_is_reported_until_it_is_repaired(memory_store: ObjectStore) -> None:
    write_orders(memory_store, 1)
    body = memory_store.get("orders/00000000.json")
    memory_store.put("orders/00000000.json", b"{")
    clock = Clock()
    claims = claims_of(memory_store, clock)
    assert numbers(claims) == [None]
    assert claims.problem.startswith("orders/00000000.json cannot be leased: ")
    memory_store.put("orders/00000000.json", body)
    clock.now_s += 1.0
    assert numbers(claims) == [0]
    assert claims.problem == ""


def test_lost_orders_that_the_dataflow_closed_are_passed_over_for_ever(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 5)
    for number in (1, 2, 3):
        memory_store.delete(layout.order(number))
    clock = Clock()
    claims = claims_of(memory_store, clock)
    assert numbers(claims, claims) == [0, None]
    for number in (1, 2):
        quarantine_object(memory_store, layout.order(number), "there is no object")
    clock.now_s += LOST_INTERVAL_S
    assert numbers(claims) == [4]
    assert claims.problem.startswith("orders/00000003.json cannot be leased: ")
    quarantine_object(memory_store, layout.order(3), "there is no object")
    clock.now_s += 1.0
    assert numbers(claims) == [None]
    assert (claims.problem, claims._done) == ("", {1, 2, 3})


@pytest.mark.parametrize("key", ["orders/00000000", "leases/00000000"])
def test_a_search_that_fails_at_the_same_object_tells_what_to_do(
    memory_store: ObjectStore, key: str
) -> None:
    run = memory_store.sub("r")
    write_orders(run, 2)
    backend = UnreachableBackend(run.backend)
    claims = claims_of(replace(run, backend=backend, patience_s=1e-6), Clock())
    held = claims.next()
    assert held is not None
    claims.give_back(held)
    claims._recheck_at_s.clear()
    backend.key = f"r/{key}"
    messages = []
    for _ in range(SAME_FAILURES):
        with pytest.raises(TransientError) as caught:
            claims.next()
        messages.append(str(caught.value))
    assert messages[0].startswith(f"r/{key}")
    assert messages == [messages[0]] * (SAME_FAILURES - 1) + [messages[0] + ADVICE]
    assert (claims.problem, claims._skipped) == ("", {})
    backend.key = ""
    held = claims.next()
    assert held is not None
    claims.give_back(held)
    claims._recheck_at_s.clear()
    backend.key = f"r/{key}"
    with pytest.raises(TransientError) as caught:
        claims.next()
    assert str(caught.value) == messages[0]
    backend.key = ""
    assert numbers(claims) == [0]
    backend.key = "r/orders/00000001"
    with pytest.raises(TransientError) as caught:
        claims.next()
    assert str(caught.value) == "r/orders/00000001.json is away"


def test_an_order_in_progress_elsewhere_hides_no_order_however_many_are_done(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_leasing, "LOOK_AHEAD_MAX", 2)
    write_orders(memory_store, 5)
    clock = Clock()
    other, claims = claims_of(memory_store, clock, "b"), claims_of(memory_store, clock)
    assert numbers(other) == [0]
    for number in range(1, 5):
        held = claims.next()
        assert held is not None
        assert held.order.number == number
        claims.done(held)


def test_a_search_ends_after_a_number_of_open_orders(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_leasing, "LOOK_AHEAD_MAX", 2)
    write_orders(memory_store, 3)
    clock = Clock()
    other, claims = claims_of(memory_store, clock, "b"), claims_of(memory_store, clock)
    assert numbers(other, other) == [0, 1]
    assert numbers(claims) == [None], "order 2 is beyond the two open ones"
    shards.create(memory_store, builders.shard(order=0))
    clock.now_s += RECHECK_INTERVAL_MAX_S
    assert numbers(claims) == [2], "order 0 is done and does not count"


def report(run: ObjectStore, closed_below: int) -> None:
    """Write the dataflow's heartbeat."""
    with HeartbeatWriter(run, "dataflow", "dataflow", attempt=0, interval_s=60.0) as pulse:
        pulse.update(progress=DataflowProgress(closed_below=closed_below))


def finish(run: ObjectStore, claims: OrderLeasing, count: int) -> None:
    """Lease `count` orders and create their shards."""
    for _ in range(count):
        held = claims.next()
        assert held is not None
        shards.create(run, builders.shard(order=held.order.number))
        claims.done(held)


def test_a_lost_shard_that_a_restarted_dataflow_waits_for_is_leased_again(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 6)
    clock = Clock()
    claims = claims_of(memory_store, clock)
    finish(memory_store, claims, 6)
    report(memory_store, closed_below=6)
    memory_store.delete(layout.shard(1))
    memory_store.delete(layout.shard(4))
    assert poll(claims, clock, 8) == [None] * 8  # the dataflow has ingested both
    report(memory_store, closed_below=2)
    # orders 5 and 4 are checked, and the old lease of order 4 is watched until it expires
    assert poll(claims, clock, 6) == [None, None, None, None, 4, None]
    report(memory_store, closed_below=1)
    found = poll(claims, clock, 12)
    assert [number for number in found if number is not None] == [1]


def test_a_lost_shard_above_an_order_in_progress_elsewhere_is_leased_again(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 4)
    clock = Clock()
    other, claims = claims_of(memory_store, clock, "b"), claims_of(memory_store, clock)
    held = other.next()
    assert held is not None
    finish(memory_store, claims, 3)
    assert (claims._floor, claims._done) == (0, {1, 2, 3})
    memory_store.delete(layout.shard(2))
    found = []
    for _ in range(6):  # orders 3 and 2 are checked, and the old lease of order 2 is watched
        other.renew(held)
        found += poll(claims, clock, 1)
    assert found == [None, None, None, None, 2, None]


def test_a_quarantined_order_without_a_shard_is_not_leased_again(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 3)
    body = memory_store.get(layout.order(1))
    memory_store.put(layout.order(1), b"{")
    quarantine_object(memory_store, layout.order(1), "invalid JSON")
    clock = Clock()
    claims = claims_of(memory_store, clock)
    finish(memory_store, claims, 2)
    assert claims.next() is None
    memory_store.put(layout.order(1), body)
    assert poll(claims, clock, 8) == [None] * 8


def test_an_order_whose_lost_shard_is_in_quarantine_is_not_leased_again(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 3)
    clock = Clock()
    claims = claims_of(memory_store, clock)
    finish(memory_store, claims, 3)
    memory_store.delete(layout.shard(1))
    quarantine_object(memory_store, layout.shard(1), "there is no object")
    assert poll(claims, clock, 8) == [None] * 8


class CountedReads:
    """A backend that counts reads and existence checks."""

    def __init__(self, backend: Backend) -> None:
        self.count = self.of_leases = 0
        self._backend = backend

    def read(self, key: str) -> bytes:
        self._add(key)
        return self._backend.read(key)

    def exists(self, key: str) -> bool:
        self._add(key)
        return self._backend.exists(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _add(self, key: str) -> None:
        self.count += 1
        self.of_leases += key.startswith(layout.LEASES)


@pytest.mark.parametrize(("ttl_s", "interval_s"), [(TTL_S, RECHECK_INTERVAL_MAX_S), (2.0, 0.5)])
def test_an_order_leased_elsewhere_is_checked_once_a_second_or_four_times_per_ttl(
    memory_store: ObjectStore, ttl_s: float, interval_s: float
) -> None:
    write_orders(memory_store, 1)
    clock = Clock()
    assert numbers(claims_of(memory_store, clock, "a")) == [0]
    backend = CountedReads(memory_store.backend)
    claims = claims_of(replace(memory_store, backend=backend), clock, "b", ttl_s)
    counts = []
    for _ in range(6):
        before = backend.of_leases
        assert claims.next() is None
        counts.append(backend.of_leases - before)
        clock.now_s += interval_s / 2
    # The first search also asks for a lease on order 1, to see whether that was lost.
    assert counts == [3, 0, 2, 0, 2, 0]


def test_one_order_that_counts_as_done_is_checked_in_an_interval(
    memory_store: ObjectStore,
) -> None:
    write_orders(memory_store, 6)
    backend = CountedReads(memory_store.backend)
    clock = Clock()
    claims = claims_of(replace(memory_store, backend=backend), clock)
    finish(memory_store, claims, 6)
    report(memory_store, closed_below=4)
    counts = []
    for _ in range(8):
        before = backend.count
        assert claims.next() is None
        counts.append(backend.count - before)
        clock.now_s += LOST_INTERVAL_S / 2
    # The shard and the order of number 6; in every second search also four requests for whether
    # it was lost, and one for the shard of order 5 or 4, before which two may read the report.
    assert counts == [9, 2, 7, 2, 9, 2, 7, 2]
