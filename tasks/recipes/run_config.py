"""The configuration of a run, composed of the configurations of the packages.

People write it as YAML (`recipes/`), which `loader.py` reads. The resolved form is stored in the
run's `run.json`.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from data_ops.config import DataConfig
from data_ops.prompts import PromptSource
from rollout.config import RolloutConfig, SamplingConfig
from storage.config_model import (
    Count,
    CountOrNone,
    Frozen,
    Gpus,
    Hours,
    NotNegative,
    OnlyWith,
    Positive,
    Seconds,
    Seed,
    Steps,
    Temperature,
)
from storage.records.control import BudgetKind
from storage.records.promotions import POLICIES_MAX, ROWS_MAX
from storage.records.rollouts import KEPT_EPISODES_MAX
from tasks.base_models.config import ModelConfig
from tasks.promotion.gate.config import GateConfig
from trainer.config import TrainConfig

DATASETS_MAX = ROWS_MAX - 1
"""Data sets of the gate; its table has one more row."""
HELD_OUT_MAX = 100_000
"""Prompts of an evaluation: a task is started for each of them at once. The gate plays as many, of
all its data sets together.
"""
WORKERS_MAX = 10_000
"""Rollout workers of all regions: the supervisor looks at each of them every few seconds."""
MIRRORS_MAX = 32
"""Regions with a mirror: gc asks all of them, each through a client of its own (12 MB)."""


class PolicyConfig(Frozen):
    """One model that is trained."""

    model: ModelConfig
    sampling: SamplingConfig = SamplingConfig()
    batch_size: Count = 128
    """Sequences in one batch of this policy."""
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _divisible(self) -> "PolicyConfig":
        if self.batch_size % self.train.minibatches:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by train.minibatches "
                f"{self.train.minibatches}; "
                "change either so that every minibatch has the same size"
            )
        return self


class EvaluationConfig(Frozen):
    """Evaluation on a fixed held-out set, before, during and after training."""

    prompts: PromptSource
    dataset: str = "held_out"
    """Name of the set in `status`, reports and MLflow."""
    every: Steps = 20
    """Versions between two evaluations; version 0 and the last are always evaluated."""
    temperature: Temperature = 1.0
    max_concurrent: Count = 256
    """Sequences decoded together."""
    devices: Gpus = ()
    """GPUs of its engines, as `rollout.engine.devices`; empty: those of a worker."""
    kept_episodes: Annotated[CountOrNone, Field(le=KEPT_EPISODES_MAX)] = 32
    """Episodes of each evaluation that are stored with their tokens, and are traces in MLflow: of
    the same problems in every evaluation. 0: none.
    """


class ContestConfig(GateConfig):
    """How a candidate of the run is compared with the champion (`docs/promotion.md`)."""

    datasets: dict[str, PromptSource] = Field(default={}, max_length=DATASETS_MAX)
    """Data set → its problems; empty: those of the evaluation, under `evaluation.dataset`."""
    samples: Count = 1
    """Episodes of each problem for each team."""


class TrackingConfig(Frozen):
    """MLflow."""

    enabled: bool = True
    experiment: Annotated[str, OnlyWith("enabled", True)] = "astraflow"
    interval_s: Annotated[Seconds, OnlyWith("enabled", True)] = 15.0
    """Pause between two polls for new metrics. MLflow spends less on one large request than on many
    small ones.
    """
    register_models: Annotated[bool, OnlyWith("enabled", True, then=False)] = True
    """Register each policy's final weights as a model version."""
    registered_weights: Annotated[
        Literal["copy", "reference"], OnlyWith("enabled", True), OnlyWith("register_models", True)
    ] = "copy"
    """`copy`: MLflow's artifacts have the weights. `reference`: they stay in the run's store, from
    which MLflow loads them.
    """


class SuperviseConfig(Frozen):
    """How the supervisor watches the members of a run."""

    heartbeat_interval_s: Seconds = 2.0
    heartbeat_limit_s: Seconds = 20.0
    """A member without a heartbeat for this time is lost and replaced; after ten times this time if
    its process works on the supervisor's machine. The time doubles with every further attempt in a
    row that ends soon, up to ten times; the same holds for the next one.
    """
    launch_timeout_s: Seconds = 120.0
    """A member whose process has started, and that has no heartbeat after this time, is launched
    again; after ten times this time if its process works on the supervisor's machine.
    """
    restarts_max: CountOrNone = 10
    """Replacements of one member before the run fails."""
    poll_interval_s: Seconds = 2.0
    stop_timeout_s: Seconds = 40.0
    """Time for members to stop when the run ends, before they are cancelled; ten times this time
    after a completed run, for members that still work.
    """
    close_timeout_s: Seconds = 7200.0
    """Time limit of each closing step: last evaluation, verify, report, register, notify. The run
    goes on to the next step without it.
    """


