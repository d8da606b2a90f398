"""The flow runs whose processes run on this machine, and those whose process has ended.

A worker reports the end of its flow runs' processes to Prefect. A process whose worker was killed
goes on without it; when such a process is killed, too, Prefect would show its flow run as running
for ever, and nothing would replace it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from uuid import UUID

import psutil

from deployments.stack import processes
from deployments.stack.machine import start_of
from deployments.stack.processes import Process
from tasks.supervision.flow_processes import MARK

ORPHAN_GRACE_S = 1.0
"""Pause before the end of a process without a worker is reported: nobody else does."""
WORKER_GRACE_S = 30.0
"""The same for one with a worker, which usually has reported it by then."""
RETRY_S = 5.0
"""Pause before a report is repeated that failed."""
REPORTS_MAX = 50
"""Flow runs of one report."""


@dataclass(frozen=True)
class FlowProcess:
    """The process of a flow run. Example: `FlowProcess("5f…", 4711, "0d6f… 3107122", 4700)`."""

    flow_run_id: str
    pid: int
    start: str
    parent: int
    """Id of its parent at first, which is its worker."""


@dataclass
class FlowWatch:
    """Follows the processes of flow runs from one look to the next."""

    clock: Callable[[], float] = time.monotonic
    _alive: dict[int, FlowProcess] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)
    """Flow run → when the end of its process is reported."""

    def begin(self, mark: str) -> None:
        """Take up the flow runs whose processes run already, whatever became of their workers."""
        for process in processes.marked(mark):
            self._take_up(process)

    def look(self, workers: Iterable[Process]) -> None:
        """Take up the workers' new processes, and note which have ended."""
        alive = {worker.pid for worker in workers}
        for pid in alive:
            try:
                children = psutil.Process(pid).children()
            except psutil.Error:
                continue
            for child in children:
                self._take_up(child)
        now_s = self.clock()
        for process in [each for each in self._alive.values() if not _lives(each)]:
            del self._alive[process.pid]
            grace_s = WORKER_GRACE_S if process.parent in alive else ORPHAN_GRACE_S
            self._due[process.flow_run_id] = now_s + grace_s

    def due(self) -> list[str]:
        """Return the flow runs whose end is to be reported now, unless they have a new process."""
        for process in self._alive.values():
            self._due.pop(process.flow_run_id, None)
        now_s = self.clock()
        return [flow_run for flow_run, at_s in self._due.items() if at_s <= now_s][:REPORTS_MAX]

    def reported(self, flow_runs: Iterable[str], *, done: bool) -> None:
        """Forget these flow runs; if they are not `done`, report them again after a pause."""
        for flow_run in flow_runs:
            if done:
                self._due.pop(flow_run, None)
            else:
                self._due[flow_run] = self.clock() + RETRY_S

    def _take_up(self, process: psutil.Process) -> None:
        """Follow a process that was started for a flow run; its descendants are not followed."""
        if process.pid in self._alive:
            return
        flow_run = _flow_run_of(process)
        try:
            parent = process.ppid()
            if flow_run and flow_run != _flow_run_of(psutil.Process(parent)):
                start = start_of(process.pid)
                self._alive[process.pid] = FlowProcess(flow_run, process.pid, start, parent)
        except psutil.Error:
            return  # it has ended


def _flow_run_of(process: psutil.Process) -> str:
    """Return the id of the flow run in a process's environment; empty for one that cannot be read,
    and for what is no id.
    """
    try:
        return str(UUID(process.environ().get(MARK, "")))
    except (psutil.Error, OSError, ValueError):
        return ""


def _lives(process: FlowProcess) -> bool:
    try:
        return (
            start_of(process.pid) == process.start
            and psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False
