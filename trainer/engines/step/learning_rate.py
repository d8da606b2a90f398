"""The learning rate of a step. Does not import torch."""

import math
from typing import Literal

from trainer.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the learning rate of `step`, a function of the step alone: no state is restored."""
    warmup, end = config.warmup_steps, config.schedule_steps
    if config.lr_schedule == "constant" or end is None or step <= warmup:
        return config.lr * (min(1.0, step / warmup) if warmup else 1.0)
    progress = min(1.0, (step - warmup) / (end - warmup))
    return config.lr * decay(config.lr_schedule, progress, config.lr_min_share)


def decay(schedule: Literal["linear", "cosine"], progress: float, min_share: float) -> float:
    """Return the share of the learning rate after `progress` (0 to 1) of the time after warm-up.

    linear: 1 − p; cosine: (1 + cos πp) / 2 (arXiv 1608.03983, without restarts); each scaled to end
    at `min_share`. As in transformers' schedulers, whose step 0 has the learning rate 0 of a
    warm-up: their step n is the step n here, which counts from 1.
    """
    share = 1.0 - progress if schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return min_share + (1.0 - min_share) * share
