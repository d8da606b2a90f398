"""What a recipe says about training one policy. Free of torch."""

from typing import Any, Literal

from pydantic import Field, model_validator

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

WATER_FILLED_THRESHOLD = 0.04
"""The threshold θ of M2PO's water-filled form where a recipe names none: that of the published code."""


class LossConfig(Frozen):
    """The policy-gradient loss; formulas and papers stand in `trainer/losses/losses.py`."""

    name: Literal["ppo_clip", "m2po"] = "m2po"
    clip_low: NotNegative = 0.2
    """ppo_clip: 1 − clip_low is the lower bound of the ratio."""
    clip_high: NotNegative = 0.2
    dual_clip: float | None = Field(default=None, gt=1, le=1e6)
    """Every loss: largest ratio that counts where the advantage is negative; none: no limit."""
    m2_form: Literal["adaptive_clip", "token_mask", "water_filled"] = "adaptive_clip"
    """m2po: which of the published forms."""
    m2_threshold: Positive = 0.01
    """m2po: bound θ of the second moment of the log ratio; 0.04 where `m2_form: water_filled` names none."""
    aggregate: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """DAPO, GRPO and Dr.GRPO in turn."""
    constant_length: Tokens | None = None
    """Divisor of `aggregate: constant`."""

    @model_validator(mode="before")
    @classmethod
    def _threshold_of_the_form(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("m2_form") == "water_filled":
            return {"m2_threshold": WATER_FILLED_THRESHOLD} | value
        return value

    @model_validator(mode="after")
    def _constant_needs_length(self) -> "LossConfig":
        if self.aggregate == "constant" and self.constant_length is None:
            raise ValueError("loss.aggregate: constant needs loss.constant_length")
        return self


class TrainConfig(Frozen):
    engine: str = "torch"
    """A built-in's name or an import path."""
    loss: LossConfig = LossConfig()
    lr: NotNegative = 5e-6
    """0 leaves the weights as they are, bit for bit: a policy that is played and not trained, or a baseline."""
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
    """Every so-manieth version is published whole, the others as deltas to the one before; 1: all of them whole."""
    publish_memory_mb: Megabytes = 1024
    """Host memory that publishing may take beside the two versions it compares."""
    device: str = "cpu"
    threads: Threads = 1
    """CPU compute threads; 1 makes a resumed run bit-equal to an uninterrupted one."""
    checkpoint_every: Steps = 10
    """Steps between two checkpoints; the last step is always saved."""
    checkpoints_keep: Count = 2
    poll_interval_s: Seconds = 0.1
    """Pause between two looks for the next batch."""

    @model_validator(mode="before")
    @classmethod
    def _without_compact_deltas(cls, settings: Any) -> Any:
        """Earlier releases stored the setting `compact_deltas` with every run: without effect where it is false."""
        if not isinstance(settings, dict) or "compact_deltas" not in settings:
            return settings
        if settings["compact_deltas"] is not False:
            raise ValueError(
                "compact_deltas was removed: leave it out; a run that set it is read and resumed by the release that wrote it "
                "(docs/decisions/0010-deltas-are-steps.md)"
            )
        return {name: value for name, value in settings.items() if name != "compact_deltas"}
