"""A running run can be verified: objects written meanwhile are no violations."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from data_ops.config import PolicyData
from storage.records.control import Stop
from storage.run import orders, runs
from storage.store.backend import Backend, Keys
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify
from tasks.recipes.run_terms import run_terms
from tests.support.runs.dataflow_world import POLICIES, World, world

STEPS = 16
"""So many that the run goes on while shards are read."""


@dataclass
class Growing:
    """A backend that runs one `step` of the run before every listing and before every `each`-th
    read.
    """

    inner: Backend
    step: Callable[[], None]
    each: int
    reads: int = 0

    def list(self, prefix: str, start_after: str) -> Keys:
        self.step()
        return self.inner.list(prefix, start_after)

    def read(self, key: str) -> bytes:
        self.reads += 1
        if self.reads % self.each == 0:
            self.step()
        return self.inner.read(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def going_on(simulation: World) -> Callable[[], None]:
    """One step of everything: the dataflow, workers, trainers, and the run's end when all batches
    are trained.
    """
    dataflow = simulation.dataflow()

    def step() -> None:
        if not dataflow.done:
            dataflow.round()
            simulation.play(simulation.open_orders()[:3])
        trained = [simulation.train(policy) for policy in simulation.policies]
        if dataflow.done and not any(trained) and runs.read_stop(simulation.run) is None:
            runs.request_stop(simulation.run, Stop("completed", "all steps done", 1.0))

    return step


@pytest.mark.parametrize("each", [1, 3, 10])
@pytest.mark.parametrize("begun", [0, 2, 6, 12])
def test_verification_of_a_running_run_finds_no_violation(
    memory_store: ObjectStore, begun: int, each: int
) -> None:
    simulation = world(
        memory_store, {policy: PolicyData(batch_size=6, steps=STEPS) for policy in POLICIES}
    )
    step = going_on(simulation)
    for _ in range(begun):
        step()
    before = orders.next_number(simulation.run)
    growing = replace(simulation.run, backend=Growing(simulation.run.backend, step, each))
    verdict = verify(growing, run_terms(growing))
    assert verdict.violations == ()
    assert orders.next_number(simulation.run) > before or runs.read_stop(simulation.run) is not None
    for _ in range(200):
        step()
    final = verify(simulation.run, run_terms(simulation.run))
    assert final.violations == ()
    assert {policy: books.batches for policy, books in final.policies.items()} == dict.fromkeys(
        POLICIES, STEPS
    )
