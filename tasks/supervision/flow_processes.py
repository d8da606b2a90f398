"""Idle time of flow runs' processes on this machine, by the CPU time that they use.

A silent member may be dead, or slow on a busy machine. If its process runs beside the supervisor,
as in the local stack, its CPU time shows which. A process is identified by the id of its flow run,
which Prefect puts into its environment; a process id may be reused, and machines may share a name.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

MARK = "PREFECT__FLOW_RUN_ID"
"""Environment variable that Prefect gives the process of a flow run, and that its descendants
inherit.
"""
WINDOW_S = 5.0
"""Least time over which CPU time is measured."""
SHARE_MIN = 0.03
"""A process that uses this share of the CPU time that it could have had works; one that waits for
data uses less.
"""


@dataclass(frozen=True)
class _Sample:
    at_s: float
    cpu_s: float
    active_at_s: float
    """When the process last worked."""


def cpu_seconds(flow_run_id: str) -> float | None:
    """Measure the CPU time of a flow run's processes on this machine; None when there are none, or
    none that may be inspected. Finished children count, so that it does not fall when one ends.
    """
    total, is_here = 0.0, False
    for process in _processes(flow_run_id):
        try:
            times = process.cpu_times()
        except (psutil.Error, OSError):
            continue
        is_here = True
        total += times.user + times.system
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total if is_here else None


def terminate(flow_run_id: str) -> None:
    """Send SIGTERM to the flow run's process on this machine, if there is one. It ends its
    descendants itself.
    """
    processes = {process.pid: process for process in _processes(flow_run_id)}
    # Listed before the first signal: the children of an ended process get another parent.
    roots = [process for process in processes.values() if _parent(process) not in processes]
    for process in roots:
        with suppress(psutil.Error, OSError):
            process.terminate()


def _parent(process: psutil.Process) -> int:
    """Return the id of the process's parent; 0 when the process has ended."""
    try:
        return int(process.ppid())
    except (psutil.Error, OSError):
        return 0


def fair_share() -> float:
    """Estimate the share of a core that each running process gets: 1 on an idle machine, 0.05 for
    40 processes on two cores.
    """
    cores = os.cpu_count() or 1  # of the machine, as the load is
    return min(1.0, cores / max(1.0, os.getloadavg()[0]))


class FlowProcesses:
    """Measures the idle time of flow runs' processes from one poll to the next."""

    def __init__(
        self,
        cpu_s: Callable[[str], float | None] = cpu_seconds,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[], float] = fair_share,
        terminate: Callable[[str], None] = terminate,
    ) -> None:
        self._cpu_s, self._clock, self._share = cpu_s, clock, share
        self.terminate = terminate
        self._samples: dict[str, _Sample] = {}

    def idle_s(self, flow_run_id: str) -> float | None:
        """Seconds since the flow run's process last worked; None when it has no process here.

        The first poll counts as work. Polls at shorter intervals than WINDOW_S measure nothing. A
        process works if it used SHARE_MIN of its fair share since the poll before, so that many
        busy processes on a machine do not make one idle.
        """
        now_s = self._clock()
        last = self._samples.get(flow_run_id)
        if last is not None and now_s - last.at_s < WINDOW_S:
            return now_s - last.active_at_s
        cpu_s = self._cpu_s(flow_run_id)
        if cpu_s is None:
            self.forget(flow_run_id)
            return None
        active = last is None or cpu_s - last.cpu_s >= SHARE_MIN * self._share() * (
            now_s - last.at_s
        )
        active_at_s = now_s if last is None or active else last.active_at_s
        self._samples[flow_run_id] = _Sample(now_s, cpu_s, active_at_s)
        return now_s - active_at_s

    def forget(self, flow_run_id: str) -> None:
        """Delete the measurement: the next poll of the flow run is the first."""
        self._samples.pop(flow_run_id, None)


def _processes(flow_run_id: str) -> Iterator[psutil.Process]:
    """Yield the living processes of the flow run that this user may inspect."""
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(MARK) == flow_run_id
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                yield process
        except (psutil.Error, OSError):
            continue
