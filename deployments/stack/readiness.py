"""Waiting for the stack's parts: a part that still works is waited for, however slow the machine
is. An error is one that has died, one that makes no progress, and one that has worked far more than
a start takes; it names the end of the log.
"""

import http.client
import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from deployments.registration.client import connected
from deployments.stack import processes
from deployments.stack.processes import Process, is_alive, last_lines
from storage.errors import ConfigError
from tasks.services.prefect_settings import settings_for
from tasks.supervision.flow_processes import fair_share

POLL_S = 0.1
ANSWER_TIMEOUT_S = 10.0
STALL_LIMIT_S = 90.0
"""A part that made no progress for so long has failed to start."""
CPU_LIMIT_S = 300.0
"""A part that has used so much CPU time without becoming ready never will: a start takes 5 to 20 s
of it.
"""
CPU_STEP_S = 3.0
"""So much more CPU time is progress: within STALL_LIMIT_S it is 3 % of a core, more than a process
uses that only waits. On a loaded machine it is that part of the share of a core which each process
can have.
"""
LOOK_INTERVAL_S = 1.0
"""Between two measurements of a process."""
TELL_INTERVAL_S = 15.0
"""Between two messages about a part that is waited for."""

Say = Callable[[str], None]


def _say_nothing(words: str) -> None:
    pass


class Progress:
    """Tells whether a process works, by the CPU time of it and of its descendants. Its log proves
    nothing: who fails again and again fills one, too.
    """

    def __init__(
        self,
        process: Process | None,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[], float] = fair_share,
    ) -> None:
        self._process, self._clock, self._share = process, clock, share
        self._seen_s = self._measured_s()
        self._moved_at = clock()
        self.cpu_s = 0.0
        """CPU time that was used since this began to watch, in steps of progress."""

    def look(self) -> None:
        """Measures the process once more."""
        now_s = self._measured_s()
        if (
            abs(now_s - self._seen_s) >= CPU_STEP_S * self._share()
        ):  # less than before: a descendant has ended, and others have begun
            self.cpu_s += max(0.0, now_s - self._seen_s)
            self._seen_s, self._moved_at = now_s, self._clock()

    @property
    def stalled_s(self) -> float:
        """Time since the last progress."""
        return self._clock() - self._moved_at

    def _measured_s(self) -> float:
        return 0.0 if self._process is None else processes.cpu_s(self._process)


def wait_until(
    ready: Callable[[], bool],
    what: str,
    process: Process | None = None,
    say: Say = _say_nothing,
    stall_limit_s: float = STALL_LIMIT_S,
    cpu_limit_s: float = CPU_LIMIT_S,
) -> None:
    """Waits for `what`, which `process` makes ready, and says every TELL_INTERVAL_S that it does.

    Raises:
        ConfigError: `process` died, made no progress for `stall_limit_s`, or used `cpu_limit_s` of
        CPU time in vain.
    """
    began = told = looked = time.monotonic()
    progress = Progress(process)
    while not ready():
        if process is not None and not is_alive(process):
            raise ConfigError(f"{what} died while starting; {_log(process)}")
        now = time.monotonic()
        if now - looked >= LOOK_INTERVAL_S:
            looked = now
            progress.look()
        if progress.stalled_s > stall_limit_s:
            raise ConfigError(
                f"{what} is not ready after {now - began:.0f} s, and did not work for the last "
                f"{progress.stalled_s:.0f} s; "
                f"{_log(process)}"
            )
        if progress.cpu_s > cpu_limit_s:
            raise ConfigError(
                f"{what} is not ready after {progress.cpu_s:.0f} s of CPU time; {_log(process)}"
            )
        if now - told >= TELL_INTERVAL_S:
            told = now
            idle = progress.stalled_s >= TELL_INTERVAL_S
            say(
                f"{what} is still starting ({now - began:.0f} s, "
                f"{'waiting' if idle else 'working'})"
            )
        time.sleep(POLL_S)


def answers(url: str) -> bool:
    """Whether a GET of this loopback address succeeds; no proxy is asked."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=ANSWER_TIMEOUT_S
    )
    try:
        connection.request("GET", address.path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def prefect_trouble(api_url: str) -> str | None:
    """Why a Prefect server does not answer; None when it does."""
    from prefect.client.orchestration import get_client
    from prefect.settings import temporary_settings

    with temporary_settings(settings_for(api_url)), get_client(sync_client=True) as client:
        trouble = client.api_healthcheck()
        return None if trouble is None else f"{type(trouble).__name__}: {trouble}"


def worker_beats(api_url: str, pools: Iterable[str]) -> Mapping[tuple[str, str], str]:
    """(pool, worker) → time of its last heartbeat, of every worker that Prefect shows as ONLINE."""
    beats: dict[tuple[str, str], str] = {}
    with connected(api_url) as client:
        for pool in pools:
            for worker in client.read_workers_for_work_pool(pool):
                if worker.status is not None and worker.status.value == "ONLINE":
                    beats[pool, worker.name] = str(worker.last_heartbeat_time)
    return beats


def _log(process: Process | None) -> str:
    if process is None:
        return "it left no log here"
    return f"the end of its log {process.log}:\n{last_lines(process.log)}"
