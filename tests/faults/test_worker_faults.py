"""Workers that are killed, stopped or drained in the middle of an order."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from storage import layout
from storage.coordination import leases
from storage.records.control import Stop
from storage.run import runs, shards
from storage.store.object_store import ObjectStore
from tests.support.patience import PATIENCE_S, until
from tests.support.runs.fakes import publish_base
from tests.support.runs.workers import answered, write_orders

TTL_S = 2.0
Start = Callable[[str], "subprocess.Popen[bytes]"]


@contextmanager
def processes(store: ObjectStore) -> Iterator[Start]:
    """Start worker processes by name; stop the remaining ones at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker_process", store.url, name, str(TTL_S)]
        )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()


def holder(run: ObjectStore, order: int) -> str:
    lease = leases.read_newest(run, order)
    return lease.worker if lease else ""


@pytest.mark.slow
def test_orders_of_a_killed_worker_are_finished_by_another(
    local_store: ObjectStore,
) -> None:
    publish_base(local_store, ["solver", "verifier"], delay_s=0.5)
    write_orders(local_store, 6)
    with processes(local_store) as start:
        first = start("first")
        until(lambda: holder(local_store, 1) == "first")
        first.send_signal(signal.SIGKILL)
        first.wait()
        start("second")
        until(answered(local_store, 6))
    assert [shards.read(local_store, number).worker for number in range(6)] == ["second"] * 6
    assert [shards.read(local_store, number).attempt for number in range(6)] == [1, 1, 0, 0, 0, 0]
    rewards = [
        group.episodes[0].reward
        for number in range(6)
        for group in shards.read(local_store, number).groups
    ]
    assert rewards == [1.0] * 12


@pytest.mark.slow
def test_a_worker_that_resumes_after_its_lease_expired_changes_nothing(
    local_store: ObjectStore,
) -> None:
    publish_base(local_store, ["solver", "verifier"], delay_s=0.5)
    write_orders(local_store, 2)
    with processes(local_store) as start:
        sleeper = start("sleeper")
        until(lambda: holder(local_store, 1) == "sleeper")
        sleeper.send_signal(signal.SIGSTOP)
        start("other")
        until(answered(local_store, 2))
        sleeper.send_signal(signal.SIGCONT)
        write_orders(local_store, 6, start=2)
        until(answered(local_store, 8))
        runs.request_stop(local_store, Stop("completed", "all steps done", 0.0))
        assert sleeper.wait(PATIENCE_S) == 0
    assert {shards.read(local_store, number).worker for number in range(2)} == {"other"}
    assert "sleeper" in {shards.read(local_store, number).worker for number in range(2, 8)}


@pytest.mark.slow
def test_a_worker_asked_to_stop_finishes_its_orders(local_store: ObjectStore) -> None:
    publish_base(local_store, ["solver", "verifier"], delay_s=0.5)
    write_orders(local_store, 6)
    with processes(local_store) as start:
        worker = start("worker")
        until(lambda: holder(local_store, 1) == "worker")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE_S) == 0
    assert [shards.exists(local_store, number) for number in range(3)] == [True, True, False]
    assert not local_store.exists(layout.lease(2, 0))
