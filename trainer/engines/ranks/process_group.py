"""The process group of torch.distributed in which the ranks of a trainer compute.

Ranks of one node find each other by a file in a private folder, because a TCP store of torch
listens on all interfaces; their connections use the loopback interface. Ranks of several nodes find
each other by a rendezvous (`rendezvous.py`), and connect over the interface that the environment
names.
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store  # torch.distributed has it without a type

from storage.errors import ConfigError
from trainer.config import TrainConfig
from trainer.placement import rank_gpus

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TIMEOUT = timedelta(minutes=30)
"""A backstop: a rank that died is noticed by its leader at once (`leader.py`)."""
IDLE = timedelta(days=365)
"""Limit of the group of nodes, in which a node waits for the next call."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The place of a process among the ranks of a trainer. Example: the second rank of node 1,
    `Seat(rank=3, num_ranks=4, num_nodes=2, device="cpu")`.
    """

    rank: int
    num_ranks: int
    """Those of all nodes."""
    num_nodes: int
    device: str
    file: str = ""
    """By which the ranks of one node find each other; empty for several nodes."""

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes


def seat(config: TrainConfig, rank: int, file: str) -> Seat:
    """Return the place of a rank; raises what `rank_device` raises."""
    return Seat(
        rank=rank,
        num_ranks=config.num_ranks,
        num_nodes=config.nodes,
        device=rank_device(config, rank),
        file=file if config.nodes == 1 else "",
    )


def rank_device(config: TrainConfig, rank: int) -> str:
    """Return torch's name of the device of a rank, in the process of that rank.

    The first rank of a node is in the service's process, which has a view of all GPUs of the
    service; each other one has a view of its own GPU alone (`leader.py`).

    ConfigError for a certain GPU with several ranks.
    """
    if config.device != "cuda":
        if config.ranks > 1 and config.device != "cpu":
            raise ConfigError(
                f"train.device {config.device!r} is one device, and train.ranks is {config.ranks}; "
                "use cuda, with the GPU of each rank in train.devices, or cpu"
            )
        return config.device
    return f"cuda:{rank_gpus(config)[0] if rank % config.ranks == 0 else 0}"


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


def join(own: Seat, store: Store | None) -> dist.ProcessGroup | None:
    """Join the process group with this rank's own device; returns when all ranks have joined.

    Args:
        store: by which ranks of several nodes find each other.

    Returns the group of the first ranks of all nodes, over which calls are sent; None for one node.
    """
    global _store
    _store = store
    on_gpu = own.device.startswith("cuda")
    local = own.rank % own.ranks_per_node
    on_device = int(own.device.partition(":")[2] or 0) if on_gpu else local
    numbers = {"RANK": own.rank, "LOCAL_RANK": on_device, "WORLD_SIZE": own.num_ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})  # for DeepSpeed
    _own_variables.update(numbers)
    if own.num_nodes == 1:
        os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, LOOPBACK))
        _own_variables.update(INTERFACE_VARIABLES)
    if on_gpu:
        torch.cuda.set_device(own.device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{own.file}" if own.file else None,
        store=store,
        rank=own.rank,
        world_size=own.num_ranks,
        timeout=TIMEOUT,
    )
    if own.num_nodes == 1:
        return None
    firsts = list(range(0, own.num_ranks, own.ranks_per_node))
    group: dist.ProcessGroup | None = dist.new_group(firsts, backend="gloo", timeout=IDLE)
    return group


_store: Store | None = None
"""That of the newest group: torch does not keep the Python part of a store alive."""
_own_variables: set[str] = set()
"""Environment variables that `join` has set."""


def leave() -> None:
    """Leave the process group, also when other ranks are gone."""
    deepspeed = sys.modules.get("deepspeed.comm")
    if deepspeed and deepspeed.is_initialized():
        deepspeed.destroy_process_group()  # with its own groups
    if dist.is_initialized():
        dist.destroy_process_group()
    while _own_variables:
        os.environ.pop(_own_variables.pop(), None)  # not for other processes that this one starts


def abort() -> None:
    """End the collectives that wait for a rank that is gone.

    Gloo notices the closed connection by itself.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
