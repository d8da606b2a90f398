"""The processes of flow runs on this machine: how long they have been idle, by the CPU time they
use.

A silent member may be dead, or slow on a busy machine. Where its process runs beside the
supervisor, as in the local stack, its CPU time shows which. A process is recognised by the id of
its flow run, which Prefect puts into its environment, so that neither an id that was given again
nor another machine of the same name is mistaken for it.
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
"""Of the CPU time that the process could have had, used by one that works; one that waits for data
uses less.
"""


@dataclass(frozen=True)
class _Sample:
    at_s: float
    cpu_s: float
    active_at_s: float
    """When the process was last seen to work."""


def cpu_seconds(flow_run_id: str) -> float | None:
    """CPU time of the processes of a flow run on this machine and of their finished children, so
    that it does not fall when one of them ends; None when there are none, or nobody may look at
    them.
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
    """Send SIGTERM to the flow run's process on this machine, if there is one. Its descendants are
    its own to end.
    """
    processes = {process.pid: process for process in _processes(flow_run_id)}
    roots = [process for process in processes.values() if _parent(process) not in processes]
    for (
        process
    ) in roots:  # found before the first signal: the child of one that has ended has another parent
        with suppress(psutil.Error, OSError):
            process.terminate()


def _parent(process: psutil.Process) -> int:
    """The id of the process's parent; 0 when the process has ended."""
    try:
        return int(process.ppid())
    except (psutil.Error, OSError):
        return 0


def fair_share() -> float:
    """Share of a core that each of the processes which want to run now can have: 1 on an idle
    machine, 0.05 for 40 processes on two cores.
    """
    cores = os.cpu_count() or 1
    return min(1.0, cores / max(1.0, os.getloadavg()[0]))


class FlowProcesses:
    """Remembers the CPU time of flow runs' processes from one look to the next."""

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
        """Seconds since the flow run's process was last seen to work; None when it has no process
        here.

        The first look counts as work. Looks at shorter intervals than WINDOW_S measure nothing. A
        process works that used SHARE_MIN of its fair share since the look before, so that a machine
        with many busy processes makes nobody idle.
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
        """The next look at it is the first."""
        self._samples.pop(flow_run_id, None)


def _processes(flow_run_id: str) -> Iterator[psutil.Process]:
    """The living processes of the flow run on this machine that this user may look at."""
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(MARK) == flow_run_id
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                yield process
        except (psutil.Error, OSError):
            continue
