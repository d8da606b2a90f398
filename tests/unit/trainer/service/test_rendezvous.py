"""How the leader and the nodes of a trainer come together in a round."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.coordination import rounds
from storage.coordination.lifetime import StoppedError
from storage.records.control import WaitReason
from storage.store.object_store import ObjectStore, open_store
from tests.support.runs.lifetimes import ScriptedLifetime, lifetime_of
from trainer.engines.ranks.rendezvous import RankLostError
from trainer.service import rendezvous
from trainer.service.rendezvous import StoreRendezvous, join, lead


@pytest.fixture
def run(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path))


@pytest.fixture(autouse=True)
def _checks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CHECK_INTERVAL_S", 0.0)


def scripted(run: ObjectStore, *waits: Callable[[], Any]) -> ScriptedLifetime:
    """A lifetime that makes one of the calls in each pause, and must stop after the last one."""
    left = list(waits)
    return ScriptedLifetime(run, "trainer", lambda seconds: left.pop(0)() if left else True)


def test_the_leader_waits_for_every_node(run: ObjectStore) -> None:
    notes: list[str] = []

    def joined(node: int) -> None:
        notes.append(lifetime.heartbeat.last.note)
        join(lifetime_of(run, "trainer"), "solver", node)

    lifetime = scripted(run, lambda: joined(2), lambda: joined(1))
    led = lead(lifetime, "solver", 3)
    assert notes == ["waits for node 1, 2 of 3", "waits for node 1 of 3"]
    assert led.round.number == 1
    assert not led.why_over()
    assert lifetime.heartbeat.last.wait_reason is WaitReason.NONE
    assert lifetime.heartbeat.last.note == ""


def test_the_leader_of_a_stopped_run_waits_no_longer(run: ObjectStore) -> None:
    lifetime = scripted(run)
    with pytest.raises(StoppedError):
        lead(lifetime, "solver", 2)
    assert lifetime.heartbeat.last.wait_reason is WaitReason.NODES


def test_a_node_waits_for_a_round_and_joins_the_newest(run: ObjectStore) -> None:
    old = rounds.open_next(run, "solver")
    rounds.end(run, old)
    lifetime = scripted(run, lambda: None, lambda: rounds.open_next(run, "solver") and None)
    joined = join(lifetime, "solver", 1)
    assert joined.round.number == 3
    assert len(lifetime.waits_s) == 2
    assert rounds.read_entry(run, old, "node/1") is None


def test_a_node_of_a_stopped_run_waits_no_longer(run: ObjectStore) -> None:
    lifetime = scripted(run)
    with pytest.raises(StoppedError):
        join(lifetime, "solver", 1)
    assert lifetime.heartbeat.last.note == "waits for the trainer of solver to start a round"


def test_a_node_that_was_started_again_ends_its_round_and_the_leader_opens_another(
    run: ObjectStore,
) -> None:
    first = rounds.open_next(run, "solver")
    join(lifetime_of(run, "trainer"), "solver", 1)
    before = StoreRendezvous(lifetime_of(run, "trainer"), first)
    lifetime = scripted(run, lambda: rounds.open_next(run, "solver") and None)
    again = join(lifetime, "solver", 1)
    assert again.round.number == 3
    assert before.why_over().startswith("round 1 of the nodes of solver is over")
    assert run.exists(layout.round_start("solver", 2))


def test_the_leader_opens_another_round_when_one_ends_before_all_have_joined(
    run: ObjectStore,
) -> None:
    def joined(number: int) -> None:
        assert join(lifetime_of(run, "trainer"), "solver", 1).round.number == number

    def ended() -> None:
        newest = rounds.read_open(run, "solver")
        assert newest is not None
        rounds.end(run, newest)

    led = lead(scripted(run, ended, lambda: joined(3)), "solver", 2)
    assert led.round.number == 3


def test_two_nodes_of_one_number_are_never_in_one_round(run: ObjectStore) -> None:
    stop = threading.Event()
    rounds.open_next(run, "solver")
    first = join(lifetime_of(run, "trainer"), "solver", 1)
    stop.set()
    with pytest.raises(StoppedError):
        join(lifetime_of(run, "trainer", stop), "solver", 1)
    with pytest.raises(RankLostError):
        first.pause(0.0)


def test_while_the_store_does_not_answer_a_round_goes_on(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storage.errors import TransientError

    of = StoreRendezvous(lifetime_of(run, "trainer"), rounds.open_next(run, "solver"))

    def fails(*_: object) -> bool:
        raise TransientError("away")

    with monkeypatch.context() as patched:
        patched.setattr(rounds, "is_over", fails)
        patched.setattr(rounds, "end", fails)
        assert of.why_over() == ""
        of.end()
    of.end()
    assert of.why_over()


def test_the_store_is_not_asked_more_often_than_every_interval(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "CHECK_INTERVAL_S", 3600.0)
    of = StoreRendezvous(lifetime_of(run, "trainer"), rounds.open_next(run, "solver"))
    assert of.why_over() == ""
    of.end()
    assert of.why_over() == ""
