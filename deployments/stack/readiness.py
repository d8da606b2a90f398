"""Wait until the stack's parts are ready.

Limits count progress, not time, so that a slow machine causes no error. An error is raised for a
part that has ended, makes no progress, or has used far more CPU time than a start takes; it
contains the end of the log.
"""

import http.client
import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from deployments.registration.client import connected
from deployments.stack import processes
from deployments.stack.processes import Process, is_alive, last_lines
from storage.errors import ConfigError
from tasks.services.prefect_settings import COMMAND, client_of
from tasks.supervision.flow_processes import fair_share

POLL_S = 0.1
RESPONSE_TIMEOUT_S = 10.0
STALL_LIMIT_S = 90.0
"""A part without progress for this time has failed to start."""
CPU_LIMIT_S = 300.0
"""CPU time after which a part has failed to start; a start takes 5 to 20 s."""
CPU_STEP_S = 3.0
"""CPU time that counts as progress: within STALL_LIMIT_S it is 3 % of a core, more than an idle
process uses. On a loaded machine it is scaled by each process's share of a core."""
MEASURE_INTERVAL_S = 1.0
"""Pause between two measurements of a process."""
SAY_INTERVAL_S = 15.0
"""Pause between two messages about a part that is not ready."""

Say = Callable[[str], None]


def _say_nothing(message: str) -> None:
    pass


class Progress:
    """The progress of a process, measured by the CPU time of it and its descendants.

    A growing log is no progress: a process that repeats a failure writes one, too.
    """

    def __init__(
        self,
        process: Process | None,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[], float] = fair_share,
    ) -> None:
        self._process, self._clock, self._share = process, clock, share
        self._last_s = self._total_s()
        self._progress_at = clock()
        self.cpu_s = 0.0
        """CPU time used since this object was created, in steps of progress."""

    def measure(self) -> None:
        """Measure the process once more."""
        total_s = self._total_s()
        # a smaller total is progress, too: a descendant has ended
        if abs(total_s - self._last_s) >= CPU_STEP_S * self._share():
            self.cpu_s += max(0.0, total_s - self._last_s)
            self._last_s, self._progress_at = total_s, self._clock()

    @property
    def stalled_s(self) -> float:
        """Time since the last progress."""
        return self._clock() - self._progress_at

    def _total_s(self) -> float:
        return 0.0 if self._process is None else processes.cpu_s(self._process)


def wait_until(
    ready: Callable[[], bool],
    what: str,
    process: Process | None = None,
    say: Say = _say_nothing,
    stall_limit_s: float = STALL_LIMIT_S,
    cpu_limit_s: float = CPU_LIMIT_S,
) -> None:
    """Wait until `ready()`; print a message about `what` every SAY_INTERVAL_S.

    Raises ConfigError when `process` ended, made no progress for `stall_limit_s`, or used
    `cpu_limit_s` of CPU time.
    """
    began = said_at = measured_at = time.monotonic()
    progress = Progress(process)
    while not ready():
        if process is not None and not is_alive(process):
            raise ConfigError(f"{what} ended before it was ready; {_log(process)}")
        now = time.monotonic()
        if now - measured_at >= MEASURE_INTERVAL_S:
            measured_at = now
            progress.measure()
        if progress.stalled_s > stall_limit_s:
            raise ConfigError(
                f"{what} is not ready after {now - began:.0f} s, and made no progress for the last "
                f"{progress.stalled_s:.0f} s; {_log(process)}"
            )
        if progress.cpu_s > cpu_limit_s:
            raise ConfigError(
                f"{what} is not ready after {progress.cpu_s:.0f} s of CPU time; {_log(process)}"
            )
        if now - said_at >= SAY_INTERVAL_S:
            said_at = now
            idle = progress.stalled_s >= SAY_INTERVAL_S
            say(
                f"{what} is not ready yet ({now - began:.0f} s, "
                f"{'idle' if idle else 'using CPU time'})"
            )
        time.sleep(POLL_S)


def responds(url: str) -> bool:
    """Return whether a GET of this loopback address succeeds, without a proxy."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=RESPONSE_TIMEOUT_S
    )
    try:
        connection.request("GET", address.path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def prefect_trouble(api_url: str) -> str | None:
    """Return why a Prefect server does not respond; None when it does."""
    with client_of(api_url, COMMAND) as client:
        trouble = client.api_healthcheck()
        return None if trouble is None else f"{type(trouble).__name__}: {trouble}"


def worker_beats(api_url: str, pools: Iterable[str]) -> Mapping[tuple[str, str], str]:
    """Return (pool, worker) → time of its last heartbeat, of every worker in the state ONLINE."""
    beats: dict[tuple[str, str], str] = {}
    with connected(api_url) as client:
        for pool in pools:
            for worker in client.read_workers_for_work_pool(pool):
                if worker.status is not None and worker.status.value == "ONLINE":
                    beats[pool, worker.name] = str(worker.last_heartbeat_time)
    return beats


def _log(process: Process | None) -> str:
    if process is None:
        return "there is no log of it on this machine"
    return f"the end of its log {process.log}:\n{last_lines(process.log)}"
