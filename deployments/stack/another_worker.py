"""A worker in the foreground: of another Prefect server, or one more of the local stack."""

import os
import re
import sys
from typing import Final

from deployments.paths import PROJECT, Home
from deployments.registration import pools, work_pools
from deployments.stack import commands, cpu_features, environment, processes, up_down
from deployments.stack.startup import Say
from storage import plain_names
from storage.errors import ConfigError
from storage.machine import gpu_locks

_GPU: Final = re.compile(r"\d{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,100}")
"""A GPU in CUDA_VISIBLE_DEVICES: its number, or its UUID."""


def serve(home: Home, pool: str, region: str, gpus: str, limit: int | None, say: Say) -> None:
    """Replace this process by the worker of a pool.

    Raises:
        ConfigError: an argument is wrong, or the server has no such pool of processes.
        GpuBusyError: another worker of the pool on this machine has one of the GPUs.
    """
    names = check_arguments(pool, region, gpus)
    environment.refuse_bad_addresses()
    api_url = up_down.adopt_server(home)
    kind = work_pools.types(api_url, [pool]).get(pool)
    if kind != "process":
        raise ConfigError(
            f"the work pool {pool} of {api_url} is of type {kind}, whose jobs are started by a "
            f"worker of that type: `prefect worker start --pool {pool}`"
            if kind
            else f"the Prefect server at {api_url} has no work pool {pool}; register AstraFlow "
            "there: `astraflow deploy --help`"
        )
    home.create()
    gpu_locks.reserve_gpus(f"worker-{pool}", names)
    variables = environment.of_worker(home, names, cpu_features.isa_ceiling(home.bf16))
    command = commands.worker(pool, region, names, 1 if limit is None and names else limit)
    say(f"{command[command.index('--name') + 1]} serves {api_url}; Ctrl-C ends it")
    sys.stdout.flush()
    os.chdir(PROJECT)  # another user may have put a module into the working directory
    with processes.interruptible():
        os.execve(command[0], command, variables)


def check_arguments(pool: str, region: str, gpus: str) -> list[str]:
    """Return the names of the GPUs. Raises ConfigError that names the wrong argument."""
    if pool not in pools.NAMES:
        raise ConfigError(f"--pool {pool}: use {', '.join(pools.NAMES)}")
    if region and pool != pools.ROLLOUT:
        raise ConfigError(f"--region {region}: only the pool {pools.ROLLOUT} has regions")
    if region and not plain_names.NAME.fullmatch(region):
        raise ConfigError(f"--region {plain_names.quoted(region)} cannot be the name of a region")
    names = [part.strip() for part in gpus.split(",")] if gpus else []
    for name in names:
        if not _GPU.fullmatch(name):
            raise ConfigError(f"--gpus {plain_names.quoted(gpus)}: write numbers such as 0,1")
    if len(set(names)) < len(names):
        raise ConfigError(f"--gpus {gpus}: names a GPU twice")
    return names
