"""The process group of torch.distributed in which the ranks of this node compute.

Ranks find each other by a file in a private folder, because a TCP store of torch listens on all
interfaces; their connections use the loopback interface.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from storage.errors import ConfigError
from trainer.config import TrainConfig
from trainer.placement import rank_gpus

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TIMEOUT = timedelta(minutes=30)
"""A backstop: a rank that died is noticed by its leader at once (`leader.py`)."""


def rank_device(config: TrainConfig, rank: int) -> str:
    """Return torch's name of the device of a rank, in the process of that rank.

    Rank 0 is in the trainer's process, which has a view of all GPUs of the trainer; each other one
    has a view of its own GPU alone (`leader.py`).

    ConfigError for a certain GPU with several ranks.
    """
    if config.device != "cuda":
        if config.ranks > 1 and config.device != "cpu":
            raise ConfigError(
                f"train.device {config.device!r} is one device, and train.ranks is {config.ranks}; "
                "use cuda, with the GPU of each rank in train.devices, or cpu"
            )
        return config.device
    return f"cuda:{rank_gpus(config)[0] if rank == 0 else 0}"


def check_gpus(config: TrainConfig) -> None:
    """Raise ConfigError where a rank has no GPU."""
    rank_device(config, 0)
    num_gpus = torch.cuda.device_count() if config.device == "cuda" else 0
    missing = [gpu for gpu in rank_gpus(config) if config.device == "cuda" and gpu >= num_gpus]
    if missing:
        raise ConfigError(
            f"train.ranks is {config.ranks} and needs GPU {missing[0]}, and this machine has "
            f"{num_gpus} GPUs, counted from 0; change train.devices or train.ranks, or set "
            "CUDA_VISIBLE_DEVICES where the worker of the pool is started"
        )


def join(rendezvous: str, rank: int, num_ranks: int, device: str) -> None:
    """Join the process group with this rank's own device; returns when all ranks have joined."""
    on_gpu = device.startswith("cuda")
    local = int(device.partition(":")[2] or 0) if on_gpu else rank
    numbers = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": num_ranks}  # read by DeepSpeed
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, LOOPBACK))
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=TIMEOUT,
    )


def leave() -> None:
    """Leave the process group, also when other ranks are gone."""
    deepspeed = sys.modules.get("deepspeed.comm")
    if deepspeed and deepspeed.is_initialized():
        deepspeed.destroy_process_group()  # with its own groups
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", *INTERFACE_VARIABLES):
        os.environ.pop(name, None)  # not for other processes that this one starts


def abort() -> None:
    """End the collectives that wait for a rank that is gone.

    Gloo notices the closed connection by itself.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
