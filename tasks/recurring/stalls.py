"""Limits of a night's steps, which count progress and not time.

    step, in a thread ──▶ result
      CPU time of this process and its descendants ─┐
      episodes that were played ────────────────────┴─▶ none for IDLE_LIMIT_S: the step has failed

A slow machine makes a step slow. A step whose process uses CPU time has a limit of that.
"""

import asyncio
import contextvars
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import psutil

from rollout.service.user_threads import UserThreads
from storage.errors import AstraFlowError
from storage.machine.cpus import num_cpus
from tasks.supervision.flow_processes import FlowProcesses

T = TypeVar("T")

IDLE_LIMIT_S = 3600.0
"""A step whose processes use no CPU time for this time, and that does nothing else, has failed."""
CPU_LIMIT_S = 36_000.0
"""CPU time, for each core of this process, that a step may use without any other progress."""
LOOK_S = 15.0
"""Pause between two measurements, each of which reads all processes of this machine."""
_OWN = "own"


def own_cpu_s(_: str = _OWN) -> float:
    """Return the CPU time of this process, its descendants, and those that have ended."""
    total, own = 0.0, psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except (psutil.Error, OSError):  # it has ended
            continue
        total += times.user + times.system
        total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


@dataclass
class StepWatch:
    """What is known of the progress of one step."""

    what: str
    """The step, for people: `the contest of tiny-20260102-0200`."""
    cpu_s: Callable[[str], float] = own_cpu_s
    clock: Callable[[], float] = time.monotonic
    _parts: int = 0
    _parts_seen: int = 0

    def __post_init__(self) -> None:
        self._processes = FlowProcesses(cpu_s=self.cpu_s, clock=self.clock)
        self._progress_at, self._cpu_at_progress_s = self.clock(), self.cpu_s(_OWN)

    def note_part(self, _: object = None) -> None:
        """Note that a part of the step's work was done. May be called from any thread."""
        self._parts += 1

    def look(self) -> None:
        """Measure; raise AstraFlowError for a step that makes no progress."""
        cpu_s = self.cpu_s(_OWN)
        if self._parts != self._parts_seen:
            self._parts_seen = self._parts
            self._progress_at, self._cpu_at_progress_s = self.clock(), cpu_s
        quiet_s = self.clock() - self._progress_at
        idle_s = min(quiet_s, self._processes.idle_s(_OWN) or 0.0)
        if idle_s > IDLE_LIMIT_S:
            raise AstraFlowError(
                f"{self.what} made no progress for {idle_s / 60:.0f} minutes: nothing of it was "
                "done, and its processes used no CPU time; correct the cause, then start the night "
                "again"
            )
        used_s = cpu_s - self._cpu_at_progress_s
        if used_s > CPU_LIMIT_S * num_cpus():
            raise AstraFlowError(
                f"{self.what} made no progress with {used_s / 3600:.0f} hours of CPU time; correct "
                "the cause, then start the night again"
            )


async def run_step(act: Callable[[], T], watch: StepWatch, look_s: float = LOOK_S) -> T:
    """Call `act` in a thread and return its result.

    Raises what it raises, and AstraFlowError where it makes no progress. Its thread then goes on,
    but neither the flow nor the end of the process waits for it.
    """
    call = partial(contextvars.copy_context().run, act)
    threads = UserThreads(1)
    running = asyncio.get_running_loop().run_in_executor(threads, call)
    try:
        while not (await asyncio.wait({running}, timeout=look_s))[0]:
            watch.look()
        return running.result()
    finally:
        threads.shutdown()
