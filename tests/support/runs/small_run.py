"""A small run with two policies in a memory store, written by the project's own writers, for tests
of read models.
"""

from collections.abc import Mapping

import numpy as np

from storage.records.control import RunEnd, ServiceState, Stop
from storage.records.progress import Progress, ServiceKind
from storage.records.rollouts import Order, Prompt
from storage.records.weights import HostTensor
from storage.records.windows import PromptWindow
from storage.run import batches, evaluations, orders, runs, shards
from storage.run.evaluations import Evaluation
from storage.store.object_store import ObjectStore, open_store
from storage.weights import publisher
from tasks.recipes.loader import load
from tasks.recipes.run_config import RunConfig
from tests.support.runs import builders

RUN_ID = "tiny-1"
RECIPE = """\
name: tiny
steps: 4
policies:
  solver:
    model: {tiny: {}}
    batch_size: 2
  verifier:
    model: {tiny: {}}
    batch_size: 2
data:
  prompts: {builtin: chained_addition}
rollout:
  workflow: {name: actor_and_verify}
"""
TENSORS = {"w": HostTensor("BF16", (2,), np.array([1, 2], dtype=np.uint16))}


class SmallRun:
    """Writes one object at a time, so that a test determines exactly what its run has."""

    def __init__(
        self,
        name: str,
        recipe: str = RECIPE,
        windows: Mapping[str, PromptWindow] | None = None,
        run_id: str = RUN_ID,
    ) -> None:
        self.store: ObjectStore = open_store(f"memory://{name}")
        self.config: RunConfig = load(recipe)
        self.run = runs.create_run(
            self.store,
            run_id,
            self.config.model_dump(mode="json"),
            "astraflow/multi-policy",
            windows=windows or {},
        )
        self.created_s = runs.read_run(self.run).created_s

    def version(
        self, policy: str, version: int, files: Mapping[str, bytes] | None = None, **metrics: float
    ) -> None:
        named = {f"trainer/{name}": value for name, value in metrics.items()}
        publisher.publish(
            self.run, policy, version, TENSORS, metrics=named, extra_files=files or {}
        )

    def batch(self, policy: str, step: int, closed_below: int = 1, **metrics: float) -> None:
        """Two rows of versions `step − 1` and 0, one filtered and one waiting sequence."""
        rows = [builders.row(version=step - 1), builders.row(version=0)]
        named = {f"dataflow/{name}".replace("__", "/"): value for name, value in metrics.items()}
        key = builders.FIRST
        batches.create(
            self.run,
            builders.batch(
                *rows, policy=policy, step=step, ledger=(builders.entry(key),), waiting=(key,),
                closed_below=closed_below, metrics=named,
            ),
        )  # fmt: skip

    def order(self, number: int) -> None:
        prompt = Prompt(f"chained_addition/train/{number}", {"question": "7+8-3=?", "answer": "12"})
        orders.create(
            self.run,
            Order(
                number=number,
                prompts=(prompt,),
                samples_per_prompt=2,
                seed=0,
                seen=(),
                cursor={"next": number + 1},
            ),
        )

    def shard(self, number: int) -> None:
        """One group of two episodes with three sampled tokens each."""
        shards.create(self.run, builders.shard(order=number))

    def evaluation(
        self,
        version: int,
        first: list[float],
        final: list[float],
        dataset: str = "chained_addition",
    ) -> None:
        versions = dict.fromkeys(self.config.policies, version)
        rows = tuple(f"chained_addition/test/{index}" for index in range(len(first)))
        evaluations.create(
            self.run,
            Evaluation(
                versions=versions,
                dataset=dataset,
                workflow="actor_and_verify",
                rows=rows,
                first_attempt=np.array(first, np.float32),
                final=np.array(final, np.float32),
                created_s=5.0,
                seconds=1.0,
            ),
        )

    def beat(
        self,
        kind: ServiceKind,
        member: str,
        at_s: float,
        *,
        state: str = ServiceState.WORKING,
        region: str = "",
        note: str = "",
        progress: Progress | None = None,
        seconds: Mapping[str, float] | None = None,
        versions: Mapping[str, int] | None = None,
        alive_s: float = 0.0,
    ) -> None:
        beat = builders.heartbeat(
            kind, member, beat_s=at_s, started_s=at_s - 60, state=state, region=region, note=note, progress=progress,
            seconds=seconds, versions=versions, alive_s=alive_s,
        )  # fmt: skip
        builders.put_heartbeat(self.run, beat)

    def stop(self, state: RunEnd, reason: str, at_s: float) -> None:
        runs.request_stop(self.run, Stop(state, reason, at_s))
