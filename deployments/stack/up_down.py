"""The local stack: a Prefect server, an MLflow server, and one Prefect worker for each work pool,
as plain processes.

    up:    server ─▶ (healthy) ─▶ pools ─▶ workers ─▶ deployments ─▶ (workers online)     MLflow starts beside all of it
    down:  cancel flow runs ─▶ workers, MLflow ─▶ server ─▶ whatever else carries the stack's mark

Both are idempotent, and only one of them runs at a time. With PREFECT_API_URL set, the server is
somebody else's and only the rest is started here; with MLFLOW_TRACKING_URI set, so is MLflow.
"""

import fcntl
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from deployments.paths import Home, open_private
from deployments.registration import deployments, flow_runs
from deployments.servers import auth, prefect_toml
from deployments.stack import environment, processes, readiness, state
from deployments.stack.plan import living, plan
from deployments.stack.processes import Process, is_alive
from deployments.stack.startup import Say, bring_up
from deployments.stack.state import MLFLOW, SERVER, Stack
from storage import layout
from storage.coordination import heartbeats
from storage.errors import AstraFlowError, ConfigError
from storage.store import object_store
from storage.store.object_store import ObjectStore
from tasks.monitoring.status_schema import RunSummary

LOCK_TIMEOUT_S = 1800.0
"""Starting takes minutes on a busy machine; the lock of a command that died is free at once."""
STOP_GRACE_S = 10.0
DRAIN_GRACE_S = 45.0
ANSWER_PATIENCE_S = 20.0
"""A Prefect server that neither answers nor works for so long is not asked to cancel its flow runs.
"""
ANSWER_CPU_S = 60.0
"""The same for one that has used so much CPU time without an answer."""


def up(home: Home, say: Say = print, wait_for_mlflow: bool = True) -> Stack:
    """Brings up what does not run, and returns when flow runs can be started.

    Raises ConfigError, with the end of a log where there is one, when a part cannot start; what
    this call had started is then stopped again.
    """
    home.create()
    with _locked(home, say):
        auth.create(home)
        standing = state.load(home)
        alive = living(standing)
        if not _keys_come_later(alive):
            object_store.check_store(environment.open_store(home, alive))
        if alive is None:
            _stop_strays(home, say)
        wanted = plan(home, standing)
        if standing is not None:
            processes.stop(
                [old for old in standing.processes if old not in wanted.processes], STOP_GRACE_S
            )
        try:
            return bring_up(home, wanted, say, wait_for_mlflow)
        except BaseException:
            started = [
                one for one in (state.load(home) or wanted).processes if one not in wanted.processes
            ]
            processes.stop(started, STOP_GRACE_S)
            state.save(home, wanted)
            raise


def down(home: Home, say: Say = print) -> None:
    """Ends active flow runs and stops every process of the stack. Whatever fails on the way, the
    processes are stopped; what failed is raised at the end as one AstraFlowError, and what survived
    as a ConfigError.
    """
    failed: list[str] = []
    with _noting("making the home's folders", failed):
        home.create()
    with ExitStack() as held:
        with _noting("taking the lock", failed, but=(ConfigError, KeyboardInterrupt)):
            held.enter_context(_locked(home, say))
        stack = state.load(home)
        if stack is None and state.exists(home):
            failed.append(
                f"reading {home.record}: it is damaged, so no run was cancelled; processes are "
                "found by their mark"
            )
        if stack is not None:
            with _noting("saying in the record that the stack goes down", failed):
                state.save(home, replace(stack, ready=False))  # nobody counts on it from here on
            with _noting("cancelling flow runs", failed):
                environment.adopt(settings(home, stack))
                failed += _end_flow_runs(stack, say)
            with _noting("stopping the processes of the record", failed):
                _stop_in_order(stack)
        stray = processes.sweep(str(home.root), STOP_GRACE_S)
        if left := processes.marked(str(home.root)):
            pids = ", ".join(str(process.pid) for process in left)
            raise ConfigError(
                "; ".join(
                    [
                        *failed,
                        f"these processes of the stack could not be stopped: {pids}; kill them by "
                        "hand",
                    ]
                )
            )
        with _noting(f"removing {home.prefect_toml}", failed):
            prefect_toml.remove(home.prefect_toml)
        with _noting(f"removing {home.auth}", failed):
            home.auth.unlink(
                missing_ok=True
            )  # a page that is still open goes on sending it, to whoever takes the port
        with _noting(f"removing {home.record}", failed):
            state.forget(home)
    nothing = not stray and (stack is None or not stack.processes)
    if failed:
        raise AstraFlowError(
            "no process of the stack is left running, but this failed: " + "; ".join(failed)
        )
    say("nothing was running" if nothing else "the stack is down; nothing is left running")


