"""The whole configuration of a run, composed of each room's own. People write it as YAML (`recipes/`); the resolved form is
stored as `run.json` with the run. Reading recipes, `--set` overrides and errors with line numbers stand in `tasks/recipes.py`.
"""

from typing import Literal

from pydantic import Field, model_validator

from data_ops.config import DataConfig, PromptSource
from rollout.config import RolloutConfig, SamplingConfig
from storage.frozen import Frozen
from trainer.config import TrainConfig


class TinyBase(Frozen):
    """The embedded base model: a small Qwen3 architecture, warmed up on chained addition when it is first needed."""

    hidden: int = Field(default=64, ge=8)
    layers: int = Field(default=2, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=16, ge=2)
    intermediate: int = Field(default=192, ge=8)
    skill_iterations: int = Field(default=560, ge=0)
    """Supervised iterations that teach the skill."""
    habit_iterations: int = Field(default=60, ge=0)
    """Supervised iterations that hide the skill under bad habits, so that RL has something to find."""
    batch_size: int = Field(default=64, ge=1)
    seed: int = 0


class ModelConfig(Frozen):
    """Where a policy's version 0 comes from: exactly one of `tiny`, `path` and `hub`."""

    tiny: TinyBase | None = None
    path: str | None = None
    """A folder that `AutoModelForCausalLM.from_pretrained` loads."""
    hub: str | None = None
    """A model of the Hugging Face hub, such as `Qwen/Qwen3-1.7B`."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        named = [key for key in ("tiny", "path", "hub") if getattr(self, key) is not None]
        if len(named) != 1:
            raise ValueError(f"model needs exactly one of tiny, path and hub; found {' and '.join(named) or 'none'}")
        return self


class PolicyConfig(Frozen):
    """One model that is trained."""

    model: ModelConfig
    sampling: SamplingConfig = SamplingConfig()
    batch_size: int = Field(default=128, ge=1)
    """Sequences in one batch of this policy."""
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _divisible(self) -> "PolicyConfig":
        if self.batch_size % self.train.minibatches:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by train.minibatches {self.train.minibatches}; "
                "change either so that every minibatch has the same size"
            )
        return self


class EvaluationConfig(Frozen):
    """The fixed held-out set, played before, during and after training."""

    prompts: PromptSource
    dataset: str = "held_out"
    """Name of the set in `status`, reports and MLflow."""
    every: int = Field(default=20, ge=1)
    """Versions between two evaluations; version 0 and the last are always evaluated."""
    temperature: float = Field(default=1.0, ge=0)
    max_concurrent: int = Field(default=256, ge=1)
    """Sequences decoded together."""


class TrackingConfig(Frozen):
    """MLflow."""

    enabled: bool = True
    experiment: str = "astraflow"
    interval_s: float = Field(default=15.0, gt=0)
    """Pause between two looks for new metrics. Many metrics at once cost MLflow less than a few often."""
    register_models: bool = True
    """Register each policy's final weights as a model version."""


class SuperviseConfig(Frozen):
    """How the supervisor watches the others."""

    heartbeat_interval_s: float = Field(default=2.0, gt=0)
    heartbeat_limit_s: float = Field(default=20.0, gt=0)
    """A member silent for so long is lost, and replaced; one whose process works beside the supervisor, after ten times
    that."""
    launch_timeout_s: float = Field(default=120.0, gt=0)
    """A member whose process began to start, and that did not beat within this time, is launched again; one whose process works
    beside the supervisor, after ten times that."""
    restarts_max: int = Field(default=10, ge=0)
    """Replacements of one member before the run fails."""
    poll_interval_s: float = Field(default=2.0, gt=0)
    stop_timeout_s: float = Field(default=40.0, gt=0)
    """Time for members to leave by themselves when the run ends, before they are cancelled; ten times that after a completed
    run, while they work."""


class RunConfig(Frozen):
    """One training run."""

    name: str = "run"
    """Prefix of run ids that are made up."""
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=80, ge=1)
    """Training steps of every policy."""
    policies: dict[str, PolicyConfig] = Field(min_length=1)
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig | None = None
    tracking: TrackingConfig = TrackingConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"

    def evaluated_versions(self) -> tuple[dict[str, int], ...]:
        """The version vectors that are evaluated, in order: version 0, every `evaluation.every`, and the last."""
        if self.evaluation is None:
            return ()
        due = (*range(0, self.steps, self.evaluation.every), self.steps)
        return tuple(dict.fromkeys(self.policies, version) for version in due)

    @model_validator(mode="after")
    def _some_worker(self) -> "RunConfig":
        if not sum(region.workers for region in self.rollout.regions.values()):
            raise ValueError("rollout.regions has no worker at all; set workers: 1 or more in at least one region")
        return self
