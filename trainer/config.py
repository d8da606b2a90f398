"""Settings of the training of one policy. Importing this module does not import torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from storage.config_model import (
    Count,
    CountOrNone,
    Decay,
    Devices,
    Frozen,
    Gpus,
    Megabytes,
    NotNegative,
    OnlyWith,
    Positive,
    PositiveFloat32,
    Seconds,
    Share,
    ShareOrNone,
    Steps,
    Threads,
    Tokens,
)
from trainer.adapters import AdapterConfig, Lora, NoAdapter
from trainer.losses import LossConfig
from trainer.losses.m2po import M2po
from trainer.losses.reference_kl import ReferenceKl
from trainer.optimizers import AdamWOptimizer, OptimizerConfig


class DeepspeedConfig(Frozen):
    """Settings of the engine `deepspeed`."""

    stage: Literal[1, 2, 3] = 2
    """What the ranks share out: 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory."""


class MismatchLimits(Frozen):
    """Limits of the mismatch of sampler and trainer: mean |Δ log p| over the measured tokens of a
    step, the metric `trainer/mismatch/mean_abs` (`trainer/losses/mismatch.py`).
    """

    warn: Positive | None = None
    """Above it the trainer warns, in its log and its heartbeat; null: never."""
    stop: Positive | None = None
    """Above it the run fails, before the step's version is published; null: never."""

    @model_validator(mode="after")
    def _warns_before_it_stops(self) -> "MismatchLimits":
        if self.warn is not None and self.stop is not None and self.warn > self.stop:
            raise ValueError(
                f"mismatch.warn {self.warn:g} is above mismatch.stop {self.stop:g}, so it would "
                "never warn; lower it, or leave it out"
            )
        return self


_OF_ADAMW = (
    OnlyWith("optimizer.name", ("adamw", "muon")),
    # Muon trains matrices of layers, and those of an adapter are all that is trained.
    OnlyWith("adapter.name", "none", where=OnlyWith("optimizer.name", "muon")),
)

_OF_LR = OnlyWith("lr", where=OnlyWith("optimizer.name", ("adamw", "muon")))
"""Without an effect at a learning rate of 0, except for an optimizer by import path, which may have
a rate of its own.
"""
_OF_SCHEDULE = (OnlyWith("lr_schedule", ("linear", "cosine")), _OF_LR)


