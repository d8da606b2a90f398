"""CPU seconds of the processes of a stack, told apart by what each of them is to the stack. Starts
and stops nothing.

    every second:  pid ─▶ (seconds since 1970, CPU seconds so far)      at the end:  pid ─▶ component, by name or by ancestor

A process that ends between two looks is counted as far as it was last seen.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import psutil

from deployments.stack.processes import MARK

Series: TypeAlias = list[tuple[float, float]]
"""(Unix seconds, a total that only grows), ascending; begins with (time of birth, 0)."""

OTHER = "other"
YOUNG_S = 2.0
"""A process this young may still carry its parent's environment, and is looked at again."""


@dataclass(frozen=True)
class Seen:
    """One process. Example:
    `Seen(pid=4711, parent=4700, series=[(1763690000.0, 0.0), (1763690001.0, 0.8)])`.
    """

    pid: int
    parent: int
    series: Series


@dataclass
class Meter:
    """Watches every process that carries the stack's mark, and those that `pids` names besides."""

    mark: str
    pids: Sequence[int] = ()
    seen: dict[tuple[int, float], Seen] = field(default_factory=dict)
    """By pid and time of creation: the system gives ids to new processes again."""
    _strangers: set[tuple[int, float]] = field(default_factory=set)

    def look(self, now_s: float) -> None:
        for process in psutil.process_iter():
            try:
                key = (process.pid, process.create_time())
                if key in self._strangers:
                    continue
                if key not in self.seen and not self._is_ours(process):
                    if now_s - key[1] > YOUNG_S:
                        self._strangers.add(key)
                    continue
                cpu = process.cpu_times()
                one = self.seen.setdefault(key, Seen(process.pid, process.ppid(), [(key[1], 0.0)]))
                one.series.append((now_s, cpu.user + cpu.system))
            except (psutil.Error, OSError):
                continue  # gone meanwhile, or another user's: not ours

    def _is_ours(self, process: psutil.Process) -> bool:
        return process.pid in self.pids or process.environ().get(MARK) == self.mark


def between(series: Series, start_s: float, end_s: float) -> float:
    """How much a growing total grew between two times. What lies between two looks is taken to grow
    evenly.

    Example: `between([(0, 0), (2, 4)], 1, 9)` is 2.0: half of the growth came after second 1,
    nothing after second 2.
    """
    return max(0.0, _at(series, end_s) - _at(series, start_s))


def components(seen: Iterable[Seen], names: Mapping[int, str]) -> dict[int, str]:
    """pid → component. `names` names some pids; each other process belongs to its nearest named
    ancestor, else to `OTHER`.
    """
    parents = {one.pid: one.parent for one in seen}
    found: dict[int, str] = {}
    for pid in parents:
        at, above = pid, {pid}
        while at not in names and parents.get(at, at) not in above:
            at = parents[at]
            above.add(at)
        found[pid] = names.get(at, OTHER)
    return found


def spent(
    seen: Iterable[Seen], names: Mapping[int, str], start_s: float, end_s: float
) -> dict[str, float]:
    """component → CPU seconds of all its processes between two times."""
    seen = list(seen)
    of = components(seen, names)
    totals: dict[str, float] = {}
    for one in seen:
        totals[of[one.pid]] = totals.get(of[one.pid], 0.0) + between(one.series, start_s, end_s)
    return totals


def shares(totals: Mapping[str, float]) -> dict[str, float]:
    """Each as a fraction of their sum; all 0 when the sum is 0."""
    whole = sum(totals.values())
    return {name: total / whole if whole else 0.0 for name, total in totals.items()}


def _at(series: Series, time_s: float) -> float:
    """The total at a time; 0 before the first look, the last one known after the last."""
    before: tuple[float, float] | None = None
    for at_s, total in series:
        if at_s > time_s:
            if before is None:
                return 0.0
            share = (time_s - before[0]) / (at_s - before[0])
            return before[1] + share * (total - before[1])
        before = (at_s, total)
    return before[1] if before else 0.0
