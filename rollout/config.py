"""What a recipe says about rollout workers, engines, workflows and sampling. Free of torch."""

from typing import Annotated, Any

from pydantic import Field

from storage.config_model import (
    Count,
    CountOrNone,
    Frozen,
    Megabytes,
    OnlyWith,
    Seconds,
    SecondsOrNone,
    Share,
    Temperature,
    Threads,
    Tokens,
)


class SamplingConfig(Frozen):
    """How tokens of a policy are drawn."""

    temperature: Temperature = 1.0
    """0 is greedy; such tokens have log-probability 0 and cannot be trained on."""
    top_p: Share = 1.0
    """1 turns it off. Of a policy that is trained it must be off: its log-probabilities are those
    of the kept tokens alone.
    """
    top_k: CountOrNone = 0
    """0 turns it off; the same holds."""
    max_new_tokens: Tokens = 256


class WorkflowConfig(Frozen):
    name: str = "single_turn"
    """A built-in's name or an import path `package.module:Name`."""
    args: dict[str, Any] = {}
    """Passed to the workflow's constructor."""
    roles: dict[str, str] = {}
    """Workflow role → policy, where they differ: `{verifier: solver}` lets one policy play both."""
    timeout_s: Seconds = 120.0
    """An episode that takes longer is cut and recorded as failed."""
    reward: str = "math"
    """How an answer is judged: a built-in's name or an import path."""
    reward_timeout_s: Seconds = 5.0
    """CPU seconds that judging one answer may take; an answer that takes longer has no reward, and
    its episode has failed.
    """


class EngineConfig(Frozen):
    name: str = "torch"
    """A built-in's name or an import path."""
    device: str = "cpu"
    dtype: str = "float32"
    """Compute dtype; bfloat16 is slower than float32 on most CPUs."""
    threads: Threads = 1
    """Compute threads of one engine on a CPU."""
    max_concurrent: Count = 64
    """Sequences decoded together."""
    max_tokens: int = Field(default=512, ge=2, le=100_000_000)
    """Longest context (prompt and answer) of a sequence: sizes the KV cache."""


class RegionConfig(Frozen):
    """Workers of one region."""

    workers: CountOrNone = 1
    deployment: Annotated[str, OnlyWith("workers")] = ""
    """The Prefect deployment that starts a worker there; empty: `rollout/worker`, in the work queue
    of the region's name."""
    mirror: Annotated[str, OnlyWith("workers")] = ""
    """URL of a store in the region (`s3://bucket-eu/prefix?endpoint=https://host&profile=eu`, a
    path) that keeps a copy of the weights for its workers; empty: they read from the run's own
    store. What the URL does not say comes from the environment, as for that one; it holds no
    credentials, since it is stored with the run.
    """


class RolloutConfig(Frozen):
    workflow: WorkflowConfig = WorkflowConfig()
    engine: EngineConfig = EngineConfig()
    regions: dict[str, RegionConfig] = {"default": RegionConfig()}
    """Region → its workers. Any name of letters, digits, - and _ can be a region."""
    orders_ahead: Count = 2
    """Orders a worker leases and plays at once; two keep its engine full while one drains."""
    lease_ttl_s: Seconds = 20.0
    """A lease that was not renewed for so long is open to others."""
    lease_attempts_max: int = Field(default=5, ge=1, le=9_999)
    """After so many lost leases an order is answered with failed episodes instead of being tried
    for ever.
    """
    drain_s: SecondsOrNone = 15.0
    """On SIGTERM: time to finish leased orders before they are given back."""
    poll_interval_s: Seconds = 0.2
    """Pause between two looks for orders when there are none."""
    refresh_memory_mb: Megabytes = 1024
    """Host memory that fetching weights may take beside the version held and the one that is made.
    """
    refresh_interval_s: Seconds = 0.2
    """Pause between two looks for new weights."""
