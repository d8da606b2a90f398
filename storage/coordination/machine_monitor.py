"""Measurement of the machine of a service, for its heartbeat: a thread that measures every seconds.

psutil, nvidia-smi ──every interval_s──▶ MachineMonitor.last ──▶ HeartbeatWriter

Heartbeats never wait for a measurement: nvidia-smi may need seconds.
"""

import contextvars
import logging
import threading
from types import TracebackType

import psutil

from storage.machine import gpus
from storage.records.machine_use import GPUS_MAX, GpuUse, MachineUse
from storage.records.numbers import QUANTITY_MAX

log = logging.getLogger(__name__)

INTERVAL_S = 10.0
CLOSE_TIMEOUT_S = 1.0
"""How long the end of the block waits for the thread, which may wait for nvidia-smi."""


class MachineMonitor:
    """Measures the machine within its `with` block. A machine that cannot be measured is logged
    once, and stops nothing.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._last: MachineUse | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._serve,),
            name="machine-monitor",
            daemon=True,
        )

    def last(self) -> MachineUse | None:
        """Return the last measurement; None before the first one, and where there is none."""
        return self._last

    def __enter__(self) -> "MachineMonitor":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        try:
            psutil.cpu_percent()  # the next call has the share since this one
            while not self._closed.wait(self._interval_s):
                self._last = measured()
        except (psutil.Error, OSError, RuntimeError, ValueError) as error:
            log.warning("this machine is not measured: %s", error)
            self._last = None


def measured() -> MachineUse:
    """Measure the machine; its CPUs since the last call in this thread.

    Raises what psutil raises on a system that it cannot read.
    """
    memory = psutil.virtual_memory()
    return MachineUse(
        cpu_percent=_percent(psutil.cpu_percent()),
        memory_bytes=_quantity(memory.total - memory.available),
        memory_total_bytes=_quantity(memory.total),
        gpus=tuple(
            GpuUse(
                memory_bytes=_quantity(use.memory_bytes),
                memory_total_bytes=_quantity(use.memory_total_bytes),
                utilization_percent=None
                if use.utilization_percent is None
                else _percent(use.utilization_percent),
            )
            for use in gpus.in_use()[:GPUS_MAX]
        ),
    )


def _percent(value: float) -> float:
    """Return the number within the bounds of a heartbeat."""
    return min(max(float(value), 0.0), 100.0)


def _quantity(value: float) -> float:
    return min(max(float(value), 0.0), float(QUANTITY_MAX))
