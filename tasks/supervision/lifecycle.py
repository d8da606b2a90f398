"""One run from its recipe to its report: the body of the flow `astraflow`.

recipe ─▶ run.json ─▶ supervise, until all members are done or a stop ─▶ closing steps
"""

import asyncio
import contextlib
import functools
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
from prefect import tags as tagged
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run

from storage import layout
from storage.coordination import heartbeats
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.machine_monitor import MachineMonitor
from storage.coordination.progress_log import ProgressLog
from storage.errors import AstraFlowError, ConfigError
from storage.records.control import Heartbeat, Stop
from storage.run import runs
from storage.store import object_store
from storage.store.object_store import ObjectStore
from tasks.events.announcing import announcing
from tasks.monitoring.live_artifacts import LiveArtifacts
from tasks.recipes import loader
from tasks.recipes.run_config import RunConfig
from tasks.services import store_credentials
from tasks.services.service_logs import service_logs
from tasks.services.sigterm import is_being_cancelled, sigterm_as_event
from tasks.supervision import (
    automatic_restart,
    closing,
    flow_processes,
    supervisor,
    suspension,
)
from tasks.supervision.automatic_restart import Start
from tasks.supervision.launcher import PrefectLauncher, introduce, rival
from tasks.tracking.mlflow_sync import Tracker, tracking_uri
from tasks.tracking.provenance import provenance

log = logging.getLogger(__name__)

