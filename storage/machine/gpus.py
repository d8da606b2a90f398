"""The GPUs of this machine as CUDA numbers them in a process: 0, 1, … among those it may use.

CUDA_VISIBLE_DEVICES lists what a process may use, by number on the machine or by UUID; without the
variable it may use all. Nothing here starts CUDA.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from storage.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
QUERY_TIMEOUT_S = 10.0
_MIB = 2**20


@dataclass(frozen=True)
class GpuReading:
    """What all processes use of one GPU. Example: `GpuReading(8.0e9, 8.5e10, 97.0)`."""

    memory_bytes: float
    memory_total_bytes: float
    utilization_percent: float | None
    """None where the driver does not say, as of a GPU in parts (MIG)."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine. Example: `Gpu("GPU-5f1a…", 85_899_345_920, 84_000_000_000)`."""

    uuid: str
    memory_bytes: int
    free_bytes: int


def installed() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists; none where it is missing or fails."""
    with suppress(ValueError):
        return tuple(
            Gpu(uuid.strip(), int(total) * _MIB, int(free) * _MIB)
            for uuid, total, free in _queried("uuid,memory.total,memory.free")
        )
    return ()


def in_use() -> tuple[GpuReading, ...]:
    """Return what is used of the machine's GPUs; none where nvidia-smi is missing or fails."""
    with suppress(ValueError):
        return tuple(
            GpuReading(int(used) * _MIB, int(total) * _MIB, _percent(utilization))
            for used, total, utilization in _queried("memory.used,memory.total,utilization.gpu")
        )
    return ()


def _percent(text: str) -> float | None:
    return float(text) if text.strip().isdecimal() else None


def _queried(fields: str) -> list[list[str]]:
    """Return the fields of each GPU, from nvidia-smi; none where it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        listed = subprocess.run(
            query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        )
        return [line.split(",") for line in listed.stdout.splitlines() if line.strip()]
    return []


def names(gpus: Sequence[int], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the name of each GPU for the CUDA_VISIBLE_DEVICES of a child process.

    Example: `names([1], {"CUDA_VISIBLE_DEVICES": "4,6"})` is `("6",)`.

    Raises:
        ConfigError: the variable lists fewer GPUs.
    """
    listed = environment.get(VARIABLE)
    if listed is None:
        return tuple(map(str, gpus))
    usable: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        if not name or name.startswith("-"):
            break  # CUDA uses none from here on
        usable.append(name)
    for gpu in gpus:
        if gpu >= len(usable):
            raise ConfigError(
                f"GPU {gpu} cannot be used: {VARIABLE} is {listed!r}, which has {len(usable)} "
                f"GPUs, counted from 0; change devices in the recipe, or the variable where the "
                "worker of the pool is started"
            )
    return tuple(usable[gpu] for gpu in gpus)


def identities(names: Sequence[str], installed: Sequence[Gpu]) -> tuple[str, ...]:
    """Return a word for each named GPU that is the same in all processes of the machine.

    It is the UUID, where that is known. Example: `("0",)` → `("GPU-5f1a…",)`.
    """
    return tuple(re.sub(r"[^\w-]", "_", _uuid(name, installed)) for name in names)


def free_share(names: Sequence[str], installed: Sequence[Gpu]) -> float:
    """Return the free share of the fullest of these GPUs; 1 where that is unknown."""
    wanted = {_uuid(name, installed) for name in names}
    shares = [
        gpu.free_bytes / gpu.memory_bytes
        for gpu in installed
        if gpu.uuid in wanted and gpu.memory_bytes
    ]
    return min(shares, default=1.0)


def _uuid(name: str, installed: Sequence[Gpu]) -> str:
    if name.isdecimal():
        number = int(name)
        return installed[number].uuid if number < len(installed) else name
    matches = [gpu.uuid for gpu in installed if gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else name
