"""The store of torch.distributed over entries of a round, with real processes."""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from storage.coordination import rounds
from storage.errors import ConflictError, CorruptError
from storage.store.object_store import ObjectStore, open_store
from tests.support.checkout import ROOT
from tests.support.runs.lifetimes import lifetime_of
from trainer.engines.ranks.rendezvous import ParentRendezvous, RankLostError, answer_child
from trainer.engines.ranks.rendezvous_store import POLL_MAX_S, RendezvousStore
from trainer.service.rendezvous import StoreRendezvous

MEMBER = """
import sys
import torch
import torch.distributed as dist
from storage.coordination import rounds
from storage.store.object_store import open_store
from tests.support.runs.lifetimes import lifetime_of
from trainer.engines.ranks.rendezvous_store import RendezvousStore
from trainer.service.rendezvous import StoreRendezvous

run, rank = open_store(sys.argv[1]), int(sys.argv[2])
store = RendezvousStore(StoreRendezvous(lifetime_of(run, "trainer"), rounds.read_open(run, "solver")))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
other = dist.new_group([0, 1], backend="gloo")
dist.all_reduce(total, group=other)
dist.destroy_process_group()
print(total.item())
"""


def store_of(run: ObjectStore) -> RendezvousStore:
    opened = rounds.read_open(run, "solver") or rounds.open_next(run, "solver")
    return RendezvousStore(StoreRendezvous(lifetime_of(run, "trainer"), opened))


@pytest.fixture
def run(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "run"))


class Watching:
    """A rendezvous that notes since when the store over it was not used, at each of its calls."""

    store: RendezvousStore
    waited = 0

    def __init__(self) -> None:
        self.seen: list[float] = []

    def create(self, name: str, value: bytes) -> None:
        self.seen.append(self.store.unused_since_s)

    def read(self, name: str) -> bytes | None:
        self.seen.append(self.store.unused_since_s)
        return b"1" if self.waited and name == "key" else None

    def pause(self, seconds: float) -> None:
        self.waited += 1
        self.seen.append(self.store.unused_since_s)


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.set("other", b"1"),
        lambda store: store.get("key"),
        lambda store: store.add("counter", 1),
        lambda store: store.check(["key"]),
        lambda store: store.wait(["key"]),
    ],
    ids=["set", "get", "add", "check", "wait"],
)
def test_a_store_is_not_unused_during_a_call(use: Callable[[RendezvousStore], object]) -> None:
    watching = Watching()
    store = watching.store = RendezvousStore(cast(Any, watching))
    start_s = time.monotonic()
    assert store.unused_since_s <= start_s
    use(store)
    assert watching.seen
    assert set(watching.seen) == {math.inf}
    assert start_s <= store.unused_since_s <= time.monotonic()


@pytest.mark.parametrize("amount", [b"abc", b"9" * 5000, b"9" * 19, b" 1", b"1_0", b""])
def test_a_counter_of_something_else_than_whole_numbers_is_damaged(
    run: ObjectStore, amount: bytes
) -> None:
    opened = rounds.open_next(run, "solver")
    rounds.write_entry(run, opened, "seats#0", amount)
    store = store_of(run)
    for read in (lambda: store.add("seats", 1), lambda: store.get("seats")):
        with pytest.raises(CorruptError, match="counter 'seats' of the ranks"):
            read()


def test_a_counter_may_be_lowered(run: ObjectStore) -> None:
    store = store_of(run)
    assert [store.add("seats", amount) for amount in (5, -7)] == [5, -2]
    assert store.get("seats") == b"-2"


