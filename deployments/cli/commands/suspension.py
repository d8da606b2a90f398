"""The commands that end or suspend a run, or resume it.

Modules that are slow to import are imported inside the command that needs them.
"""

from typing import TYPE_CHECKING

from deployments.cli.output.terminal import NamedRun, say, store, warn
from deployments.paths import home
from storage.errors import ConfigError
from tasks.terminal_text import one_line

if TYPE_CHECKING:
    from storage.records.control import Stop
    from storage.store.object_store import ObjectStore


def cancel(run: NamedRun) -> None:
    """End one run; the stack and other runs continue. A suspended run is ended, too.

    `astraflow run --run-id RUN` resumes it.

    Example:  astraflow cancel tiny-20260101-120000-ab12
    """
    from deployments.cli import run_follower
    from storage.run import runs as stored_runs

    try:
        stored = stored_runs.open_run(store(), run)
    except ConfigError:
        if not run_follower.cancel_before_it_began(home(), run):
            raise
        say(f"{run} is cancelled; it had not started")
        return
    previous_stop = stored_runs.read_stop(stored)
    if previous_stop is None:
        run_follower.cancel(stored)
        say(
            f"{run} is being cancelled; `astraflow run --run-id {run}` with the same settings "
            "resumes it"
        )
    elif previous_stop.state != "completed" and run_follower.cancel_before_it_began(
        home(), run, previous_stop
    ):
        say(f"{run} is cancelled; it had not resumed")
    elif previous_stop.state in ("suspended", "cancelled"):
        _cancel_suspended(stored, run, previous_stop)
    else:
        say(f"{run} is already {previous_stop.state}: {one_line(previous_stop.reason)}")


def _cancel_suspended(stored: "ObjectStore", run: str, previous_stop: "Stop") -> None:
    """Cancel a suspended run. Its flow run is resumed, and takes the closing steps."""
    from deployments.cli import run_follower
    from deployments.registration import flow_runs
    from deployments.stack import up_down

    if previous_stop.state == "suspended":
        _wait_while_taken_up(stored, run, previous_stop)
        run_follower.cancel(stored)
    try:
        resumed = flow_runs.resume_if_suspended(up_down.adopt_server(home()), run)
    except ConfigError as error:
        if previous_stop.state == "suspended":
            warn(f"{run} is cancelled in the store, its flow run in Prefect is as before: {error}")
            warn("repeat the command when Prefect answers, so that the run is closed")
            return
        resumed = None
    if resumed:
        say(f"{run} is being cancelled: its flow run goes on with the closing steps")
    elif previous_stop.state == "suspended":
        say(f"{run} is cancelled")
    else:
        say(f"{run} is already cancelled: {one_line(previous_stop.reason)}")


def _wait_while_taken_up(stored: "ObjectStore", run: str, suspension: "Stop") -> None:
    """Wait while a supervisor that was started by a resume is about to delete the suspension: it
    could delete a cancellation instead.
    """
    import time

    from deployments.registration import flow_runs
    from deployments.stack import up_down
    from storage.run import runs as stored_runs

    is_told = False
    try:
        server = up_down.adopt_server(home())
        while stored_runs.read_stop(stored) == suspension and flow_runs.is_taken_up(
            server, run, suspension.at_s
        ):
            if not is_told:
                say(f"{run} is being resumed: it is cancelled when its supervisor has begun")
            is_told = True
            time.sleep(flow_runs.POLL_S)
    except ConfigError:  # without Prefect nothing is resumed either
        return


def suspend(run: NamedRun) -> None:
    """Suspend a run: workers finish their orders, trainers save a checkpoint, and all leave.

    `astraflow resume RUN`, or the button Resume on Prefect's page, goes on with it.

    Example:  astraflow suspend tiny-20260101-120000-ab12
    """
    from deployments.cli import run_follower
    from storage.run import runs as stored_runs

    stored = stored_runs.open_run(store(), run)
    before = stored_runs.read_stop(stored)
    stop = before or run_follower.suspend(stored)
    if stop.state != "suspended":
        raise ConfigError(
            f"{run} is {stop.state}, so it cannot be suspended: {one_line(stop.reason)}"
        )
    if before is not None:
        _refuse_to_suspend_what_is_being_resumed(run, before)
        say(
            f"{run} is already suspended: {one_line(stop.reason)}; `astraflow resume {run}` goes on"
        )
        return
    say(f"{run} is being suspended; `astraflow resume {run}` goes on when its members have left")


def _refuse_to_suspend_what_is_being_resumed(run: str, before: "Stop") -> None:
    """Raise ConfigError while the supervisor of a resumed run has not begun: it would go on."""
    from deployments.registration import flow_runs
    from deployments.stack import up_down

    try:
        resumed = flow_runs.is_being_resumed(up_down.adopt_server(home()), run, before.at_s)
    except ConfigError:  # without Prefect nothing is resumed either
        return
    if resumed:
        raise ConfigError(
            f"{run} is being resumed; suspend it when `astraflow status {run}` shows it running"
        )


def resume(run: NamedRun) -> None:
    """Resume a suspended run in its flow run in Prefect; a worker then starts its supervisor.

    Example:  astraflow resume tiny-20260101-120000-ab12
    """
    from deployments.registration import flow_runs
    from deployments.stack import up_down
    from storage.run import runs as stored_runs

    stored = stored_runs.open_run(store(), run)
    stop = stored_runs.read_stop(stored)
    if stop is None:
        raise ConfigError(f"{run} is not suspended; `astraflow status {run}` shows what it does")
    again = f"`astraflow run --run-id {run}` with the same settings"
    if stop.state != "suspended":
        remedy = "" if stop.state == "completed" else f"; {again} takes it up"
        raise ConfigError(f"{run} is {stop.state}, not suspended: {one_line(stop.reason)}{remedy}")
    if flow_runs.resume(up_down.adopt_server(home()), run, stop.at_s) is None:
        raise ConfigError(f"Prefect has no suspended flow run of {run}; start it with {again}")
    say(f"{run} is resumed; `astraflow attach {run}` shows it")
