"""Measure learning in one synchronous loop, without flows, services or processes.

    rollouts (workflow, engines) ──▶ ingest (filters, advantages) ──▶ step (train engines)
           ▲                                                                 │
           └──────────────── weights, `--lag` versions old ◀─────────────────┘

Base models, workflow, engines, data algorithms and train engines are those of a run with the same
recipe; only the scheduling is simpler. A run must reach the printed accuracy; if it does not, the
error is in the services. `--batches exact` forms batches as the dataflow does: `batch_size`
sequences in the order of arrival, each policy at its own rate. `--batches whole` trains on all kept
sequences of a round of 16 prompts.

    python -m benchmarks.tiny_learning --steps 80 --seed 0 --lag 8
"""

import argparse
import asyncio
import json
import logging
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from data_ops.algorithms import filters
from data_ops.algorithms.policy_groups import route
from data_ops.dataflow.shard_ingest import ingest_groups
from data_ops.prompts.stream import PromptStream
from rollout.service.agent_pool import open_agent_pool
from rollout.service.episode_runner import run_prompts
from storage.formats import adapters
from storage.records.batches import Batch, BatchRow
from storage.records.rollouts import Episode, Group, Shard
from storage.records.types import Json
from storage.records.weights import HostTensor, StoredAdapter
from storage.store.object_store import ObjectStore, default_store, open_store
from storage.weights import reader
from tasks.base_models.publishing import publish_base_models
from tasks.recipes.loader import load
from tasks.recipes.run_config import EvaluationConfig, RunConfig
from trainer.engines.engine import TrainEngine, make_engine

WHOLE_ROUND_PROMPTS = 16
EVALUATION_SEED = 20_260_515
ROUNDS_MAX = 5_000
"""Limit of rounds, after which the recipe cannot fill its batches."""


@dataclass(frozen=True, kw_only=True)
class EvaluationScore:
    """One evaluation; all values are shares of 1, 0 without a verifier."""

    versions: dict[str, int]
    solver: float
    """Correct first attempts."""
    team: float
    """Correct final attempts."""
    verifier: float
    """Correct verdicts."""
    false_approvals: float
    """Wrong first attempts that were not rejected."""


@dataclass(kw_only=True)
class Learner:
    """One policy: its train engine, its waiting rows and its last versions."""

    policy: str
    engine: TrainEngine
    batch_size: int
    kept: deque[Mapping[str, HostTensor]]
    """Weights of the last versions, newest last, adapters merged; rollouts use the oldest."""
    adapter: StoredAdapter | None
    version: int = 0
    waiting: list[BatchRow] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def rollout_version(self) -> int:
        return self.version - len(self.kept) + 1

    def next_rows(self, steps: int, max_staleness: int, whole: bool) -> list[BatchRow]:
        """Take the rows of the next batch, those that expire first; none if there are too few."""
        fresh = [row for row in self.waiting if self.version - row.min_version <= max_staleness]
        self.counts["expired"] += len(self.waiting) - len(fresh)
        self.waiting = sorted(fresh, key=lambda row: row.min_version)
        size = len(fresh) if whole else self.batch_size
        if self.version == steps or not fresh or len(fresh) < size:
            return []
        rows, self.waiting = self.waiting[:size], self.waiting[size:]
        return rows

    def train(self, rows: Sequence[BatchRow]) -> None:
        self.counts["rows"] += len(rows)
        self.counts["staleness"] += sum(self.version - row.min_version for row in rows)
        self.version += 1
        batch = Batch(
            policy=self.policy,
            step=self.version,
            rows=tuple(rows),
            ledger=(),
            waiting=(),
            shards=(),
            closed_below=0,
            closed=(),
        )
        self.counts["tokens"] += round(self.engine.step(batch)["trainer/tokens"])
        self.kept.append(adapters.merged(self.adapter, self.engine.weights()).tensors)