class TrainConfig(Frozen):
    engine: str = "torch"
    """A built-in's name or an import path."""
    ranks: Devices = 1
    """Processes of a machine that train together; on `device: cuda`, one GPU each."""
    nodes: Devices = 1
    """Machines that train together, each with `ranks` processes; engines `torch`, `deepspeed`."""
    deepspeed: Annotated[DeepspeedConfig, OnlyWith("engine", "deepspeed")] = DeepspeedConfig()
    """Settings of the engine `deepspeed` alone."""
    loss: LossConfig = M2po()
    """`name` selects a loss of `trainer/losses/`; default: m2po."""
    reference: ReferenceKl | None = None
    """Add the distance from a fixed version of the policy to the loss; null: no reference."""
    optimizer: OptimizerConfig = AdamWOptimizer()
    """`name` selects an optimizer of `trainer/optimizers.py`; default: adamw."""
    adapter: AdapterConfig = NoAdapter()
    """`name` selects an adapter of `trainer/adapters.py`; default: none, all weights train."""
    lr: NotNegative = 5e-6
    """Learning rate; 0 leaves the weights unchanged, bit for bit (a baseline)."""
    betas: Annotated[tuple[Decay, Decay], *_OF_ADAMW] = (0.9, 0.999)
    eps: Annotated[PositiveFloat32, *_OF_ADAMW, _OF_LR] = 1e-8
    weight_decay: Annotated[NotNegative, _OF_LR] = 0.01
    warmup_steps: Annotated[CountOrNone, _OF_LR] = 0
    """Steps over which the learning rate rises linearly from 0."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], _OF_LR] = "constant"
    """How the learning rate falls after the warm-up."""
    lr_min_share: Annotated[ShareOrNone, *_OF_SCHEDULE] = 0.0
    """Share of `lr` at the end of the schedule."""
    schedule_steps: Annotated[Steps | None, *_OF_SCHEDULE] = None
    """Step at which the schedule ends; null: the run's last one."""
    grad_clip: Positive | None = 1.0
    """Largest norm of the gradient; null: no limit."""
    minibatches: Count = 1
    """Optimizer steps per batch; divides the batch size."""
    micro_batch_tokens: Tokens = 8192
    """Tokens of one forward and backward pass, padding included."""
    packing: Literal["padded", "packed"] = "padded"
    """padded: rows of similar length in a rectangle; packed: one after the other without padding.
    With sdpa, packed rows cost the square of their sum; use it with flash_attention_2.
    """
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    """Implementation of attention in transformers; flash_attention_2 needs its package and bf16."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the model's matrix products. Weights, optimizer, softmax and losses are always fp32."""
    normalize_advantages: bool = True
    """Normalize advantages over the masked tokens of the whole batch (mean and std in float64)."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more compute."""
    compile: bool = False
    """Compile the layers by torch.compile: faster steps after the first, which waits for it."""
    publish_dtype: Literal["BF16", "F32"] = "BF16"
    anchor_every: Steps = 20
    """Every Nth version is an anchor, the others are deltas; 1: every version is an anchor."""
    publish_memory_mb: Megabytes = 1024
    """Host memory limit of publishing, without the two versions that it compares."""
    device: str = "cpu"
    devices: Annotated[Gpus, OnlyWith("device", "cuda")] = ()
    """The GPU of each rank; empty: the first ones. CUDA_VISIBLE_DEVICES of the pool's worker limits
    them: they are counted among those that it lists.
    """
    device_share: Annotated[Share, OnlyWith("device", "cuda")] = 1.0
    """Share of each of its GPUs that the trainer may use. Processes whose shares add up to more
    than 1 never use one GPU together: one of them waits. It is not enforced within the trainer.
    """
    threads: Threads = 1
    """CPU compute threads; 1 makes a resumed run bit-equal to an uninterrupted one."""
    checkpoint_every: Steps = 10
    """Steps between two checkpoints; the last step is always saved."""
    checkpoints_keep: Count = 2
    poll_interval_s: Seconds = 0.1
    """Pause between two polls for the next batch."""
    mismatch: MismatchLimits = MismatchLimits()
    """Limits of the mismatch of sampler and trainer; by default it is measured only."""

    @model_validator(mode="after")
    def _schedule_ends(self) -> Self:
        if self.lr_schedule == "constant":
            return self
        if self.schedule_steps is None:
            raise ValueError(
                f"lr_schedule: {self.lr_schedule} needs schedule_steps, the step at which it ends"
            )
        if self.schedule_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule_steps {self.schedule_steps} is not above warmup_steps "
                f"{self.warmup_steps}: nothing is left for lr_schedule: {self.lr_schedule}; change "
                "either"
            )
        return self

    @model_validator(mode="after")
    def _adapter_in_torch(self) -> Self:
        if self.engine == "deepspeed" and isinstance(self.adapter, Lora):
            raise ValueError(
                "engine: deepspeed trains no adapter; use engine: torch, also for several ranks, "
                "or adapter: {name: none}"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks

    @model_validator(mode="after")
    def _nodes_of_a_built_in(self) -> Self:
        if self.nodes > 1 and self.engine not in ("torch", "deepspeed"):
            raise ValueError(
                f"nodes: {self.nodes} needs engine: torch or engine: deepspeed; an engine by "
                "import path trains on one machine"
            )
        return self

    @model_validator(mode="after")
    def _compiled_in_torch(self) -> Self:
        if self.engine == "deepspeed" and self.compile:
            raise ValueError(
                "engine: deepspeed compiles nothing, since ZeRO hooks into each module of a layer; "
                "use engine: torch, also for several ranks, or leave compile out"
            )
        return self

    @model_validator(mode="after")
    def _one_gpu_for_each_rank(self) -> Self:
        if len(self.devices) not in (0, self.ranks):
            raise ValueError(
                f"devices names {len(self.devices)} GPUs, and ranks is {self.ranks}; name one for "
                "each rank, or leave devices out"
            )
        return self

    @model_validator(mode="after")
    def _flash_attention_in_bf16(self) -> Self:
        if self.attention == "flash_attention_2" and self.precision != "bf16":
            raise ValueError("attention: flash_attention_2 computes in bf16; set precision: bf16")
        return self

    @model_validator(mode="before")
    @classmethod
    def _without_compact_deltas(cls, settings: Any) -> Any:
        """Drop `compact_deltas: false`, which earlier releases stored with every run."""
        if not isinstance(settings, dict) or "compact_deltas" not in settings:
            return settings
        if settings["compact_deltas"] is not False:
            raise ValueError(
                "compact_deltas was removed: leave it out; a run that set it is read and resumed "
                "by the release that wrote it (docs/decisions/0010-deltas-are-steps.md)"
            )
        return {name: value for name, value in settings.items() if name != "compact_deltas"}
