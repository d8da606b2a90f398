"""Which vectors are evaluated, and when the evaluation leaves. How plays are scored is tested with the plays themselves."""

import threading
from collections.abc import Mapping

import pytest

from storage import runs, weights
from storage.heartbeats import Pulse
from storage.objects import ObjectStore
from storage.records import Stop
from tasks import evals, recipes
from tasks.config import RunConfig
from tasks.evaluation import Evaluate, follow
from tests.builders import tensors
from tests.evaluations import evaluation


@pytest.fixture
def config() -> RunConfig:
    return recipes.load("multi_policy_tiny", {"steps": 2, "evaluation.every": 1})


class Player:
    """Stands in for the plays: commits a result for each vector, until it is told that it was interrupted."""

    def __init__(self, run: ObjectStore, interrupted_at: int | None = None) -> None:
        self.run, self.interrupted_at = run, interrupted_at
        self.asked: list[dict[str, int]] = []

    def as_task(self, evaluate: Evaluate) -> Evaluate:
        return self.play

    def play(self, versions: Mapping[str, int]) -> bool:
        self.asked.append(dict(versions))
        if len(self.asked) - 1 == self.interrupted_at:
            return False
        evals.commit(self.run, evaluation(dict(versions)))
        return True


def vectors(*versions: int) -> list[dict[str, int]]:
    return [{"solver": version, "verifier": version} for version in versions]


def publish(run: ObjectStore, *versions: int) -> None:
    for policy in ("solver", "verifier"):
        for version in versions:
            weights.publish(run, policy, version, tensors(version))


def serve(run: ObjectStore, config: RunConfig, player: Player) -> None:
    pulse = Pulse(run, "evaluation", "evaluation", 0, 60.0)
    follow(run, config, pulse, threading.Event(), player.as_task)


def test_every_due_vector_is_evaluated_once_also_over_restarts(memory_store: ObjectStore, config: RunConfig) -> None:
    publish(memory_store, 0, 1, 2)
    evals.commit(memory_store, evaluation(*vectors(1)))
    player = Player(memory_store)
    serve(memory_store, config, player)
    assert player.asked == vectors(0, 2)


def test_an_interrupted_evaluation_is_the_last(memory_store: ObjectStore, config: RunConfig) -> None:
    publish(memory_store, 0, 1, 2)
    player = Player(memory_store, interrupted_at=1)
    serve(memory_store, config, player)
    assert player.asked == vectors(0, 1)


def test_nothing_is_evaluated_once_the_run_has_stopped(memory_store: ObjectStore, config: RunConfig) -> None:
    publish(memory_store, 0)
    runs.request_stop(memory_store, Stop("cancelled", "enough", 1.0))
    player = Player(memory_store)
    serve(memory_store, config, player)
    assert player.asked == vectors(0)
