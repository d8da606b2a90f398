"""Start and stop the local stack: the Prefect and MLflow servers, one worker per work pool, and a
watchdog that starts them again when they end.

    up:    server ─▶ (healthy) ─▶ pools ─▶ workers ─▶ deployments ─▶ (workers online) ─▶ watchdog
           MLflow starts in parallel
    down:  watchdog ─▶ cancel flow runs ─▶ workers, MLflow ─▶ server ─▶ other processes with the
           stack's mark

Both are idempotent, and only one of them runs at a time. With PREFECT_API_URL set, the server is
external and not started or stopped here; the same holds for MLflow with MLFLOW_TRACKING_URI.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from filelock import FileLock, Timeout

from deployments.paths import Home
from deployments.registration import deployments, flow_runs
from deployments.servers import auth, prefect_toml
from deployments.stack import environment, processes, readiness, state
from deployments.stack.plan import if_running, plan
from deployments.stack.processes import Process, is_alive
from deployments.stack.startup import Say, bring_up
from deployments.stack.state import MLFLOW, SERVER, WATCHDOG, Stack
from storage import layout
from storage.coordination import heartbeats
from storage.errors import AstraFlowError, ConfigError
from storage.store import object_store
from storage.store.object_store import ObjectStore
from tasks.monitoring.status_schema import RunSummary

LOCK_TIMEOUT_S = 1800.0
"""Starting takes minutes on a busy machine. The lock is released when its process ends."""
STOP_GRACE_S = 10.0
DRAIN_GRACE_S = 45.0
RESPONSE_STALL_LIMIT_S = 20.0
"""A Prefect server without a response or progress for this time gets no request to cancel."""
RESPONSE_CPU_LIMIT_S = 60.0
"""The same for one that has used this CPU time without a response."""


def up(home: Home, say: Say = print, wait_for_mlflow: bool = True) -> Stack:
    """Start the parts that do not run; return when flow runs can be started.

    Raises ConfigError, with the end of a log where there is one, when a part cannot start. The
    processes that this call has started are then stopped.
    """
    environment.refuse_bad_addresses()
    home.create()
    home.refuse_irregular_files()
    with _locked(home, say):
        recorded = state.load(home)
        state.refuse_foreign(home, recorded)
        auth.create(home)
        environment.prepare(home)
        alive = if_running(recorded)
        if not _has_late_credentials(alive):
            object_store.check_store(environment.open_store(home, alive))
        if alive is None:
            _stop_unrecorded(home, say)
        planned = plan(home, recorded)
        if recorded is not None:
            old = [process for process in recorded.processes if process not in planned.processes]
            processes.stop(old, STOP_GRACE_S)
        try:
            return bring_up(home, planned, say, wait_for_mlflow)
        except BaseException:  # a Ctrl-C, too: what this call has started must not stay
            current = (state.load(home) or planned).processes
            started = [process for process in current if process not in planned.processes]
            processes.stop(started, STOP_GRACE_S)
            state.save(home, planned)
            raise


def down(home: Home, say: Say = print) -> None:
    """End active flow runs and stop every process of the stack.

    A failure does not keep the processes from being stopped. Raises AstraFlowError at the end with
    every failure, and ConfigError with the processes that still run.
    """
    failures: list[str] = []
    with ExitStack() as lock:
        if home.is_used():
            with _collecting("taking the lock", failures, but=(ConfigError, KeyboardInterrupt)):
                lock.enter_context(_locked(home, say))
        stack = state.load(home)
        state.refuse_foreign(home, stack)
        if stack is None and state.exists(home):
            failures.append(
                f"reading {home.record}: it is damaged, so no run was cancelled; processes are "
                "found by their mark"
            )
        if stack is not None:
            with _collecting("recording that the stack is not ready", failures):
                state.save(home, replace(stack, ready=False))
            with _collecting("stopping the watchdog", failures):
                watchdog = [each for each in stack.processes if each.name == WATCHDOG]
                processes.stop(watchdog, STOP_GRACE_S)
            with _collecting("cancelling flow runs", failures):
                environment.adopt(settings(home, stack))
                failures += _end_flow_runs(home, stack, say)
            with _collecting("stopping the processes of the record", failures):
                _stop_in_order(stack)
        unrecorded = processes.sweep(str(home.root), STOP_GRACE_S)
        if alive := processes.marked(str(home.root)):
            pids = ", ".join(str(process.pid) for process in alive)
            remaining = f"these processes of the stack could not be stopped: {pids}; kill them"
            raise ConfigError("; ".join([*failures, remaining]))
        with _collecting(f"deleting {home.prefect_toml}", failures):
            prefect_toml.remove(home.prefect_toml)
        with _collecting(f"deleting {home.auth}", failures):
            # an open page still sends it, to any process that takes the port
            home.auth.unlink(missing_ok=True)
        with _collecting(f"deleting {home.record}", failures):
            state.delete(home)
    nothing = not unrecorded and (stack is None or not stack.processes)
    if failures:
        raise AstraFlowError(
            "no process of the stack is running any more, but this failed: " + "; ".join(failures)
        )
    say("nothing was running" if nothing else "the stack is down; none of its processes runs")


@contextmanager
def _collecting(
    action: str, failures: list[str], but: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Append an error of the block, or a Ctrl-C, to `failures`; raise only those in `but`."""
    try:
        yield
    except but:
        raise
    except (Exception, KeyboardInterrupt) as error:  # the processes must be stopped all the same
        message = (
            str(error)
            if isinstance(error, AstraFlowError)
            else f"{type(error).__name__} {error}".rstrip()
        )
        failures.append(f"{action}: {message}")


def running(home: Home) -> Stack | None:
    """Return the stack if it became ready and all of its processes run."""
    stack = state.load(home)
    return (
        stack if stack is not None and stack.ready and all(map(is_alive, stack.processes)) else None
    )


