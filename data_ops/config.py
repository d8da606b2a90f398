"""What a recipe says about prompts and the data algorithms. Free of torch."""

from typing import Annotated, Any, Literal

from pydantic import model_validator

from data_ops.prompts import PromptSource
from storage.config_model import (
    AnySign,
    Count,
    CountOrNone,
    Frozen,
    OnlyWith,
    Positive,
    Seconds,
    Steps,
    TokensOrNone,
)


class Algorithm(Frozen):
    """A data algorithm by name: a built-in's, or an import path `package.module:Name`. Written `name` or `{name, args}`."""

    name: str
    args: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _plain_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class AdvantageConfig(Frozen):
    """How a (prompt, policy) group's rewards become advantages."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """`mean`: GRPO. `leave_one_out`: RLOO."""
    divide_by_std: bool = True
    """GRPO divides by the group's standard deviation (N−1); Dr.GRPO does not."""
    reward_bias: AnySign = 0.0
    reward_scale: AnySign = 1.0
    reward_clip: Positive = 20.0
    """Rewards are clipped to ± this after bias and scale."""
    overlong_tokens: TokensOrNone = 0
    """DAPO's soft overlong penalty: width T of the window before `overlong_max_tokens`; 0 turns it off."""
    overlong_max_tokens: Annotated[TokensOrNone, OnlyWith("overlong_tokens")] = 0
    """Tokens of an answer from which on the whole penalty counts."""
    overlong_factor: Annotated[AnySign, OnlyWith("overlong_tokens")] = 1.0
    """The whole penalty."""

    @model_validator(mode="after")
    def _window_within_the_limit(self) -> "AdvantageConfig":
        if self.overlong_tokens > self.overlong_max_tokens:
            raise ValueError(
                f"overlong_tokens {self.overlong_tokens} is wider than overlong_max_tokens {self.overlong_max_tokens}: "
                "every answer would be penalized; set overlong_max_tokens to the longest answer, such as "
                "sampling.max_new_tokens"
            )
        return self


class DataConfig(Frozen):
    """The dataflow service."""

    prompts: PromptSource
    """One of `data_ops/prompts/`: `builtin`, `path`, `hub` or `custom` selects it."""
    samples_per_prompt: Count = 8
    """Episodes of each prompt: the size of a group."""
    prompts_per_order: Count = 4
    """Prompts in one order, the unit that a worker leases and a shard answers."""
    max_staleness: CountOrNone = 8
    """A sequence of batch n is at most this many versions older than version n−1; 0 is synchronous training."""
    batches_ahead: CountOrNone = 1
    """How many batches may be ready beyond the one the trainer works on."""
    curate: list[Algorithm] = [Algorithm(name="accept_all")]
    """Which prompts are rolled out; applied in turn."""
    filter: list[Algorithm] = [Algorithm(name="zero_advantage")]
    """Which (prompt, policy) groups are kept after rollout; applied in turn."""
    sample: list[Algorithm] = [Algorithm(name="edf")]
    """In which order waiting sequences are used; the last one decides ties last."""
    advantage: AdvantageConfig = AdvantageConfig()
    keep_partial_groups: bool = True
    """When an episode of a group failed: keep the others (True) or drop the group (False)."""
    poll_interval_s: Seconds = 0.2
    """Pause between two looks at the store while a trainer waits for a batch and there is nothing to do."""
    gather_interval_s: Seconds = 2.0
    """Pause between two looks while no trainer waits: shards gather, and one task takes in several of them."""
    shards_per_task: Count = 16
    """Shards that one parallel task takes in at most; more shards in a task amortize the task's own cost."""


class PolicyData(Frozen):
    """What the dataflow must know of one policy."""

    batch_size: Count
    """Sequences in a batch."""
    steps: Steps
    """Batches to make."""