class Rounds:
    """A rendezvous in memory that notes what is read, and the pauses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.reads: list[str] = []
        self.pauses: list[float] = []

    def create(self, name: str, value: bytes) -> None:
        if name == "seats#3":  # another process is faster, with two entries
            self.values |= {"seats#3": b"10", "seats#4": b"10"}
        if name in self.values:
            raise ConflictError(name)
        self.values[name] = value

    def read(self, name: str) -> bytes | None:
        self.reads.append(name)
        return self.values.get(name)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == 8:
            self.values["address"] = b"here"

    def why_over(self) -> str:
        return ""

    def end(self) -> None:
        raise AssertionError("a store ends no round")


def test_a_counter_that_another_process_raised_is_read_on_from_there() -> None:
    rounds = Rounds()
    store = RendezvousStore(rounds)
    for _ in range(3):
        store.add("seats", 1)
    rounds.reads.clear()
    assert store.add("seats", 1) == 24
    assert rounds.reads == [f"seats#{number}" for number in (0, 1, 2, 3, 3, 4, 5)]


def test_pauses_between_polls_double_up_to_the_longest() -> None:
    rounds = Rounds()
    assert RendezvousStore(rounds).get("address") == b"here"
    assert rounds.pauses == [0.02, 0.04, 0.08, 0.16, 0.32, *[POLL_MAX_S] * 3]


def test_two_processes_form_groups_with_it(run: ObjectStore) -> None:
    """TORCH_DIST_INIT_BARRIER: every group begins with a barrier of counters."""
    rounds.open_next(run, "solver")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DIST_INIT_BARRIER": "1"}
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, run.address, str(rank)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    assert [member.communicate()[0] for member in members] == ["6.0\n", "6.0\n"]


def test_the_last_ranks_of_a_barrier_may_both_set_the_same_value(run: ObjectStore) -> None:
    """Ranks that join at the same time both find that all are there."""
    store, other = store_of(run), store_of(run)
    store.set("last", "1")
    other.set("last", b"1")
    assert other.get("last") == b"1"


def test_a_value_is_set_once_and_a_counter_is_a_sum(run: ObjectStore) -> None:
    store, other = store_of(run), store_of(run)
    assert not other.check(["0//a"])
    store.set("0//a", b"\x00\xff")
    store.set("text", "x")
    assert (other.get("0//a"), other.get("text")) == (b"\x00\xff", b"x")
    assert other.check(["0//a", "text"])
    assert not other.check(["0//a", "b"])
    with pytest.raises(ConflictError):
        other.set("0//a", b"y")
    assert store.add("count", 0) == 0
    assert not store.check(["count"])
    assert [store.add("count", 1), other.add("count", 5), store.add("count", 0)] == [1, 6, 6]
    assert other.get("count") == b"6"
    other.wait(["count", "text"], timedelta(0))


def test_counters_of_several_threads_lose_nothing(run: ObjectStore) -> None:
    store = store_of(run)
    seen: list[int] = []

    def count() -> None:
        for _ in range(5):
            seen.append(store.add("count", 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 21))


def test_a_value_that_nobody_sets_is_waited_for_as_long_as_told(run: ObjectStore) -> None:
    store = store_of(run)
    with pytest.raises(RankLostError, match="no other rank set 'a' within 0:00:00"):
        store.wait(["a"], timedelta(seconds=0.1))


def test_a_process_of_an_older_round_waits_for_nobody_and_sees_no_newer_value(
    run: ObjectStore,
) -> None:
    old = store_of(run)
    rounds.open_next(run, "solver")
    store_of(run).set("a", b"of the newer round")
    with pytest.raises(RankLostError, match="round 1 of the nodes of solver is over"):
        old.get("a")


class TestThroughTheParent:
    @pytest.fixture
    def child(self, run: ObjectStore) -> Iterator[RendezvousStore]:
        opened = rounds.open_next(run, "solver")
        parent = StoreRendezvous(lifetime_of(run, "trainer"), opened)
        own, its = socket.socketpair()
        thread = threading.Thread(target=answer_child, args=[own, parent], daemon=True)
        thread.start()
        with its:
            yield RendezvousStore(ParentRendezvous(its))
        thread.join()

    def test_a_child_reads_and_writes_what_the_others_do(
        self, run: ObjectStore, child: RendezvousStore
    ) -> None:
        other = store_of(run)
        other.set("a", b"\x00")
        assert child.get("a") == b"\x00"
        child.set("b", b"\xff")
        assert other.get("b") == b"\xff"
        assert [child.add("count", 2), other.add("count", 2)] == [2, 4]
        with pytest.raises(ConflictError):
            child.set("a", b"")

    def test_it_ends_its_waits_when_the_round_is_over(
        self, run: ObjectStore, child: RendezvousStore
    ) -> None:
        rounds.open_next(run, "solver")
        with pytest.raises(RankLostError, match="round 1 of the nodes of solver is over"):
            child.get("never")

    def test_other_errors_of_the_parent_are_the_childs(
        self, run: ObjectStore, child: RendezvousStore
    ) -> None:
        with pytest.raises(RankLostError, match="at most 65,536 are stored"):
            child.set("large", bytes(rounds.VALUE_BYTES_MAX + 1))
        assert not child.check(["large"])