def reachable(home: Home) -> Stack | None:
    """Return the stack if its Prefect server runs; an external one, if any process of the stack
    does. Workers and MLflow may have ended.
    """
    stack = state.load(home)
    if stack is not None and stack.own_server:
        return None if stack.process(SERVER) is None else stack
    return if_running(stack)


def settings(home: Home, stack: Stack) -> dict[str, str]:
    """Return the environment variables with which a command uses the stack."""
    return environment.of_stack(home, stack, {})


def adopt_server(home: Home) -> str:
    """Return the address of the Prefect server for a command, and adopt its environment: that of
    PREFECT_API_URL, else that of the local stack.

    Raises:
        ConfigError: there is neither.
    """
    api_url = environment.given("PREFECT_API_URL")
    if api_url is None and (local := reachable(home)) is not None:
        environment.adopt(settings(home, local))
        api_url = local.prefect_url
    if api_url is None:
        raise ConfigError(
            "there is no Prefect server; set PREFECT_API_URL to its address, or run `astraflow up`"
        )
    return api_url


def _has_late_credentials(alive: Stack | None) -> bool:
    """Return whether the store's credentials are on a server that does not run yet.

    The first run then checks the store.
    """
    starts_server = environment.given("PREFECT_API_URL") is None and (
        alive is None or alive.own_server
    )
    return (
        starts_server
        and bool(environment.secret_name(alive))
        and (alive is None or alive.process(SERVER) is None)
    )


def _end_flow_runs(home: Home, stack: Stack, say: Say) -> list[str]:
    """Cancel every run on our own server; return the failures.

    On an external server only the processes on this machine are stopped: other machines take part
    in the runs, and the supervisors replace the stopped members.
    """
    workers = _workers(stack)
    if not stack.own_server:
        processes.drain(workers, DRAIN_GRACE_S)
        return []
    server = stack.process(SERVER)
    if server is None:
        return _uncancelled(home, stack, "the Prefect server is not running")
    try:
        responds = partial(readiness.responds, f"{stack.prefect_url}/health")
        readiness.wait_until(
            responds,
            "the Prefect server",
            server,
            say,
            RESPONSE_STALL_LIMIT_S,
            RESPONSE_CPU_LIMIT_S,
        )
        cancelled, active = flow_runs.cancel_all(
            stack.prefect_url, deployments.TAG, processes_alive=bool(workers)
        )
    except ConfigError as error:
        return _uncancelled(home, stack, f"the Prefect server does not respond ({error})")
    if cancelled:
        timed_out = f"; {active} did not end in time and are killed" if active else ""
        say(f"cancelled {cancelled} flow runs{timed_out}")
    return []


def _uncancelled(home: Home, stack: Stack, reason: str) -> list[str]:
    """Return an error message with the stored runs that are killed without being cancelled; nothing
    where there are none.
    """
    from tasks.monitoring import status

    marked = {process.pid for process in processes.marked(str(home.root))}
    try:
        store = replace(
            object_store.open_store(stack.store_url), patience_s=object_store.CHECK_PATIENCE_S
        )
        active = [
            run.run_id
            for run in status.runs(store)
            if run.state in ("starting", "running") or _has_supervisor_of(marked, store, run)
        ]
    except AstraFlowError as error:
        return [f"{reason}, and the store's runs cannot be listed ({error}): no run was cancelled"]
    if not active:
        return []
    return [
        f"{reason}, so these runs are stopped without being cancelled and will be shown as "
        f"interrupted: {', '.join(active)}; start them again with the same run ids to resume them"
    ]


def _has_supervisor_of(marked: set[int], store: ObjectStore, run: RunSummary) -> bool:
    """Return whether the supervisor of a run that is shown as interrupted is one of this stack's
    processes, whose ids are `marked`.

    Under load a supervisor may get too little CPU time for its heartbeats.
    """
    if run.state != "interrupted":
        return False
    try:
        beats = heartbeats.read_all(store.sub(layout.run_prefix(run.run_id))).beats
    except AstraFlowError:  # of this run: the others are named all the same
        return False
    return any(
        beat.pid in marked
        for beat in beats
        if beat.kind == "supervisor" and not beat.has_ended and beat.host == socket.gethostname()
    )


def _stop_unrecorded(home: Home, say: Say) -> None:
    """Stop the processes of a previous stack whose record is lost or damaged."""
    if stopped := processes.sweep(str(home.root), STOP_GRACE_S):
        say(
            f"stopped these processes of a previous stack, which {home.record} does not list, and "
            "the runs that they served:"
        )
        for description in stopped:
            say(f"  {description}")


def _stop_in_order(stack: Stack) -> None:
    """Stop the workers and MLflow, then the Prefect server, which records the workers' last states.

    A worker that is stopped kills its flow runs, which therefore are cancelled before.
    """
    processes.stop([process for process in stack.processes if process.name != SERVER], STOP_GRACE_S)
    processes.stop([process for process in stack.processes if process.name == SERVER], STOP_GRACE_S)


def _workers(stack: Stack) -> list[Process]:
    return [
        process
        for process in stack.processes
        if process.name not in (SERVER, MLFLOW, WATCHDOG) and is_alive(process)
    ]


@contextmanager
def _locked(home: Home, say: Say) -> Iterator[None]:
    """Allow one `up` or `down` of a home at a time."""
    lock = FileLock(home.lock, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("waiting for another `astraflow up` or `down`")
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except Timeout:
            raise ConfigError(
                f"another `astraflow up` or `down` has had the lock {home.lock} for "
                f"{LOCK_TIMEOUT_S:.0f} s; end it"
            ) from None
    try:
        yield
    finally:
        lock.release()
