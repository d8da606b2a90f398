"""Renewal, loss and release of the leases on a worker's orders, which are tasks without episodes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rollout.agents.workflow import Agent
from rollout.service import event_loop
from rollout.service.worker import RENEWALS_CONCURRENT_MAX, Worker
from storage import layout
from storage.coordination import leases
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import Lifetime
from storage.coordination.system_threads import SYSTEM_THREADS_MAX, system_threads
from storage.formats.json_objects import encode
from storage.records.control import Lease, Stop
from storage.records.rollouts import Episode, Prompt
from storage.run import runs
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore
from storage.weights import traffic
from tests.support.patience import PATIENCE_S
from tests.support.runs.dataflow_world import UnreachableBackend
from tests.support.runs.fakes import pool_of
from tests.support.runs.workers import config, write_orders


def held(run: ObjectStore, order: int) -> Lease:
    lease = leases.read_newest(run, order)
    assert lease is not None
    return lease


class NeverPlays:
    roles: tuple[str, ...] = ()

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        raise AssertionError("nothing is played here")


async def in_progress() -> None:
    """An order that does not end."""
    await asyncio.Event().wait()


def worker_with_orders(
    store: ObjectStore, count: int, ends: Callable[[], Coroutine[Any, Any, None]]
) -> Worker:
    """A worker with the leases of `count` new orders; each order ends as `ends()` does."""
    write_orders(store, count)
    heartbeat_writer = HeartbeatWriter(
        store, "rollout", "rollout-us-east-0", attempt=0, interval_s=60.0, region="us-east"
    )
    lifetime = Lifetime(store, heartbeat_writer, threading.Event())
    settings = config(lease_ttl_s=36.0)
    run, at_home = traffic.counted(store)
    worker = Worker(
        run, lifetime, settings, pool_of(NeverPlays()), [], "us-east", at_home, None, 100
    )
    for _ in range(count):
        claim = worker._leasing.next()
        assert claim is not None
        worker._tasks[asyncio.create_task(ends())] = claim
    return worker


class Steps:
    """Stands for `asyncio.sleep`: returns immediately, records the length of each pause, and ends
    the task after a few.
    """

    def __init__(self, count: int) -> None:
        self.asked: list[float] = []
        self._count = count
        self._sleep = asyncio.sleep

    async def __call__(self, delay: float) -> None:
        self.asked.append(delay)
        if len(self.asked) > self._count:
            raise asyncio.CancelledError
        await self._sleep(0)


async def test_leases_of_all_active_orders_are_renewed_three_times_per_ttl(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_with_orders(memory_store, 2, in_progress)
    steps = Steps(3)
    monkeypatch.setattr(asyncio, "sleep", steps)
    with pytest.raises(asyncio.CancelledError):
        await worker._renew_leases()
    monkeypatch.undo()
    assert steps.asked == [12.0] * 4
    assert [held(memory_store, number).renewals for number in range(2)] == [4, 4]
    assert [claim.lease.renewals for claim in worker._tasks.values()] == [4, 4]
    await event_loop.cancel(worker._tasks)


class Together:
    """A backend that completes writes of leases only in groups of `count` concurrent ones."""

    def __init__(self, backend: Backend, count: int) -> None:
        self.most = 0
        """Most concurrent writes."""
        self._backend = backend
        self._current = 0
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(count, timeout=PATIENCE_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def write(self, key: str, body: bytes) -> None:
        with self._lock:
            self._current += 1
            self.most = max(self.most, self._current)
        self._barrier.wait()
        with self._lock:
            self._current -= 1
        self._backend.write(key, body)


async def test_leases_are_renewed_concurrently_up_to_a_limit_and_during_the_pause(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Together(memory_store.backend, RENEWALS_CONCURRENT_MAX)
    count = 2 * RENEWALS_CONCURRENT_MAX
    worker = worker_with_orders(replace(memory_store, backend=backend), count, in_progress)
    pauses = list[tuple[float, list[int]]]()

    def renewals() -> list[int]:
        return [claim.lease.renewals for claim in worker._tasks.values()]

    async def pause(delay: float) -> None:
        """Take until all leases are renewed, then end the worker."""
        pauses.append((delay, renewals()))
        while renewals() != [1] * count:
            await asyncio.wait([asyncio.create_task(asyncio.to_thread(int))])
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", pause)
    with system_threads(), pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(PATIENCE_S):
            await worker._renew_leases()
    monkeypatch.undo()
    assert (renewals(), pauses) == ([1] * count, [(12.0, [0] * count)])
    assert backend.most == RENEWALS_CONCURRENT_MAX
    assert RENEWALS_CONCURRENT_MAX < SYSTEM_THREADS_MAX  # the other threads lease new orders
    await event_loop.cancel(worker._tasks)


def give_to_rival(run: ObjectStore) -> None:
    rival = Lease(order=0, attempt=1, worker="b", region="eu-west", write_id="rival")
    run.create(layout.lease(0, 1), encode(rival))


def damage(run: ObjectStore) -> None:
    run.put(layout.lease(0, 0), b"{")


@pytest.mark.parametrize("lose", [give_to_rival, damage])
async def test_an_order_is_cancelled_and_not_released_when_its_lease_is_lost(
    memory_store: ObjectStore, lose: Callable[[ObjectStore], None]
) -> None:
    worker = worker_with_orders(memory_store, 1, in_progress)
    (task,) = worker._tasks
    lose(memory_store)
    before = {key: memory_store.get(key) for key in memory_store.list(layout.LEASES)}
    await worker._renew(task, worker._tasks[task], asyncio.Semaphore(1))
    assert task.cancelling()
    await worker._wait_for_order(in_progress())
    assert (task.cancelled(), worker._tasks, worker._leasing._leased) == (True, {}, set())
    assert worker._heartbeat.last.note.startswith("order 0 is another worker's now: ")
    assert {key: memory_store.get(key) for key in memory_store.list(layout.LEASES)} == before


async def test_an_order_whose_lease_is_damaged_ends_no_worker_when_it_is_given_back(
    memory_store: ObjectStore,
) -> None:
    worker = worker_with_orders(memory_store, 1, in_progress)
    ((task, leased),) = worker._tasks.items()
    damage(memory_store)
    await worker._give_back(leased)
    note = "order 0 could not be given back; its lease will expire: "
    assert worker._heartbeat.last.note.startswith(note)
    await event_loop.cancel([task])


async def test_an_order_that_draining_gives_back_is_cancelled(memory_store: ObjectStore) -> None:
    worker = worker_with_orders(memory_store, 1, in_progress)
    (task,) = worker._tasks
    runs.request_stop(memory_store, Stop("completed", "all steps done", 0.0))
    await worker._drain()
    assert (task.cancelled(), held(memory_store, 0).released) == (True, True)


async def test_a_renewal_that_fails_is_repeated(memory_store: ObjectStore) -> None:
    backend = UnreachableBackend(memory_store.backend)
    run = replace(memory_store, backend=backend, patience_s=1e-6)
    worker = worker_with_orders(run, 1, in_progress)
    ((task, leased),) = worker._tasks.items()
    backend.key = layout.LEASES
    await worker._renew(task, leased, asyncio.Semaphore(1))
    assert "the lease of order 0 cannot be renewed; retrying: " in worker._heartbeat.last.note
    assert worker._tasks == {task: leased}
    backend.key = ""
    await worker._renew(task, leased, asyncio.Semaphore(1))
    assert worker._tasks[task].lease == held(memory_store, 0)
    assert held(memory_store, 0).renewals == 1
    await event_loop.cancel([task])


class EndsOrders:
    """A backend in which the orders of `worker` end while a lease is read."""

    worker: Worker | None = None

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def read(self, key: str) -> bytes:
        if self.worker is not None and key.startswith(layout.LEASES):
            self.worker._tasks.clear()
        return self._backend.read(key)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_renewal_has_no_effect_on_an_order_that_ended_meanwhile(
    memory_store: ObjectStore, is_lost: bool
) -> None:
    backend = EndsOrders(memory_store.backend)
    backend.worker = worker = worker_with_orders(
        replace(memory_store, backend=backend), 1, in_progress
    )
    ((task, leased),) = worker._tasks.items()
    if is_lost:
        give_to_rival(memory_store)
    await worker._renew(task, leased, asyncio.Semaphore(1))
    assert (worker._tasks, worker._heartbeat.last.note, task.cancelling()) == ({}, "", 0)
    await event_loop.cancel([task])


async def test_the_lease_of_an_order_that_ended_is_not_renewed(memory_store: ObjectStore) -> None:
    worker = worker_with_orders(memory_store, 1, in_progress)
    task, leased = worker._tasks.popitem()
    await worker._renew(task, leased, asyncio.Semaphore(1))
    assert held(memory_store, 0).renewals == 0
    await event_loop.cancel([task])


async def test_an_order_cancelled_by_its_own_code_is_released(memory_store: ObjectStore) -> None:
    async def play() -> None:
        raise asyncio.CancelledError

    worker = worker_with_orders(memory_store, 1, play)
    await worker._wait_for_order(in_progress())
    assert worker._tasks == {}
    assert held(memory_store, 0).released
    assert worker._heartbeat.last.note == "order 0 was cancelled by its own code"
