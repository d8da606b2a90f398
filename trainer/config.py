"""Settings of the training of one policy. Importing this module does not import torch."""

from typing import Any, Literal

from pydantic import model_validator

from storage.config_model import (
    Count,
    CountOrNone,
    Decay,
    Frozen,
    Megabytes,
    NotNegative,
    Positive,
    Seconds,
    Steps,
    Threads,
    Tokens,
)
from trainer.losses import LossConfig
from trainer.losses.m2po import M2po


class TrainConfig(Frozen):
    engine: str = "torch"
    """A built-in's name or an import path."""
    loss: LossConfig = M2po()
    """`name` selects a loss of `trainer/losses/`; default: m2po."""
    lr: NotNegative = 5e-6
    """Learning rate; 0 leaves the weights unchanged, bit for bit (a baseline)."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    warmup_steps: CountOrNone = 0
    """Steps over which the learning rate rises linearly from 0."""
    grad_clip: Positive | None = 1.0
    """Largest norm of the gradient; null: no limit."""
    minibatches: Count = 1
    """Optimizer steps per batch; divides the batch size."""
    micro_batch_tokens: Tokens = 8192
    """Padded tokens of one forward and backward pass."""
    normalize_advantages: bool = True
    """Normalize advantages over the masked tokens of the whole batch (mean and std in float64)."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more compute."""
    publish_dtype: Literal["BF16", "F32"] = "BF16"
    anchor_every: Steps = 20
    """Every Nth version is an anchor, the others are deltas; 1: every version is an anchor."""
    publish_memory_mb: Megabytes = 1024
    """Host memory limit of publishing, without the two versions that it compares."""
    device: str = "cpu"
    threads: Threads = 1
    """CPU compute threads; 1 makes a resumed run bit-equal to an uninterrupted one."""
    checkpoint_every: Steps = 10
    """Steps between two checkpoints; the last step is always saved."""
    checkpoints_keep: Count = 2
    poll_interval_s: Seconds = 0.1
    """Pause between two polls for the next batch."""

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