CANCEL_PATIENCE_S = 12.0
"""Time for the members of a cancelled run to leave by themselves. Prefect kills a cancelled flow
run after 30 s; the rest of that time is for the report.
"""
LIVE_INTERVAL_S = 15.0
"""Between two updates of Prefect's artifacts."""
LAST_UPDATE_S = 30.0
"""Time limit of their last update, when the members have left."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run_id: str
    state: str
    reason: str


async def run_training(run_id: str | None, recipe: str, overrides: Mapping[str, Any]) -> Outcome:
    """Run the recipe to its end.

    Raises:
        AstraFlowError: the run failed, is supervised already, or cannot begin.
        TerminationSignal: this process got SIGTERM, and not because Prefect cancelled its flow run.
            The members of the run go on without it.
        Pause: another process of this flow run supervises the run from now on.
    """
    config = loader.load(recipe, overrides)
    name = run_id or str(flow_run.get_name())
    tracking = tracking_uri() if config.tracking.enabled else None
    await asyncio.to_thread(store_credentials.load)
    store = object_store.default_store()
    await asyncio.to_thread(object_store.check_store, store)
    begun = await automatic_restart.read_start()
    await _wait_for_others(store.sub(layout.run_prefix(name)), name, config, begun)
    begin = (
        supervisor.start
        if await asyncio.to_thread(_takes_up, store, name, begun)
        else (supervisor.create)
    )
    run = await asyncio.to_thread(begin, store, name, config, _deployment())
    await introduce(name, f"run:{name}")
    await suspension.retire_suspended(name)
    if begun is Start.AUTOMATIC:
        await _continue_end(run, name, config)
    attempt = int(flow_run.get_run_count() or 1) - 1
    resumed = await asyncio.to_thread(_has_begun, run)
    progress = ProgressLog(config.log_every_s, config.log_every_steps)
    with (
        service_logs(config.log_level),
        MachineMonitor() as monitor,
        HeartbeatWriter(
            *(run, "supervisor", "supervisor", attempt, config.supervise.heartbeat_interval_s),
            observe=progress.observe,
            machine=monitor.last,
        ) as heartbeat,
    ):
        origin = {} if tracking is None else await asyncio.to_thread(provenance, run)
        tracker = None if tracking is None else Tracker(run, name, config, tracking, tags=origin)
        live = LiveArtifacts(run, page=lambda: None if tracker is None else tracker.page)
        watcher = supervisor.Supervisor(
            run=run, config=config, heartbeat=heartbeat, launcher=PrefectLauncher(name)
        )
        async with (
            _syncing(tracker, config.tracking.interval_s),
            _showing(live, LIVE_INTERVAL_S),
            announcing(run, name, watcher.events),
        ):
            event = "run.resumed" if resumed else "run.started"
            watcher.events.add(event, str(flow_run.get_id()))
            stop = await _last_stop(run, await _supervise(watcher))
            watcher.events.add(f"run.{stop.state}", str(stop.at_s), stop.at_s, reason=stop.reason)
        stop = await _close(run, stop, tracker, heartbeat, config.supervise.close_timeout_s)
    if stop.state == "failed":
        raise AstraFlowError(f"run {name} failed: {stop.reason}")
    return Outcome(name, stop.state, stop.reason)


def _takes_up(store: ObjectStore, run_id: str, begun: Start) -> bool:
    """Return whether a stopped run goes on: not after an automatic start. A person who resumes its
    flow run ends the suspension; a run that was cancelled meanwhile stays so, and is closed.
    """
    if begun is not Start.RESUMED:
        return begun is Start.REQUESTED
    stop = runs.read_stop(store.sub(layout.run_prefix(run_id)))
    return stop is None or stop.state == "suspended"


async def _wait_for_others(run: ObjectStore, run_id: str, config: RunConfig, begun: Start) -> None:
    """Wait for an earlier process of this flow run, and refuse to start beside another flow run.

    Raises:
        ConfigError: another supervisor is alive.
    """
    if begun is Start.RESUMED:  # by a person who did not wait for the end of the suspension
        while await _is_alive(run, config):
            log.info("run %s is still being suspended: waiting for its supervisor to leave", run_id)
    await _refuse_second_supervisor(run, run_id, config)


async def _continue_end(run: ObjectStore, run_id: str, config: RunConfig) -> None:
    """Request the end that a supervisor which died had requested, or failed to store.

    Raises AstraFlowError for a run whose supervisors keep dying.
    """
    await automatic_restart.enforce_limit(run, run_id, config.supervise.restarts_max)
    if await automatic_restart.died_suspended(run_id):
        await asyncio.to_thread(runs.request_stop, run, _suspended())


def _suspended() -> Stop:
    return Stop("suspended", suspension.BY_PREFECT, time.time())


async def _refuse_second_supervisor(run: ObjectStore, run_id: str, config: RunConfig) -> None:
    """Refuse to supervise a run whose supervisor is alive, also one of another Prefect server.

    A flow run that Prefect still shows is dead if its process is not on this machine and its
    heartbeat does not change for the time after which a member counts as lost.

    Raises:
        ConfigError: another supervisor is alive.
    """
    other = await rival(run_id)
    if other is None:
        host = await asyncio.to_thread(_host_of_supervisor, run)
        if host and await _is_alive(run, config):
            raise _second_supervisor(
                run_id, f"a process on {host}, of which this Prefect server does not know"
            )
        return
    if other.is_suspended and await asyncio.to_thread(_last_heartbeat, run) is None:
        return  # its process has left
    if await _is_alive(run, config):
        raise _second_supervisor(run_id, f"the flow run {other.flow_run_id}")
    if await asyncio.to_thread(flow_processes.cpu_seconds, other.flow_run_id) is not None:
        # it is alive, and slow
        raise _second_supervisor(run_id, f"the flow run {other.flow_run_id}")


async def _is_alive(run: ObjectStore, config: RunConfig) -> bool:
    """Return whether a supervisor's heartbeat changes within the time after which a member counts
    as lost.
    """
    interval_s = config.supervise.heartbeat_interval_s
    before = await asyncio.to_thread(_last_heartbeat, run)
    for _ in range(math.ceil(config.supervise.heartbeat_limit_s / interval_s)):
        await asyncio.sleep(interval_s)
        now = await asyncio.to_thread(_last_heartbeat, run)
        if now is not None and now != before:
            return True
    return False


def _second_supervisor(run_id: str, by: str) -> ConfigError:
    return ConfigError(
        f"run {run_id} is supervised already, by {by}; `astraflow status {run_id}` shows it, "
        f"`astraflow cancel {run_id}` ends it"
    )


def _has_begun(run: ObjectStore) -> bool:
    """Return whether the run has had a supervisor."""
    return any(beat.kind == "supervisor" for beat in heartbeats.readable(run))


def _last_heartbeat(run: ObjectStore) -> tuple[float, int] | None:
    """Return (start, number of heartbeats) of the run's supervisor; None without one, or when it
    has left.
    """
    return next(((beat.started_s, beat.beats) for beat in _living(run)), None)


def _host_of_supervisor(run: ObjectStore) -> str:
    """Return the machine of the run's supervisor; empty without one, when it has left, or when its
    process on this machine has ended.
    """
    for beat in _living(run):
        if beat.host != socket.gethostname() or psutil.pid_exists(beat.pid):
            return beat.host
    return ""


def _living(run: ObjectStore) -> Iterator[Heartbeat]:
    """Yield the heartbeat of the run's supervisor, unless it has left."""
    for beat in heartbeats.readable(run):
        if beat.kind == "supervisor" and not beat.has_ended:
            yield beat


