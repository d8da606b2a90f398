"""The watchdog's loop: it looks at the recorded processes, and has those that ended started again.

    every second:  record ──▶ ended processes ──▶ repair ──▶ record
                   workers ─▶ ended flow runs ──▶ repair ──▶ Prefect

The loop starts nothing itself: `repair` runs in a process of its own, under the lock of `up` and
`down`, so the restarted processes are no descendants of the watchdog and do not end with it. A
process is identified by its id and start, never by its port.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from deployments.paths import PROJECT, Home
from deployments.stack import state
from deployments.stack.processes import Process, is_alive
from deployments.stack.state import MLFLOW, SERVER, WATCHDOG, Stack
from deployments.watchdog import restarts
from deployments.watchdog.flow_watch import FlowWatch
from deployments.watchdog.restarts import RestartPolicy
from storage.errors import ConfigError

LOOK_S = 1.0
LOCK_TIMEOUT_S = 30.0
"""A former watchdog ends within this time, once another one is recorded."""
REPAIR = "deployments.watchdog.repair"
"""The module that repairs; importing it here would double the watchdog's memory."""

Repair = Callable[[Sequence[str]], int]
"""Runs `repair` with arguments; returns its exit status."""


def watch(home: Home) -> int:
    """Watch the stack until it is taken down; return the exit status.

    One watchdog of a home runs at a time: the lock is released when its process ends.
    """
    lock = FileLock(home.watchdog_lock, mode=0o600)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        _say(f"another watchdog has the lock {home.watchdog_lock}")
        return 1
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: over.set())
    _say(f"watching the stack in {home.root}")
    watchdog = Watchdog(home)
    while not over.is_set():
        try:
            if not watchdog.look():
                _say("ends: another stack, or none, is recorded")
                return 0
        except OSError as error:  # such as no memory for a process: it may be free later
            _say(f"could not look at the stack: {error}")
        over.wait(LOOK_S)
    return 0


def _run_repair(arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", REPAIR, *arguments]
    sys.stdout.flush()
    return subprocess.run(command, cwd=PROJECT, check=False, stdin=subprocess.DEVNULL).returncode


class Watchdog:
    """What a watchdog remembers from one look to the next."""

    def __init__(
        self,
        home: Home,
        run_repair: Repair = _run_repair,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._home, self._repair = home, run_repair
        self._clock, self._wall_clock = clock, wall_clock
        self._policy = RestartPolicy()
        self._flows = FlowWatch()
        self._flows.begin(str(home.root))
        self._record()

    def look(self) -> bool:
        """Look at the stack once, and repair what has ended; False when this is not its watchdog.

        While `up` or `down` change the stack, it is not ready, and nothing is done.
        """
        stack = state.load(self._home)
        if stack is None:
            return state.exists(self._home)  # a damaged record: `up` replaces it
        own = stack.process(WATCHDOG)
        if own is not None and own.pid != os.getpid():
            return False
        if not stack.ready or own is None:
            return True
        if names := self._to_start(stack):
            self._repair(["--start", *names])
            self._note_results(names)
        self._flows.look(process for process in stack.processes if _is_worker(process))
        if flow_runs := self._flows.due():
            done = self._repair(["--ended", *flow_runs]) == 0
            self._flows.reported(flow_runs, done=done)
        return True

    def _to_start(self, stack: Stack) -> list[str]:
        """Return the processes that have ended and may be started now; count and log new ends."""
        now_s = self._clock()
        ended = [process for process in stack.processes if not is_alive(process)]
        for process in ended:
            lived_s = self._wall_clock() - process.created_s
            pause_s = self._policy.note_end(process.name, process.pid, lived_s, now_s)
            if pause_s is None:
                continue
            self._record()
            in_a_row = self._policy.counts[process.name].in_a_row
            repeated = f", {in_a_row} times in a row soon after its start" if in_a_row > 1 else ""
            log = f"; see {Path(process.log).name}" if in_a_row > 1 else ""
            when = f"in {pause_s:.0f} s" if pause_s else "now"
            _say(
                f"{process.name} (process {process.pid}) has ended{repeated}; starting it "
                f"{when}{log}"
            )
        return [each.name for each in ended if self._policy.is_due(each.name, now_s)]

    def _record(self) -> None:
        """Write the record for `astraflow doctor`; without it, processes are started all the
        same.
        """
        try:
            restarts.save(self._home, self._policy.counts)
        except (OSError, ConfigError) as error:
            _say(f"{self._home.watchdog} is not written: {error}")

    def _note_results(self, names: Sequence[str]) -> None:
        """Postpone the next try of those that were not started."""
        stack = state.load(self._home)
        for name in names:
            if stack is None or stack.process(name) is None:
                self._policy.postpone(name, self._clock())


def _is_worker(process: Process) -> bool:
    return process.name not in (SERVER, MLFLOW, WATCHDOG) and is_alive(process)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # the disk of the log is full
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", flush=True)
