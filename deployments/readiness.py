"""Waiting for the stack's parts: until they answer, or until one has died or the time is up, which is an error with
the end of its log."""

import http.client
import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from deployments.prefect_api import connected
from deployments.processes import Process, is_alive, last_lines
from storage.errors import ConfigError
from tasks.prefect_settings import settings_for

POLL_S = 0.1
ANSWER_TIMEOUT_S = 3.0


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float, process: Process | None = None) -> None:
    """Raises ConfigError when `process` dies before `ready`, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if process is not None and not is_alive(process):
            raise ConfigError(f"{what} died while starting; {_log(process)}")
        if time.monotonic() > deadline:
            raise ConfigError(f"{what} was not ready after {timeout_s:.0f} s; {_log(process)}")
        time.sleep(POLL_S)


def answers(url: str) -> bool:
    """Whether a GET of this loopback address succeeds; no proxy is asked."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=ANSWER_TIMEOUT_S)
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
