"""The GPUs of a trainer's ranks. Importing this module does not import torch."""

import re

from trainer.config import TrainConfig

_NUMBERED = re.compile(r"cuda:(\d{1,4})", re.ASCII)


def rank_gpus(config: TrainConfig) -> tuple[int, ...]:
    """Return the GPU of each rank, counted among those that the trainer may use; none on a CPU.

    Example: `ranks: 2, device: cuda` has (0, 1), and with `devices: [3, 1]` (3, 1).
    """
    if numbered := _NUMBERED.fullmatch(config.device):
        return (int(numbered[1]),)
    if config.device != "cuda":
        return ()
    return config.devices or tuple(range(config.ranks))


def leader_device(config: TrainConfig) -> str:
    """Return torch's name of the device of rank 0, which has the trainer's view of the GPUs."""
    return f"cuda:{config.devices[0]}" if config.devices else config.device