def _deployment() -> str:
    """Return the deployment, such as `astraflow/multi-policy`; empty for a flow that was called as
    a function.
    """
    return f"{flow_run.get_flow_name()}/{deployment.get_name()}" if deployment.get_name() else ""


async def _supervise(watcher: supervisor.Supervisor) -> Stop:
    """Supervise until the run is over. A cancelled or suspended flow run ends the training run,
    whose members then leave.

    Raises:
        Pause: another process of this flow run supervises the run from now on.
        TerminationSignal: this process got SIGTERM; the members go on.
    """
    prefect = suspension.SuspensionWatch(suspension.own_flow_runs())

    async def look() -> None:
        if await prefect.look(watcher.over is not None and watcher.over.state != "suspended"):
            watcher.over = watcher.over or _suspended()

    async with (
        sigterm_as_event() as sigterm,
        _repeating(look, watcher.config.supervise.poll_interval_s),
    ):
        supervising = asyncio.create_task(watcher.supervise())
        terminated = asyncio.create_task(sigterm.wait())
        resumed = asyncio.create_task(prefect.resumed.wait())
        try:
            await asyncio.wait(
                {supervising, terminated, resumed}, return_when=asyncio.FIRST_COMPLETED
            )
            if not supervising.done() and prefect.resumed.is_set():
                log.warning("the flow run was resumed: its new process supervises the run")
                raise suspension.superseded()
            if not supervising.done():
                if not await asyncio.to_thread(is_being_cancelled):
                    log.warning(
                        "SIGTERM: the run's members go on; start the run again with the same run "
                        "id to supervise them"
                    )
                    raise TerminationSignal(signal=signal.SIGTERM)
                watcher.leave_within_s = min(watcher.leave_within_s, CANCEL_PATIENCE_S)
                watcher.over = Stop(
                    "cancelled", "its flow run was cancelled in Prefect", time.time()
                )
            return await supervising
        finally:
            for waiting in (supervising, terminated, resumed):
                waiting.cancel()


async def _last_stop(run: ObjectStore, stop: Stop) -> Stop:
    """Return why the run ended, after its members have left: meanwhile a person may have cancelled
    a suspended run.
    """
    if stop.state != "suspended":
        return stop
    try:
        return await asyncio.to_thread(runs.read_stop, run) or stop
    except AstraFlowError as error:
        log.warning("whether the suspended run was cancelled cannot be read: %s", error)
        return stop


async def _close(
    run: ObjectStore,
    stop: Stop,
    tracker: Tracker | None,
    heartbeat: HeartbeatWriter,
    timeout_s: float,
) -> Stop:
    """Take the steps after the run's end; return the stop in effect: a suspended run may be
    cancelled while MLflow gets what it lacks.
    """
    if stop.state == "suspended":
        await asyncio.to_thread(closing.suspend, tracker, heartbeat)
        stop = await _last_stop(run, stop)
    if stop.state != "suspended":
        name = runs.run_id(run)
        with tagged(f"run:{name}"), suspension.ignored():
            closing.close(name, stop, tracker, heartbeat, timeout_s)
    return stop


@contextlib.asynccontextmanager
async def _syncing(tracker: Tracker | None, interval_s: float) -> AsyncIterator[None]:
    """Sync MLflow in the background, so that an MLflow server that does not answer slows nothing.

    The block ends after the sync in flight, since a tracker is used by one thread at a time.
    """
    if tracker is None:
        yield
        return
    # urllib3 logs every retry; the tracker logs that MLflow does not answer once.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    async with _repeating(functools.partial(asyncio.to_thread, tracker.sync), interval_s):
        yield


@contextlib.asynccontextmanager
async def _showing(live: LiveArtifacts, interval_s: float) -> AsyncIterator[None]:
    """Update Prefect's artifacts in the background, and once more at the end of the block."""
    async with _repeating(live.update, interval_s):
        yield
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(live.update(), LAST_UPDATE_S)


@contextlib.asynccontextmanager
async def _repeating(
    act: Callable[[], Awaitable[object]], interval_s: float
) -> AsyncIterator[None]:
    """Call `act` at once and then every `interval_s`; the block ends after the call in flight."""
    over = asyncio.Event()

    async def repeat() -> None:
        while not over.is_set():
            await act()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), interval_s)

    repeating = asyncio.create_task(repeat())
    try:
        yield
    finally:
        over.set()
        try:
            await repeating
        except Exception:  # whatever MLflow's client raises: curves are not worth a run
            log.exception("tracking ended early; the end of the run tries once more")
