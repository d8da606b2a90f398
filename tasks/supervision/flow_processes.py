"""The processes of flow runs on this machine: whether they work, by the CPU time they use.

A silent member may be dead, or slow on a busy machine. Where its process runs beside the supervisor, as in the local stack, its
CPU time tells which. A process is recognised by the id of its flow run, which Prefect puts into its environment, so that
neither an id that was given again nor another machine of the same name is mistaken for it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

MARK = "PREFECT__FLOW_RUN_ID"
"""Environment variable that Prefect gives the process of a flow run, and that its descendants inherit."""
WINDOW_S = 5.0
"""Least time over which CPU time is measured."""
SHARE_MIN = 0.03
"""Of a core, that a process uses which works: one that waits for data uses less, one that works beside eight others more."""


@dataclass(frozen=True)
class _Sample:
    at_s: float
    cpu_s: float


def cpu_seconds(flow_run_id: str) -> float | None:
    """CPU time of the processes of a flow run on this machine and of their finished children, so that it does not fall when one
    of them ends; None when there are none, or nobody may look at them."""
    total, found = 0.0, False
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) != flow_run_id or process.status() == psutil.STATUS_ZOMBIE:
                continue
            times = process.cpu_times()
        except (psutil.Error, OSError):
            continue
        found = True
        total += times.user + times.system
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total if found else None


class FlowProcesses:
    """Remembers the CPU time of flow runs' processes from one look to the next."""

    def __init__(
        self,
        cpu_s: Callable[[str], float | None] = cpu_seconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu_s, self._clock = cpu_s, clock
        self._samples: dict[str, _Sample] = {}
        self._works: dict[str, bool] = {}

    def works(self, flow_run_id: str) -> bool:
        """Whether its process used CPU time between the last look and this one. A process that is seen for the first time
        works; looks at shorter intervals than WINDOW_S repeat the last answer."""
        now = _Sample(self._clock(), 0.0)
        last = self._samples.get(flow_run_id)
        if last is not None and now.at_s - last.at_s < WINDOW_S:
            return self._works[flow_run_id]
        cpu_s = self._cpu_s(flow_run_id)
        if cpu_s is None:
            self.forget(flow_run_id)
            return False
        self._samples[flow_run_id] = _Sample(now.at_s, cpu_s)
        self._works[flow_run_id] = last is None or cpu_s - last.cpu_s >= SHARE_MIN * (now.at_s - last.at_s)
        return self._works[flow_run_id]

    def forget(self, flow_run_id: str) -> None:
        """The next look at it is the first."""
        self._samples.pop(flow_run_id, None)
        self._works.pop(flow_run_id, None)
