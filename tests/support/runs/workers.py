"""Rollout workers with scripted engines for tests: in a thread, on a run that the test writes."""

import threading
from collections.abc import Callable
from typing import Any

from rollout.config import EngineConfig, RolloutConfig, SamplingConfig, WorkflowConfig
from rollout.service.worker_setup import end_reason, work
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import Lifetime
from storage.records.control import Heartbeat
from storage.records.rollouts import Order, Prompt
from storage.run import orders, shards
from storage.run.orders import EPISODES_MAX
from storage.store.object_store import ObjectStore
from tests.support.patience import PATIENCE_S

SAMPLING = {
    "solver": SamplingConfig(max_new_tokens=64),
    "verifier": SamplingConfig(max_new_tokens=64),
}


def config(workflow: str = "single_turn", **settings: Any) -> RolloutConfig:
    """Settings of workers with scripted engines and short poll intervals."""
    quick = {
        "poll_interval_s": 0.02,
        "refresh_interval_s": 0.02,
        "drain_s": 30.0,
        "lease_ttl_s": 30.0,
    }
    engine = EngineConfig(name="tests.support.runs.fakes:ScriptedEngine")
    return RolloutConfig(
        engine=engine, workflow=WorkflowConfig(name=workflow), **{**quick, **settings}
    )


def write_orders(run: ObjectStore, count: int, start: int = 0, samples: int = 2) -> None:
    """Write orders of two prompts each, which the script `solve` can answer."""
    for number in range(start, start + count):
        prompts = tuple(
            Prompt(
                f"p/{number}/{index}",
                {"question": f"{number}+{index}=?", "answer": str(number + index)},
            )
            for index in range(2)
        )
        orders.create(
            run,
            Order(
                number=number,
                prompts=prompts,
                samples_per_prompt=samples,
                seed=number,
                seen=(),
                cursor={},
            ),
        )


def answered(run: ObjectStore, count: int) -> Callable[[], bool]:
    """Whether the first `count` orders all have shards."""
    return lambda: all(shards.exists(run, number) for number in range(count))


class RunningWorker:
    """`rollout.service.worker_setup.work` in a thread."""

    def __init__(
        self,
        run: ObjectStore,
        settings: RolloutConfig,
        name: str = "rollout-us-east-0",
        episodes_max: int = EPISODES_MAX,
    ) -> None:
        self._episodes_max = episodes_max
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._heartbeat_writer = HeartbeatWriter(
            run, "rollout", name, attempt=0, interval_s=60.0, region="us-east"
        )
        self._thread = threading.Thread(target=self._work, args=(run, settings), name=name)
        self._thread.start()

    @property
    def beat(self) -> Heartbeat:
        return self._heartbeat_writer.last

    def stop(self) -> None:
        """Stop the worker as SIGTERM does."""
        self._stop.set()

    def join(self) -> Heartbeat:
        """Wait until the worker has ended, raise its exception, and return its last heartbeat."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the worker does not leave"
        if self.error is not None:
            raise self.error
        return self._heartbeat_writer.last

    def __enter__(self) -> "RunningWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def _work(self, run: ObjectStore, settings: RolloutConfig) -> None:
        try:
            lifetime = Lifetime(run, self._heartbeat_writer, self._stop, why_over=end_reason)
            work(lifetime, settings, SAMPLING, "us-east", episodes_max=self._episodes_max)
        except BaseException as error:  # re-raised in the test's thread
            self.error = error
