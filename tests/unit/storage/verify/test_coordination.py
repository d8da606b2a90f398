"""Damage of the objects by which services coordinate is listed; absent ones are no violation."""

import hashlib
from pathlib import Path

import pytest

from storage import layout
from storage.coordination import leases, rounds
from storage.coordination.leases import LeaseWatch
from storage.records.control import Usage
from storage.run import orders, usage
from storage.run.quarantine import quarantine_object
from storage.run.runs import create_run
from storage.store.object_store import ObjectStore, open_store
from storage.verify.verify import verify
from storage.verify.violations import Invariant
from tasks.recipes.run_terms import run_terms
from tests.support.runs import builders

CONFIG = {"steps": 2, "policies": {"solver": {"batch_size": 4}}, "data": {"max_staleness": 8}}
ENTRY = layout.round_entry("solver", 2, hashlib.sha256(b"node/1").hexdigest())
KEYS = (
    layout.heartbeat("rollout", "rollout-eu-0"),
    layout.lease(0, 0),
    layout.lease(7, 1),
    layout.round_start("solver", 1),
    layout.round_start("solver", 2),
    ENTRY,
    f"{layout.quarantine(layout.shard(3))}.json",
    layout.USAGE,
    layout.orders_end(),
)


@pytest.fixture
def run(tmp_path: Path) -> ObjectStore:
    """A run with one object of every kind, and nothing else."""
    run = create_run(open_store(str(tmp_path)), "r", CONFIG)
    builders.put_heartbeat(run, builders.heartbeat("rollout", "rollout-eu-0", region="eu"))
    for order, times in ((0, 1), (7, 2)):
        for _ in range(times):
            lease = leases.take(run, order, "rollout-eu-0", "eu", LeaseWatch(60.0))
            assert lease is not None
            leases.release(run, lease)
    for _ in range(2):
        rounds.write_entry(run, rounds.open_next(run, "solver"), "node/1", b"")
    usage.write(run, Usage(limits={"hours": 8.0}, used={"hours": 2.5}))
    quarantine_object(run, layout.shard(3), "there is no object")
    orders.create_end(run, 8)
    return run


def violations(run: ObjectStore) -> list[tuple[int, str]]:
    """(invariant, where) of each violation."""
    return [(found.invariant, found.where) for found in verify(run, run_terms(run)).violations]


def test_every_object_of_a_valid_run_can_be_read(run: ObjectStore) -> None:
    assert set(KEYS) <= set(run.list())
    assert violations(run) == []


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"format":1,'])
def test_an_unreadable_object_is_listed_by_its_key(run: ObjectStore, key: str, body: bytes) -> None:
    run.put(key, body)
    assert violations(run) == [(Invariant.READABLE, key)]


@pytest.mark.parametrize("key", KEYS)
def test_a_folder_in_the_place_of_an_object_is_listed(
    run: ObjectStore, key: str, tmp_path: Path
) -> None:
    run.delete(key)
    (tmp_path / "runs" / "r" / key / "x").mkdir(parents=True)
    assert violations(run) == [(Invariant.READABLE, key)]


@pytest.mark.parametrize(
    ("key", "other"),
    [
        (layout.lease(7, 0), layout.lease(7, 1)),
        (layout.round_start("solver", 2), layout.round_start("solver", 1)),
        (ENTRY.replace(ENTRY[-20:-5], "0" * 15), ENTRY),
        (layout.heartbeat("rollout", "rollout-us-0"), layout.heartbeat("rollout", "rollout-eu-0")),
    ],
)
def test_the_copy_of_another_object_is_listed(run: ObjectStore, key: str, other: str) -> None:
    run.put(key, run.get(other))
    assert violations(run) == [(Invariant.READABLE, key)]


@pytest.mark.parametrize("key", [key for key in KEYS if key != layout.round_start("solver", 1)])
def test_an_object_that_does_not_exist_is_no_violation(run: ObjectStore, key: str) -> None:
    run.delete(key)
    assert violations(run) == []


def test_a_missing_round_before_the_newest_is_listed(run: ObjectStore) -> None:
    run.delete(layout.round_start("solver", 1))
    assert violations(run) == [(Invariant.CONTIGUOUS, layout.round_start("solver", 1))]


@pytest.mark.parametrize(
    "key",
    [
        "leases/x.json",
        "leases/00000007.json",
        "leases/7.1.json",
        "rounds/solver/x.json",
        "rounds/solver/00000002/x.json",
        f"rounds/solver/x/00000002/{'0' * 64}.json",
        "rounds/x",
        "heartbeats/x.json",
        "heartbeats/newer_kind/x.json",
        "orders/end.txt",
    ],
)
def test_the_objects_of_other_programs_are_ignored(run: ObjectStore, key: str) -> None:
    run.put(key, b"x")
    assert violations(run) == []