class BudgetConfig(Frozen):
    """What a run may use. When one limit is reached, the run ends as `exhausted`; null: no limit.

    Example: `BudgetConfig(hours=8, cost=500, price_per_hour={"control": 0, "trainers": 12.0,
    "rollout": 4.0, "rollout/us-east": 3.5})`. The only section that may differ when a run is
    started again.
    """

    hours: Hours | None = None
    """Wall-clock hours since the run was created; those in which it was stopped count, too."""
    tokens: Positive | None = None
    """Tokens sampled in rollouts."""
    cost: Positive | None = None
    """Sum of the hours in which each member was alive, times its price; in any currency."""
    price_per_hour: Annotated[dict[str, NotNegative], OnlyWith("cost")] = {}
    """Price of one member for an hour: of the pools `control`, `trainers` and `rollout`, or of the
    members in one region: `rollout/REGION`.
    """

    @property
    def limits(self) -> dict[BudgetKind, float]:
        """Kind → limit, without the kinds that are not limited."""
        limits: dict[BudgetKind, float | None] = {
            "hours": self.hours,
            "tokens": self.tokens,
            "cost": self.cost,
        }
        return {kind: limit for kind, limit in limits.items() if limit is not None}


class RunConfig(Frozen):
    """One training run."""

    name: str = "run"
    """Prefix of generated run ids."""
    seed: Seed = 0
    steps: Steps = 80
    """Training steps of every policy."""
    policies: dict[str, PolicyConfig] = Field(min_length=1, max_length=POLICIES_MAX)
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig | None = None
    gate: ContestConfig | None = None
    tracking: TrackingConfig = TrackingConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    budget: BudgetConfig = BudgetConfig()
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """The least severe records of AstraFlow in Prefect's logs."""
    log_every_s: Annotated[Seconds, OnlyWith("log_level", ("DEBUG", "INFO"))] = 60.0
    """Longest time between two lines about the progress of a service, at level INFO."""
    log_every_steps: Annotated[Steps, OnlyWith("log_level", ("DEBUG", "INFO"))] = 10
    """A trainer also writes such a line after this number of steps."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_policies(cls, settings: Any) -> Any:
        """Resolve `schedule_steps: null` of a learning-rate schedule to the run's last step, and
        the policy of a model of another run to the one of the same name.
        """
        policies = settings.get("policies") if isinstance(settings, Mapping) else None
        if not isinstance(policies, Mapping):
            return settings
        steps = settings.get("steps", cls.model_fields["steps"].default)
        resolved = {
            name: _with_origin_policy(_with_schedule_end(policy, steps), name)
            for name, policy in policies.items()
        }
        return {**settings, "policies": resolved}

    def evaluated_versions(self) -> Iterator[dict[str, int]]:
        """Yield the version vectors to evaluate, in order: 0, every `evaluation.every`-th, the
        last. There may be a million.
        """
        if self.evaluation is not None:
            for version in chain(range(0, self.steps, self.evaluation.every), [self.steps]):
                yield dict.fromkeys(self.policies, version)

    @model_validator(mode="after")
    def _number_of_workers(self) -> "RunConfig":
        workers = sum(region.workers for region in self.rollout.regions.values())
        if not workers:
            raise ValueError(
                "rollout.regions has no worker at all; set workers: 1 or more in at least one "
                "region"
            )
        if workers > WORKERS_MAX:
            raise ValueError(
                f"rollout.regions has {workers:,} workers, and a run has at most "
                f"{WORKERS_MAX:,}; lower workers"
            )
        return self

    @model_validator(mode="after")
    def _number_of_mirrors(self) -> "RunConfig":
        mirrors = sum(bool(region.mirror) for region in self.rollout.regions.values())
        if mirrors > MIRRORS_MAX:
            raise ValueError(
                f"rollout.regions has {mirrors:,} mirrors, and a run has at most {MIRRORS_MAX}; "
                "leave mirror out where few workers are"
            )
        return self


def _with_schedule_end(policy: Any, steps: Any) -> Any:
    train = policy.get("train") if isinstance(policy, Mapping) else None
    if not isinstance(train, Mapping) or train.get("lr_schedule", "constant") == "constant":
        return policy
    if train.get("schedule_steps") is not None:
        return policy
    return {**policy, "train": {**train, "schedule_steps": steps}}


def _with_origin_policy(policy: Any, name: str) -> Any:
    model = policy.get("model") if isinstance(policy, Mapping) else None
    if not isinstance(model, Mapping) or model.get("run") is None:
        return policy
    return {**policy, "model": {**model, "policy": model.get("policy") or name}}
