"""What a recipe says about prompts and the data algorithms. Free of torch."""

from data_ops.algorithms import CurateConfig, FilterConfig, SampleConfig
from data_ops.algorithms.advantages import AdvantageConfig
from data_ops.algorithms.curators import AcceptAll
from data_ops.algorithms.filters import ZeroAdvantage
from data_ops.algorithms.samplers import Edf
from data_ops.prompts import PromptSource
from storage.config_model import Count, CountOrNone, Frozen, Seconds, Steps


class DataConfig(Frozen):
    """The dataflow service."""

    prompts: PromptSource
    """One of `data_ops/prompts/`: `builtin`, `path`, `hub` or `custom` selects it."""
    samples_per_prompt: Count = 8
    """Episodes of each prompt: the size of a group."""
    prompts_per_order: Count = 4
    """Prompts in one order, the unit that a worker leases and a shard answers."""
    max_staleness: CountOrNone = 8
    """A sequence of batch n is at most this many versions older than version n−1; 0 is synchronous
    training.
    """
    batches_ahead: CountOrNone = 1
    """How many batches may be ready beyond the one the trainer works on."""
    curate: list[CurateConfig] = [AcceptAll()]
    """Which prompts are rolled out; applied in turn."""
    filter: list[FilterConfig] = [ZeroAdvantage()]
    """Which (prompt, policy) groups are kept after rollout; applied in turn."""
    sample: list[SampleConfig] = [Edf()]
    """In which order waiting sequences are used; the last one decides ties last."""
    advantage: AdvantageConfig = AdvantageConfig()
    keep_partial_groups: bool = True
    """When an episode of a group failed: keep the others (True) or drop the group (False)."""
    poll_interval_s: Seconds = 0.2
    """Pause between two looks at the store while a trainer waits for a batch and there is nothing
    to do.
    """
    gather_interval_s: Seconds = 2.0
    """Pause between two looks while no trainer waits: shards gather, and one task takes in several
    of them.
    """
    shards_per_task: Count = 16
    """Shards that one parallel task takes in at most; more shards in a task amortize the task's own
    cost.
    """


class PolicyData(Frozen):
    """What the dataflow must know of one policy."""

    batch_size: Count
    """Sequences in a batch."""
    steps: Steps
    """Batches to make."""