class Loop:
    """Trains the policies of a recipe, one round after the other."""

    def __init__(
        self,
        store: ObjectStore,
        config: RunConfig,
        evaluation: EvaluationConfig,
        lag: int,
        whole: bool,
    ) -> None:
        self.config, self.evaluation, self.whole = config, evaluation, whole
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        run = open_store(f"memory://tiny-learning/{time.time_ns()}")
        with self._measured("base model"):
            models = {policy: spec.model for policy, spec in config.policies.items()}
            publish_base_models(store, run, models, lambda stage, share: None)
        sampling = {policy: spec.sampling for policy, spec in config.policies.items()}
        engine = config.rollout.engine.model_copy(
            update={"max_concurrent": evaluation.max_concurrent}
        )
        self.training = open_agent_pool(run, config.rollout, sampling)
        self.evaluating = open_agent_pool(
            run, config.rollout.model_copy(update={"engine": engine}), sampling
        )
        self.learners = {policy: _learner(run, policy, config, lag) for policy in config.policies}
        self.order = 0
        self.cursor: Json = {}

    async def play(self) -> list[EvaluationScore]:
        """Train every policy for all its steps; return the evaluations."""
        scores: list[EvaluationScore] = []
        stream = self.config.data.prompts.stream()
        while True:
            if self._all_at(self.evaluation.every * len(scores)):
                scores.append(await self._evaluate())
                print(_line(scores[-1]), file=sys.stderr, flush=True)
            if self._all_at(self.config.steps):
                break
            if self.order == ROUNDS_MAX:
                raise RuntimeError(
                    f"{ROUNDS_MAX} rounds did not fill {self.config.steps} batches of each policy"
                )
            self._ingest(await self._roll_out(stream))
            self._train()
        await self.training.close()
        await self.evaluating.close()
        return scores

    async def _roll_out(self, stream: PromptStream) -> tuple[Group, ...]:
        data = self.config.data
        count = WHOLE_ROUND_PROMPTS if self.whole else data.prompts_per_order
        prompts, self.cursor = stream.take(self.cursor, count)
        with self._measured("rollout"):
            for policy, learner in self.learners.items():
                await self.training.engines[policy].load(learner.rollout_version(), learner.kept[0])
            seed = self.config.seed * ROUNDS_MAX + self.order
            return await run_prompts(self.training, prompts, data.samples_per_prompt, seed)

    def _ingest(self, groups: tuple[Group, ...]) -> None:
        with self._measured("data"):
            shard = Shard(
                order=self.order,
                attempt=0,
                worker="benchmark",
                region="here",
                groups=groups,
                weights={},
                started_s=0.0,
                finished_s=0.0,
            )
            chain = filters(self.config.data.filter)
            for policy, routed in route(shard, list(self.learners), {}).items():
                self.learners[policy].waiting += ingest_groups(routed, self.config.data, chain).rows
        self.order += 1

    def _train(self) -> None:
        with self._measured("training"):
            for learner in self.learners.values():
                while rows := learner.next_rows(
                    self.config.steps, self.config.data.max_staleness, self.whole
                ):
                    learner.train(rows)

    async def _evaluate(self) -> EvaluationScore:
        with self._measured("evaluation"):
            for policy, learner in self.learners.items():
                await self.evaluating.engines[policy].load(learner.version, learner.kept[-1])
            prompts = self.evaluation.prompts.stream().all(self.evaluation.prompts.limit)
            groups = await run_prompts(self.evaluating, prompts, 1, EVALUATION_SEED)
        versions = {policy: learner.version for policy, learner in self.learners.items()}
        return _score(versions, [group.episodes[0] for group in groups])

    def _all_at(self, version: int) -> bool:
        return all(learner.version >= version for learner in self.learners.values())

    @contextmanager
    def _measured(self, component: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.cpu_s[component] += time.process_time() - start


def _learner(run: ObjectStore, policy: str, config: RunConfig, lag: int) -> Learner:
    spec = config.policies[policy]
    engine = make_engine(
        spec.train, json.loads(reader.fetch_files(run, policy)["config.json"]), config.seed
    )
    base = reader.fetch(run, policy, 0)
    engine.set_weights(base)
    return Learner(
        policy=policy,
        engine=engine,
        batch_size=spec.batch_size,
        kept=deque([base], maxlen=lag + 1),
        adapter=spec.train.adapter.stored(),
    )


def _score(versions: dict[str, int], episodes: Sequence[Episode]) -> EvaluationScore:
    metrics = [episode.metrics for episode in episodes if episode.error is None]
    wrong = [each for each in metrics if not each["first_attempt"]]
    return EvaluationScore(
        versions=versions,
        solver=sum(each["first_attempt"] for each in metrics) / len(episodes),
        team=sum(each["final"] for each in metrics) / len(episodes),
        verifier=sum(each.get("verdict_correct", 0.0) for each in metrics) / len(episodes),
        false_approvals=sum(1 - each.get("rejected", 1.0) for each in wrong) / max(1, len(wrong)),
    )


def _report(loop: Loop, scores: Sequence[EvaluationScore]) -> Json:
    policies = {
        learner.policy: {
            "rows": learner.counts["rows"],
            "tokens": learner.counts["tokens"],
            "expired": learner.counts["expired"],
            "staleness_mean": learner.counts["staleness"] / max(1, learner.counts["rows"]),
        }
        for learner in loop.learners.values()
    }
    return {
        "scores": [asdict(score) for score in scores],
        "policies": policies,
        "cpu_s": dict(loop.cpu_s),
        "rounds": loop.order,
    }


def _line(score: EvaluationScore) -> str:
    versions = "/".join(str(version) for version in score.versions.values())
    return (
        f"versions {versions}: solver {score.solver:.3f}  team {score.team:.3f}  "
        f"verifier {score.verifier:.3f}  false approvals {score.false_approvals:.2f}"
    )


def _summary(report: Json) -> Iterator[str]:
    for policy, counts in report["policies"].items():
        yield f"{policy}: " + "  ".join(f"{name} {value:.4g}" for name, value in counts.items())
    seconds = "  ".join(
        f"{component} {seconds:.1f}" for component, seconds in report["cpu_s"].items()
    )
    yield f"CPU seconds: {seconds}; rounds {report['rounds']}"


def main() -> None:
    """Read the command line, run once, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiny_learning", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--recipe", default="multi_policy_tiny")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the recipe",
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--lag", type=int, default=0, help="rollouts use weights this many versions old"
    )
    parser.add_argument("--batches", choices=("whole", "exact"), default="whole")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    overrides = dict(each.split("=", 1) for each in arguments.set)
    overrides |= {
        "steps": arguments.steps,
        "seed": arguments.seed,
        "data.prompts.seed": arguments.seed,
    }
    config = load(arguments.recipe, overrides)
    if config.evaluation is None:
        parser.error(f"the recipe {arguments.recipe} has no evaluation to measure learning with")
    loop = Loop(
        default_store(), config, config.evaluation, arguments.lag, arguments.batches == "whole"
    )
    report = _report(loop, asyncio.run(loop.play()))
    print(json.dumps(report) if arguments.json else "\n".join(_summary(report)))


if __name__ == "__main__":
    main()
