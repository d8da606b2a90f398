"""One run from its recipe to its report: what the flow `astraflow` does, in order.

recipe ─▶ run.json ─▶ supervise … until every member is done or somebody stops it ─▶ report, verify, final tracking
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from prefect.artifacts import acreate_link_artifact, acreate_markdown_artifact
from prefect.runtime import deployment, flow_run

from storage import objects, runs
from storage.errors import AstraFlowError
from storage.heartbeats import Pulse
from storage.objects import ObjectStore
from storage.records import Stop
from storage.verify import Verdict
from tasks import prefect_tasks, recipes, supervisor
from tasks.config import RunConfig
from tasks.launcher import PrefectLauncher
from tasks.tracking import Tracker, tracking_uri

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run_id: str
    state: str
    reason: str


async def conduct(run_id: str | None, recipe: str, overrides: Mapping[str, Any]) -> Outcome:
    """Run the recipe to its end. Raises AstraFlowError when the run failed, with the reason."""
    config = recipes.load(recipe, overrides)
    name = run_id or made_up_run_id(config.name)
    store = objects.default_store()
    await asyncio.to_thread(objects.check, store)
    run = await asyncio.to_thread(supervisor.start, store, name, config, f"{flow_run.get_flow_name()}/{deployment.get_name()}")
    attempt = int(flow_run.get_run_count() or 1) - 1
    with Pulse(run, "supervisor", "supervisor", attempt, config.supervise.heartbeat_interval_s) as pulse:
        async with _tracking(run, name, config) as tracker:
            stop = await _supervise(supervisor.Supervisor(run, config, pulse, PrefectLauncher(name)), run)
            await _close(name, tracker, stop)
    if stop.state == "failed":
        raise AstraFlowError(f"run {name} failed: {stop.reason}")
    return Outcome(name, stop.state, stop.reason)


def made_up_run_id(name: str) -> str:
    """`{name}-{date}-{time}-{4 hex digits of the flow run}`: the same for every retry of one flow run."""
    started = flow_run.get_scheduled_start_time()
    return f"{name}-{started:%Y%m%d-%H%M%S}-{str(flow_run.get_id() or 'x' * 4)[-4:]}"


async def _supervise(watcher: supervisor.Supervisor, run: ObjectStore) -> Stop:
    """Supervise; a cancelled flow run cancels the training run, which its members then leave."""
    try:
        return await watcher.supervise()
    except asyncio.CancelledError:
        stop = Stop("cancelled", "the flow run was cancelled", time.time())
        await asyncio.to_thread(runs.request_stop, run, stop)
        raise


@contextlib.asynccontextmanager
async def _tracking(run: ObjectStore, run_id: str, config: RunConfig) -> AsyncIterator[Tracker | None]:
    """Sync MLflow in the background; a dead MLflow server slows nothing, the store remembers for it."""
    uri = tracking_uri()
    if not config.tracking.enabled or uri is None:
        yield None
        return
    tracker = Tracker(run, run_id, config, uri)

    async def sync_for_ever() -> None:
        while True:
            await asyncio.to_thread(tracker.sync)
            await asyncio.sleep(config.tracking.interval_s)

    syncing = asyncio.create_task(sync_for_ever())
    try:
        yield tracker
    finally:
        syncing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await syncing


async def _close(run_id: str, tracker: Tracker | None, stop: Stop) -> None:
    """Verify, report, last tracking. Each may fail without failing the run, whose results are in the store."""
    verdict = prefect_tasks.verify_run(run_id, return_state=True)
    prefect_tasks.write_report(run_id, return_state=True)
    if tracker is not None:
        tracked = prefect_tasks.finish_tracking(tracker, stop.state, return_state=True)
        link = await tracked.aresult(raise_on_failure=False)
        if isinstance(link, str):
            await acreate_link_artifact(link=link, key="mlflow", description="MLflow: metrics, models, report")
    found = await verdict.aresult(raise_on_failure=False)
    markdown = prefect_tasks.summary(run_id, stop, found if isinstance(found, Verdict) else None)
    await acreate_markdown_artifact(key="run-summary", markdown=markdown, description=f"Run {run_id}")
