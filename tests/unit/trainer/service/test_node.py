"""A node beside a trainer: why it begins, works, and ends."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from storage.coordination import rounds
from storage.records.control import ServiceState, Stop
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tests.support.runs import builders
from tests.support.runs.builders import tensors
from tests.support.runs.lifetimes import ScriptedLifetime
from trainer.config import TrainConfig
from trainer.engines.ranks.rendezvous import RankLostError
from trainer.service import node as module
from trainer.service.node import early_end_reason, train_node

CONFIG = TrainConfig(nodes=3)
STOP = Stop("completed", "all steps are done", 5.0)


def test_a_node_is_needed_until_the_last_checkpoint_or_the_end_of_the_run(
    memory_store: ObjectStore,
) -> None:
    assert early_end_reason(memory_store, "solver", 1) == ""
    publisher.publish(memory_store, "solver", 0, tensors())
    publisher.publish(memory_store, "solver", 1, tensors())
    assert early_end_reason(memory_store, "solver", 1) == "", "its checkpoint needs all nodes"
    builders.checkpoint(memory_store, "solver", 1)
    assert early_end_reason(memory_store, "solver", 1) == "solver has reached version 1"
    assert early_end_reason(memory_store, "solver", 2) == ""
    assert early_end_reason(memory_store, "verifier", 1) == ""
    runs.request_stop(memory_store, STOP)
    for steps in (1, 2):
        assert early_end_reason(memory_store, "solver", steps) == (
            "the run is completed: all steps are done"
        )


def serving(monkeypatch: pytest.MonkeyPatch, during: Callable[..., str]) -> None:
    """Call `during` in the place of the ranks of a node."""
    monkeypatch.setattr(module.ranked_node, "serve", during)


def test_a_node_trains_in_the_open_round_and_ends_with_the_run(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds.open_next(memory_store, "solver")
    opened = rounds.open_next(memory_store, "solver")
    lifetime = ScriptedLifetime(
        memory_store, "trainer", lambda seconds: runs.request_stop(memory_store, STOP)
    )
    states = []

    def serve(config: TrainConfig, node: int, rendezvous: Any, must_leave: Any) -> str:
        states.append((lifetime.heartbeat.last.state, config, node, rendezvous.round))
        assert not must_leave()
        return "the leader has left"

    serving(monkeypatch, serve)
    train_node(lifetime, "solver", CONFIG, 2)
    assert states == [(ServiceState.WORKING, CONFIG, 2, opened)]
    assert lifetime.waits_s == [module.SETTLE_S]
    beat = lifetime.heartbeat.last
    assert (beat.state, beat.note) == (ServiceState.DRAINING, "the leader has left")


def test_a_node_whose_leader_left_while_the_run_goes_on_fails_and_joins_the_next_round(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds.open_next(memory_store, "solver")
    lifetime = ScriptedLifetime(memory_store, "trainer", lambda seconds: False)
    serving(monkeypatch, lambda *given: "the leader has left")
    with pytest.raises(RankLostError) as lost:
        train_node(lifetime, "solver", CONFIG, 2)
    assert str(lost.value) == (
        "node 2 of solver: the leader has left, and the training goes on; another process of this "
        "node joins the next round"
    )


def test_a_node_that_must_stop_before_a_round_began_just_ends(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=module.__name__)
    serving(monkeypatch, lambda *given: pytest.fail("it trained"))
    lifetime = ScriptedLifetime(memory_store, "trainer", lambda seconds: True)
    train_node(lifetime, "solver", CONFIG, 2)
    assert "node 2 of solver leaves before a round began" in caplog.text


def test_a_node_that_was_asked_to_stop_makes_calls_for_a_while(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    lifetime = ScriptedLifetime(memory_store, "trainer", lambda seconds: False)
    departure = module._Departure(lifetime)
    assert not departure.is_due()
    now_s = 1000.0
    lifetime.stop.set()
    assert not departure.is_due()
    now_s = 1000.0 + module.LEAVE_S
    assert not departure.is_due()
    now_s += 0.1
    assert departure.is_due()
