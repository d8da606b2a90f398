"""One run from its recipe to its report: the body of the flow `astraflow`.

recipe ─▶ run.json ─▶ supervise, until all members are done or a stop ─▶ verify, report, track
"""

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prefect.artifacts import acreate_link_artifact, acreate_markdown_artifact
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run

from storage import layout
from storage.coordination import heartbeats
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import AstraFlowError, ConfigError
from storage.records.control import ClosingStep, Stop
from storage.store import object_store
from storage.store.object_store import ObjectStore
from storage.verify.verify import Verdict
from tasks.monitoring import closing_steps
from tasks.monitoring.mlflow_sync import Tracker, tracking_uri
from tasks.recipes import loader
from tasks.recipes.run_config import RunConfig
from tasks.services import prefect_tasks, store_credentials
from tasks.services.sigterm import is_being_cancelled, sigterm_as_event
from tasks.supervision import flow_processes, supervisor
from tasks.supervision.launcher import PrefectLauncher, introduce, rival

log = logging.getLogger(__name__)

CANCEL_PATIENCE_S = 12.0
"""Time for the members of a cancelled run to leave by themselves. Prefect kills a cancelled flow
run after 30 s; the rest of that time is for the report.
"""


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
    """
    config = loader.load(recipe, overrides)
    name = run_id or made_up_run_id(config.name)
    tracking = tracking_uri() if config.tracking.enabled else None
    await asyncio.to_thread(store_credentials.load)
    store = object_store.default_store()
    await asyncio.to_thread(object_store.check_store, store)
    await _refuse_second_supervisor(store.sub(layout.run_prefix(name)), name, config)
    run = await asyncio.to_thread(supervisor.start, store, name, config, _deployment())
    await introduce(name, f"run:{name}")
    attempt = int(flow_run.get_run_count() or 1) - 1
    with HeartbeatWriter(
        run, "supervisor", "supervisor", attempt, config.supervise.heartbeat_interval_s
    ) as heartbeat:
        tracker = None if tracking is None else Tracker(run, name, config, tracking)
        async with _syncing(tracker, config.tracking.interval_s):
            stop = await _supervise(
                supervisor.Supervisor(
                    run=run, config=config, heartbeat=heartbeat, launcher=PrefectLauncher(name)
                )
            )
        await _close(name, tracker, stop, heartbeat)
    if stop.state == "failed":
        raise AstraFlowError(f"run {name} failed: {stop.reason}")
    return Outcome(name, stop.state, stop.reason)


def made_up_run_id(name: str) -> str:
    """Return `{name}-{date}-{time}-{4 hex digits of the flow run}`, the same for every retry of one
    flow run.
    """
    started = flow_run.get_scheduled_start_time()
    return f"{name}-{started:%Y%m%d-%H%M%S}-{str(flow_run.get_id() or 'x' * 4)[-4:]}"


async def _refuse_second_supervisor(run: ObjectStore, run_id: str, config: RunConfig) -> None:
    """Refuse to supervise a run whose supervisor is alive.

    A flow run that Prefect still shows is dead if its process is not on this machine and its
    heartbeat does not change for the time after which a member counts as lost.

    Raises:
        ConfigError: another supervisor is alive.
    """
    other = await rival(run_id)
    if other is None:
        return
    interval_s = config.supervise.heartbeat_interval_s
    before = await asyncio.to_thread(_last_heartbeat, run)
    for _ in range(math.ceil(config.supervise.heartbeat_limit_s / interval_s)):
        await asyncio.sleep(interval_s)
        now = await asyncio.to_thread(_last_heartbeat, run)
        if now is not None and now != before:
            raise _second_supervisor(run_id, other)
    if await asyncio.to_thread(flow_processes.cpu_seconds, other) is not None:
        raise _second_supervisor(run_id, other)  # it is alive, and slow


def _second_supervisor(run_id: str, flow_run_id: str) -> ConfigError:
    return ConfigError(
        f"run {run_id} is supervised already, by the flow run {flow_run_id}; `astraflow status "
        f"{run_id}` shows it, "
        f"`astraflow cancel {run_id}` ends it"
    )


def _last_heartbeat(run: ObjectStore) -> tuple[float, int] | None:
    """Return (start, number of heartbeats) of the run's supervisor; None without one, or when it
    has left.
    """
    beats = (
        beat
        for beat in heartbeats.readable(run)
        if beat.kind == "supervisor" and not beat.has_ended
    )
    return next(((beat.started_s, beat.beats) for beat in beats), None)


def _deployment() -> str:
    """Return the deployment, such as `astraflow/multi-policy`; empty for a flow that was called as
    a function.
    """
    return f"{flow_run.get_flow_name()}/{deployment.get_name()}" if deployment.get_name() else ""


async def _supervise(watcher: supervisor.Supervisor) -> Stop:
    """Supervise until the run is over. A cancelled flow run cancels the training run, whose members
    then leave.
    """
    async with sigterm_as_event() as sigterm:
        supervising = asyncio.create_task(watcher.supervise())
        terminated = asyncio.create_task(sigterm.wait())
        try:
            await asyncio.wait({supervising, terminated}, return_when=asyncio.FIRST_COMPLETED)
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
            supervising.cancel()
            terminated.cancel()


@contextlib.asynccontextmanager
async def _syncing(tracker: Tracker | None, interval_s: float) -> AsyncIterator[None]:
    """Sync MLflow in the background, so that an MLflow server that does not answer slows nothing.

    The block ends after the sync in flight, since a tracker is used by one thread at a time.
    """
    if tracker is None:
        yield
        return
    over = asyncio.Event()

    async def sync() -> None:
        while not over.is_set():
            await asyncio.to_thread(tracker.sync)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), interval_s)

    # urllib3 logs every retry; the tracker logs that MLflow does not answer once.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    syncing = asyncio.create_task(sync())
    try:
        yield
    finally:
        over.set()
        try:
            await syncing
        except Exception:  # whatever MLflow's client raises: curves are not worth a run
            log.exception("tracking ended early; the end of the run tries once more")


async def _close(
    run_id: str, tracker: Tracker | None, stop: Stop, heartbeat: HeartbeatWriter
) -> None:
    """Verify the run, write its report and track its end. Each may fail without failing the run,
    whose results are in the store.
    """

    def verifying(part: str, share: float) -> None:
        closing_steps.record(heartbeat, ClosingStep.VERIFYING, part, share)

    closing_steps.record(heartbeat, ClosingStep.VERIFYING)
    verdict = prefect_tasks.verify_run(run_id, verifying, return_state=True)
    closing_steps.record(heartbeat, ClosingStep.REPORTING)
    prefect_tasks.write_report(run_id, return_state=True)
    if tracker is not None:
        closing_steps.record(heartbeat, ClosingStep.TRACKING)
        tracked = prefect_tasks.finish_tracking(tracker, stop.state, return_state=True)
        link = await tracked.aresult(raise_on_failure=False)
        if isinstance(link, str):
            with _logged("the link to MLflow"):
                await acreate_link_artifact(
                    link=link, key="mlflow", description="MLflow: metrics, models, report"
                )
    result = await verdict.aresult(raise_on_failure=False)
    await _publish_summary(run_id, stop, result if isinstance(result, Verdict) else None)


async def _publish_summary(run_id: str, stop: Stop, verdict: Verdict | None) -> None:
    """Write the summary to Prefect's artifacts; an error is logged."""
    with _logged("the summary"):
        await acreate_markdown_artifact(
            key="run-summary",
            markdown=prefect_tasks.summary(run_id, stop, verdict),
            description=f"Run {run_id}",
        )


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log any error of Prefect's client or the store: no artifact is worth a run."""
    try:
        yield
    except Exception:
        log.exception("%s is not among Prefect's artifacts; the run is not affected", what)
