"""What a machine has in use: a small measurement in the heartbeat of each service.

Example: `MachineUse(cpu_percent=37.5, memory_bytes=8e9, memory_total_bytes=64e9)`.
"""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from storage.records.numbers import Quantity

GPUS_MAX = 64
"""GPUs of one machine; of more, the first ones are measured."""
Percent: TypeAlias = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """One GPU, with all processes that use it."""

    memory_bytes: Quantity
    memory_total_bytes: Quantity
    utilization_percent: Percent | None = None
    """Share of the time in which it computed; None where its driver does not say."""


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """A machine, with all processes on it. In a container: the machine that it is on."""

    cpu_percent: Percent
    """Of all cores, since the measurement before."""
    memory_bytes: Quantity
    memory_total_bytes: Quantity
    gpus: Annotated[tuple[GpuUse, ...], Field(max_length=GPUS_MAX)] = ()
    """In the order in which the machine numbers them."""