@contextmanager
def _noting(
    doing: str, failed: list[str], but: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Notes what fails in the block, also a Ctrl-C, and goes on, but for errors of the kind
    `but`.
    """
    try:
        yield
    except but:
        raise
    except (Exception, KeyboardInterrupt) as error:  # whatever it is, the processes must be stopped
        told = (
            str(error)
            if isinstance(error, AstraFlowError)
            else f"{type(error).__name__} {error}".rstrip()
        )
        failed.append(f"{doing}: {told}")


def running(home: Home) -> Stack | None:
    """The stack, if it was seen ready and all of its processes live."""
    stack = state.load(home)
    return (
        stack if stack is not None and stack.ready and all(map(is_alive, stack.processes)) else None
    )


def settings(home: Home, stack: Stack) -> dict[str, str]:
    """What a command adopts to speak to the stack's processes."""
    return environment.of_stack(home, stack, {})


def _keys_come_later(alive: Stack | None) -> bool:
    """Whether the store's credentials are on a server that is yet to start; the first run then
    checks the store.
    """
    own = environment.given("PREFECT_API_URL") is None and (alive is None or alive.own_server)
    return (
        own
        and bool(environment.secret_name(alive))
        and (alive is None or alive.process(SERVER) is None)
    )


def _end_flow_runs(stack: Stack, say: Say) -> list[str]:
    """On our own server every run is cancelled; returns what could not be. On somebody else's, only
    the processes on this machine are asked to leave: the runs belong to others too, and their
    supervisors replace what was here.
    """
    workers = _workers(stack)
    if not stack.own_server:
        processes.drain(workers, DRAIN_GRACE_S)
        return []
    server = stack.process(SERVER)
    if server is None:
        return _uncancelled(stack, "the Prefect server is gone")
    try:
        answers = partial(readiness.answers, f"{stack.prefect_url}/health")
        readiness.wait_until(
            answers, "the Prefect server", server, say, ANSWER_PATIENCE_S, ANSWER_CPU_S
        )
        cancelled, left = flow_runs.cancel_all(
            stack.prefect_url, deployments.TAG, processes_alive=bool(workers)
        )
    except ConfigError as error:
        return _uncancelled(stack, f"the Prefect server does not answer as it should ({error})")
    if cancelled:
        say(
            f"cancelled {cancelled} flow runs"
            + (f"; {left} did not end in time and are killed" if left else "")
        )
    return []


def _uncancelled(stack: Stack, why: str) -> list[str]:
    """A sentence that names the runs that are about to be killed without having been cancelled, as
    far as the store has them; nothing where there are none.
    """
    from tasks.monitoring import status

    try:
        store = replace(
            object_store.open_store(stack.store_url), patience_s=object_store.CHECK_PATIENCE_S
        )
        going = [
            run.run_id
            for run in status.runs(store)
            if run.state in ("starting", "running") or _works_here(store, run)
        ]
    except AstraFlowError as error:
        return [f"{why}, and the store does not tell its runs ({error}): no run was cancelled"]
    if not going:
        return []
    return [
        f"{why}, so these runs are stopped without being cancelled and will show as interrupted: "
        f"{', '.join(going)}; "
        "started again with the same run ids they go on"
    ]


def _works_here(store: ObjectStore, run: RunSummary) -> bool:
    """Whether the supervisor of a run that seems interrupted lives on this machine: one that gets
    too little CPU time to beat is slow, and not gone.
    """
    if run.state != "interrupted":
        return False
    beats = heartbeats.read_all(store.sub(layout.run_prefix(run.run_id)))
    return any(
        processes.lives_since(beat.pid, beat.beat_s)
        for beat in beats
        if beat.kind == "supervisor" and not beat.has_ended and beat.host == socket.gethostname()
    )


def _stop_strays(home: Home, say: Say) -> None:
    """Stops what a stack left running whose record was lost or broken."""
    if stopped := processes.sweep(str(home.root), STOP_GRACE_S):
        say(
            f"{home.record} knows none of these processes of a stack before; stopped them, and "
            "whatever runs they served:"
        )
        for words in stopped:
            say(f"  {words}")


def _stop_in_order(stack: Stack) -> None:
    """A worker that is asked to leave kills its flow runs, so their turn has come before; the
    server hears of all that.
    """
    processes.stop([process for process in stack.processes if process.name != SERVER], STOP_GRACE_S)
    processes.stop([process for process in stack.processes if process.name == SERVER], STOP_GRACE_S)


def _workers(stack: Stack) -> list[Process]:
    return [one for one in stack.processes if one.name not in (SERVER, MLFLOW) and is_alive(one)]


@contextmanager
def _locked(home: Home, say: Say) -> Iterator[None]:
    """One `up` or `down` of a home at a time; the lock ends with the process that holds it."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    told = False
    with open(home.lock, "w", opener=open_private) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another `astraflow up` or `down` holds {home.lock} for "
                        f"{LOCK_TIMEOUT_S:.0f} s now; end it"
                    ) from None
            if not told:
                say("waiting for another `astraflow up` or `down`")
                told = True
            time.sleep(readiness.POLL_S)
        yield
