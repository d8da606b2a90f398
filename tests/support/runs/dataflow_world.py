"""The surroundings of a dataflow in memory: workers that answer orders, trainers that publish
versions.

Two policies share every rollout, as in `actor_and_verify`: each episode holds one solver and one
verifier sequence. Rewards are drawn from the order's seed, so that some groups are equal and are
filtered.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow.service import Dataflow
from storage import layout
from storage.errors import TransientError
from storage.records.batches import Batch, SequenceKey
from storage.records.rollouts import Episode, Order, Prompt
from storage.run import batches, orders, runs, shards
from storage.run.quarantine import is_quarantined
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify
from storage.weights import publisher
from tasks.recipes.run_terms import run_terms
from tests.support.runs.builders import episode, group, sequence, shard, tensors
from tests.support.runs.frozen_windows import frozen_window

POLICIES = {
    "solver": PolicyData(batch_size=6, steps=4),
    "verifier": PolicyData(batch_size=4, steps=4),
}

MAX_TOKENS = 64
"""The longest context of the rollout engine."""


class Killed(BaseException):
    """The simulated process was killed here."""


@dataclass(kw_only=True)
class DyingBackend:
    """Forward every call, until the `dies_at`-th write (from 1), which raises before or after it
    takes effect.
    """

    backend: Backend
    dies_at: int
    after: bool = False
    error: BaseException = field(default_factory=Killed)
    writes: int = 0

    def create(self, key: str, body: bytes) -> bool:
        self.writes += 1
        if self.writes != self.dies_at:
            return self.backend.create(key, body)
        if self.after:
            self.backend.create(key, body)
        raise self.error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@dataclass
class World:
    """One run in a store."""

    run: ObjectStore
    config: DataConfig
    policies: Mapping[str, PolicyData]
    digests: dict[str, dict[int, str]] = field(default_factory=dict)

    def dataflow(self, run: ObjectStore | None = None) -> Dataflow:
        return Dataflow(
            run or self.run,
            self.config,
            self.policies,
            seed=5,
            max_tokens=MAX_TOKENS,
            clock=lambda: 1700000100.0,
        )

    def publish(self, policy: str, version: int) -> None:
        manifest = publisher.publish(self.run, policy, version, tensors(version))
        self.digests.setdefault(policy, {})[version] = manifest.digest

    def version(self, policy: str) -> int:
        return max(self.digests[policy])

    def open_orders(self) -> list[int]:
        """Orders without a shard, but not those that the dataflow has closed without one."""
        return [
            number
            for number in range(orders.next_number(self.run))
            if not shards.exists(self.run, number)
            and not is_quarantined(self.run, layout.order(number))
        ]

    def play(self, numbers: Iterable[int], behind: int = 0) -> None:
        """Write the orders' shards, sampled by the newest weights or by weights `behind` versions
        older.
        """
        for number in numbers:
            order = orders.read(self.run, number)
            versions = {policy: max(0, self.version(policy) - behind) for policy in self.policies}
            draw = np.random.default_rng(order.seed)
            groups = [
                group(
                    *(_episode(draw, versions) for _ in range(order.samples_per_prompt)),
                    prompt_id=prompt.id,
                )
                for prompt in order.prompts
            ]
            weights = {
                policy: {version: self.digests[policy][version]}
                for policy, version in versions.items()
            }
            shards.create(self.run, shard(*groups, order=number, weights=weights))

    def train(self, policy: str) -> bool:
        """Train on the next batch, if it exists, and publish its version."""
        version = self.version(policy) + 1
        if not batches.exists(self.run, policy, version):
            return False
        self.publish(policy, version)
        return True

    def finish(self, dataflow: Dataflow, rounds_max: int = 400) -> None:
        """Work until every policy has its batches; a livelock fails the test."""
        for _ in range(rounds_max):
            dataflow.round()
            if dataflow.done:
                return
            self.play(self.open_orders()[:2])
            for policy in self.policies:
                self.train(policy)
        raise AssertionError(f"not done after {rounds_max} rounds: {dataflow.progress()}")

    def batches(self, policy: str) -> list[Batch]:
        end = batches.next_step(self.run, policy)
        return [batches.read(self.run, policy, step) for step in range(1, end)]

    def trained(self, policy: str) -> list[SequenceKey]:
        return [row.key for batch in self.batches(policy) for row in batch.rows if not row.replay]

    def orders(self) -> list[Order]:
        return [orders.read(self.run, number) for number in range(orders.next_number(self.run))]

    def check(self) -> None:
        """Check every invariant of the stored objects, and that no batch is incomplete."""
        verdict = verify(self.run, run_terms(self.run))
        assert verdict.violations == ()
        for policy, data in self.policies.items():
            assert [batch.step for batch in self.batches(policy)] == list(range(1, data.steps + 1))
            assert {len(batch.rows) for batch in self.batches(policy)} == {data.batch_size}
            keys = self.trained(policy)
            assert len(keys) == len(set(keys)) == data.steps * data.batch_size


def world(
    store: ObjectStore,
    policies: Mapping[str, PolicyData] = POLICIES,
    frozen: Sequence[Prompt] = (),
    **config: object,
) -> World:
    """A run with version 0 of every policy, and with the rows `frozen` of a data window if there
    are any.
    """
    settings = {
        "prompts": {"builtin": "chained_addition"},
        "samples_per_prompt": 2,
        "prompts_per_order": 2,
        **config,
    }
    data = DataConfig.model_validate(settings)
    sizes = {policy: {"batch_size": wanted.batch_size} for policy, wanted in policies.items()}
    steps = max(wanted.steps for wanted in policies.values())
    run = runs.create_run(
        store,
        "r",
        {"steps": steps, "policies": sizes, "data": data.model_dump(mode="json")},
        windows={"data.prompts": frozen_window(store, "r", list(frozen))} if frozen else {},
    )
    simulation = World(run, data, policies)
    for policy in policies:
        simulation.publish(policy, 0)
    return simulation


def _episode(draw: np.random.Generator, versions: Mapping[str, int]) -> Episode:
    correct, verdict = (float(draw.random() < 0.5) for _ in range(2))
    return episode(
        sequence(reward=correct, version=versions["solver"]),
        sequence(
            reward=verdict, version=versions["verifier"], policy="verifier", starts_episode=False
        ),
        reward=correct,
        first_attempt=correct,
        final=correct,
    )


def write_invalid_shard(run: ObjectStore, number: int) -> None:
    """Write a shard with invalid bytes."""
    run.create(layout.shard(number), b"torn")


@dataclass
class UnreachableBackend:
    """Raise TransientError for reads of a key that contains `key`, unless that is empty."""

    backend: Backend
    key: str = ""

    def read(self, key: str) -> bytes:
        if self.key and self.key in key:
            raise TransientError(f"{key} is away")
        return self.backend.read(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


class OutageBackend:
    """A backend whose every call raises TransientError while `down` is set."""

    def __init__(self, backend: Backend, failures_max: int | None = None) -> None:
        """The outage ends by itself after `failures_max` calls."""
        self.backend, self.down = backend, threading.Event()
        self.failures_left = failures_max

    def __getattr__(self, name: str) -> Any:
        if self.down.is_set():
            if self.failures_left is not None:
                self.failures_left -= 1
                if not self.failures_left:
                    self.down.clear()
            raise TransientError("the store is away")
        return getattr(self.backend, name)
