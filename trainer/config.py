"""What a recipe says about training one policy. Free of torch."""

from typing import Any, Literal

from pydantic import Field, model_validator

from storage.frozen import Frozen

WATER_FILLED_THRESHOLD = 0.04
"""The threshold θ of M2PO's water-filled form where a recipe names none: that of the published code."""


class LossConfig(Frozen):
    """The policy-gradient loss; formulas and papers stand in `trainer/losses.py`."""

    name: Literal["ppo_clip", "m2po"] = "m2po"
    clip_low: float = Field(default=0.2, ge=0)
    """ppo_clip: 1 − clip_low is the lower bound of the ratio."""
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    """Every loss: largest ratio that counts where the advantage is negative; none: no limit."""
    m2_form: Literal["adaptive_clip", "token_mask", "water_filled"] = "adaptive_clip"
    """m2po: which of the published forms."""
    m2_threshold: float = Field(default=0.01, gt=0)
    """m2po: bound θ of the second moment of the log ratio; 0.04 where `m2_form: water_filled` names none."""
    aggregate: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """DAPO, GRPO and Dr.GRPO in turn."""
    constant_length: int | None = Field(default=None, ge=1)
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
    lr: float = Field(default=5e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch; divides the batch size."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Padded tokens of one forward and backward pass."""
    normalize_advantages: bool = True
    """Normalize advantages over the masked tokens of the whole batch (mean and std in float64)."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more compute."""
    publish_dtype: Literal["BF16", "F32"] = "BF16"
    anchor_every: int = Field(default=20, ge=1)
    """Every so-manieth version is published whole, the others as deltas to the one before; 1: all of them whole."""
    publish_memory_mb: int = Field(default=1024, ge=64)
    """Host memory that publishing may take beside the two versions it compares."""
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
    """CPU compute threads; 1 makes a resumed run bit-equal to an uninterrupted one."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between two checkpoints; the last step is always saved."""
    checkpoints_keep: int = Field(default=2, ge=1)
    poll_interval_s: float = Field(default=0.1, gt=0)
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
