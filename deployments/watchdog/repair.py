"""One repair, in a process of its own: start ended processes again, or report ended flow runs.

    python -m deployments.watchdog.repair --start prefect-server worker-trainers
    python -m deployments.watchdog.repair --ended 5f3c…

Started processes get the arguments, ports and secrets of the recorded stack. A worker is started
once the Prefect server responds, which would refuse it before.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from filelock import FileLock, Timeout

from deployments.paths import Home, home
from deployments.registration.client import connected
from deployments.stack import readiness, startup, state
from deployments.stack.state import WATCHDOG, Stack
from deployments.watchdog.flow_watch import WORKER_GRACE_S
from storage.errors import ConfigError
from tasks.services.prefect_settings import REFUSED

TRY_AGAIN = 75
"""Exit status of a report that failed (EX_TEMPFAIL)."""


def main(arguments: Sequence[str]) -> int:
    """Run one repair; return the exit status."""
    parser = argparse.ArgumentParser(prog=__name__)
    parser.add_argument("--start", nargs="+", default=[])
    parser.add_argument("--ended", nargs="+", default=[], type=UUID)
    options = parser.parse_args(arguments)
    try:
        if options.start:
            # a signal between a start and its record would leave a process that is not recorded
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            start_again(home(), options.start)
        if options.ended and (stack := state.load(home())) is not None:
            report_ended(stack.prefect_url, options.ended)
    except ConfigError as error:
        _say(str(error))
        return TRY_AGAIN
    return 0


def start_again(home: Home, names: Sequence[str]) -> None:
    """Start those of the named processes of the ready stack that have ended.

    Nothing is done while `up` or `down` run, or when the stack has another watchdog than the parent
    of this process.
    """
    lock = FileLock(home.lock, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return
    with lock:
        stack = state.load(home)
        if stack is None or not stack.ready or not _is_ours(stack):
            return
        ended = [name for name in names if stack.process(name) is None]
        stack = startup.start_servers(home, stack, _say, ended)
        if stack.own_server and not readiness.responds(f"{stack.prefect_url}/health"):
            return  # its workers are started by a later repair
        startup.start_workers(home, stack, startup.pools_of(stack, ended), _say)


def report_ended(api_url: str, flow_runs: Iterable[UUID]) -> None:
    """Set flow runs that Prefect shows as active to Crashed; their processes have ended.

    One that is being cancelled is set to Cancelled. One that is scheduled, or was resumed and is
    being started, gets a new process.

    Raises ConfigError when the server does not respond or refuses access; after the others were
    reported, when it refuses the report of one, or when one must be looked at again.
    """
    from prefect.client.schemas.objects import StateType
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
    from prefect.states import Cancelled, Crashed

    def end_of(state_type: StateType | None) -> Any:
        if state_type in (StateType.RUNNING, StateType.PENDING):
            return Crashed(message="its process has ended, and no worker has reported that")
        if state_type is StateType.CANCELLING:
            return Cancelled(message="its process has ended")
        return None

    left: list[str] = []
    with connected(api_url) as client:
        for flow_run_id in flow_runs:
            try:
                flow_run = client.read_flow_run(flow_run_id)
                if _is_starting_again(flow_run):
                    left.append(f"{flow_run.name} (it is starting again)")
                elif (end := end_of(flow_run.state_type)) is not None:
                    client.set_flow_run_state(flow_run_id, end, force=True)
                    _say(f"flow run {flow_run.name} was reported as {end.name}")
            except ObjectNotFound:
                continue  # it was deleted
            except PrefectHTTPStatusError as error:
                if error.response.status_code in REFUSED:
                    raise
                left.append(f"{flow_run_id} ({error})")
    if left:
        raise ConfigError(f"flow runs that are not reported yet: {', '.join(left)}")


def _is_starting_again(flow_run: Any) -> bool:
    """Whether a worker is starting a new process for a flow run that had one before: a suspended
    one that was resumed.
    """
    state = flow_run.state
    if state is None or not state.is_pending() or flow_run.start_time is None:
        return False
    age_s: float = time.time() - state.timestamp.timestamp()
    return age_s < WORKER_GRACE_S


def _is_ours(stack: Stack) -> bool:
    watchdog = stack.process(WATCHDOG)
    return watchdog is not None and watchdog.pid == os.getppid()


def _say(message: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
