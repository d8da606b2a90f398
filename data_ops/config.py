"""The settings of the dataflow service in a recipe. Free of torch and of Prefect."""

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from data_ops.algorithms import CurateConfig, FilterConfig, SampleConfig
from data_ops.algorithms.advantages import AdvantageConfig
from data_ops.algorithms.curators import AcceptAll
from data_ops.algorithms.filters import ZeroAdvantage
from data_ops.algorithms.named import Named
from data_ops.algorithms.samplers import Edf
from data_ops.prompts import PromptSource
from data_ops.prompts.source import PromptPosition
from storage.config_model import Count, CountOrNone, Frozen, OnlyWith, Seconds, Steps
from storage.config_union import ByPath, variants

ALGORITHMS_MAX = 16
"""Algorithms of one place: each is called for every prompt, group or batch."""


class ThreadRunner(Named):
    """Threads of the dataflow's process."""

    name: Literal["threads"] = "threads"


class ProcessRunner(Named):
    """Processes on the dataflow's machine."""

    name: Literal["processes"] = "processes"
    workers: Count | None = None
    """Processes at most; as many as CPUs where it is not set."""


class DaskRunner(Named):
    """Workers of a Dask cluster; needs `astraflow[dask]`."""

    name: Literal["dask"] = "dask"
    address: str | None = None
    """The scheduler of a running cluster, such as `tcp://10.0.0.5:8786`; a cluster on the
    dataflow's machine is started where it is not set.
    """


class RayRunner(Named):
    """Workers of a Ray cluster; needs `astraflow[ray]`."""

    name: Literal["ray"] = "ray"
    address: str | None = None
    """A running cluster, such as `ray://10.0.0.5:10001`; one on the dataflow's machine is started
    where it is not set.
    """


TaskRunnerConfig: TypeAlias = Annotated[
    Annotated[ThreadRunner, Tag("threads")]
    | Annotated[ProcessRunner, Tag("processes")]
    | Annotated[DaskRunner, Tag("dask")]
    | Annotated[RayRunner, Tag("ray")],
    Discriminator(ByPath()),
]
"""Where the tasks that ingest shards run (`tasks/services/task_runners.py`)."""
TASK_RUNNERS: Final = variants(TaskRunnerConfig)


class DataConfig(Frozen):
    """The dataflow service."""

    prompts: PromptSource
    """One of `data_ops/prompts/`: `builtin`, `path`, `hub`, `window` or `custom`
    selects it."""
    start: PromptPosition = PromptPosition()
    """Where in the stream of prompts the run begins."""
    samples_per_prompt: Count = 8
    """Episodes of each prompt: the size of a group."""
    prompts_per_order: Count = 4
    """Prompts in one order, the unit that a worker leases and a shard answers."""
    max_staleness: CountOrNone = 8
    """A sequence of batch n is at most this many versions older than version n−1; 0 is synchronous
    training.
    """
    batches_ahead: Annotated[CountOrNone, OnlyWith("max_staleness", then=0)] = 1
    """Batches that may be ready beyond the one that the trainer works on."""
    curate: list[CurateConfig] = Field(default=[AcceptAll()], max_length=ALGORITHMS_MAX)
    """Which prompts are rolled out; applied in turn."""
    filter: list[FilterConfig] = Field(default=[ZeroAdvantage()], max_length=ALGORITHMS_MAX)
    """Which (prompt, policy) groups are kept after rollout; applied in turn."""
    sample: list[SampleConfig] = Field(default=[Edf()], max_length=ALGORITHMS_MAX)
    """In which order waiting sequences are used; the last one decides ties last."""
    advantage: AdvantageConfig = AdvantageConfig()
    keep_partial_groups: bool = True
    """When an episode of a group failed: keep the others (True) or drop the group (False)."""
    poll_interval_s: Seconds = 0.2
    """Pause between two polls of the store while a trainer waits for a batch."""
    gather_interval_s: Seconds = 2.0
    """Pause between two polls while no trainer waits: meanwhile shards gather, and one task ingests
    several of them.
    """
    task_runner: TaskRunnerConfig = ThreadRunner()
    """Where shards are ingested: `threads`, `processes`, `dask` or `ray`."""
    shards_per_task: Count = 16
    """Shards that one task ingests at most, whatever they cost: bounds its memory."""

    @property
    def episodes_per_order(self) -> int:
        return self.prompts_per_order * self.samples_per_prompt


class PolicyData(Frozen):
    """The settings of one policy that the dataflow needs."""

    batch_size: Count
    """Sequences in a batch."""
    steps: Steps
    """Batches to make."""
