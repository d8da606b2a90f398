"""CPU seconds of the processes of a stack, by component.

    every second:  pid ─▶ (Unix seconds, total CPU seconds)
    at the end:    pid ─▶ component, by name or by ancestor

A process that ends between two samples is counted up to the last one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import psutil

from deployments.stack.processes import MARK

Series: TypeAlias = list[tuple[float, float]]
"""(Unix seconds, growing total), ascending; begins with (creation time, 0)."""

OTHER = "other"
YOUNG_S = 2.0
"""A younger process may still have its parent's environment, and is sampled again."""


@dataclass(frozen=True)
class Sampled:
    """One process: `Sampled(4711, parent=4700, series=[(1763690000, 0.0), (1763690001, 0.8)])`."""

    pid: int
    parent: int
    series: Series


@dataclass
class Meter:
    """Samples every process with the stack's mark in its environment, and those in `pids`."""

    mark: str
    pids: Sequence[int] = ()
    processes: dict[tuple[int, float], Sampled] = field(default_factory=dict)
    """By pid and creation time: the system reuses pids."""
    _foreign: set[tuple[int, float]] = field(default_factory=set)

    def sample(self, now_s: float) -> None:
        for process in psutil.process_iter():
            try:
                key = (process.pid, process.create_time())
                if key in self._foreign:
                    continue
                if key not in self.processes and not self._is_ours(process):
                    if now_s - key[1] > YOUNG_S:
                        self._foreign.add(key)
                    continue
                cpu = process.cpu_times()
                first = Sampled(process.pid, process.ppid(), [(key[1], 0.0)])
                sampled = self.processes.setdefault(key, first)
                sampled.series.append((now_s, cpu.user + cpu.system))
            except (psutil.Error, OSError):
                continue  # ended meanwhile, or another user's process

    def _is_ours(self, process: psutil.Process) -> bool:
        return process.pid in self.pids or process.environ().get(MARK) == self.mark


def between(series: Series, start_s: float, end_s: float) -> float:
    """Return the growth of a total between two times, linear between two samples.

    Example: `between([(0, 0), (2, 4)], 1, 9)` is 2.0: half of the growth was after second 1, none
    after second 2.
    """
    return max(0.0, _at(series, end_s) - _at(series, start_s))


def components(processes: Iterable[Sampled], names: Mapping[int, str]) -> dict[int, str]:
    """Return pid → component: its entry in `names`, that of its nearest ancestor, or `OTHER`."""
    parents = {process.pid: process.parent for process in processes}
    by_pid: dict[int, str] = {}
    for pid in parents:
        at, above = pid, {pid}
        while at not in names and parents.get(at, at) not in above:
            at = parents[at]
            above.add(at)
        by_pid[pid] = names.get(at, OTHER)
    return by_pid


def spent(
    processes: Iterable[Sampled], names: Mapping[int, str], start_s: float, end_s: float
) -> dict[str, float]:
    """Return component → CPU seconds of all its processes between two times."""
    processes = list(processes)
    by_pid = components(processes, names)
    totals: dict[str, float] = {}
    for process in processes:
        component = by_pid[process.pid]
        growth = between(process.series, start_s, end_s)
        totals[component] = totals.get(component, 0.0) + growth
    return totals


def shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Return each total as a share of their sum; all 0 when the sum is 0."""
    whole = sum(totals.values())
    return {name: total / whole if whole else 0.0 for name, total in totals.items()}


def _at(series: Series, time_s: float) -> float:
    """Return the total at a time: 0 before the first sample, the last total after the last."""
    before: tuple[float, float] | None = None
    for at_s, total in series:
        if at_s > time_s:
            if before is None:
                return 0.0
            share = (time_s - before[0]) / (at_s - before[0])
            return before[1] + share * (total - before[1])
        before = (at_s, total)
    return before[1] if before else 0.0
