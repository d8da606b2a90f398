"""A supervisor that an automation has started, because the one before it died.

Unlike a person who starts a run again, an automation does not mean to take up a run that was
stopped: such a supervisor completes what the one before it could not, the end of the run. Nor does
an automation count: a run whose supervisors keep dying fails here.
"""

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import StateType

from storage.errors import AstraFlowError
from storage.records.control import Stop
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.services.prefect_errors import UNANSWERED

log = logging.getLogger(__name__)

WINDOW = timedelta(hours=1)
"""Supervisors that died earlier do not count."""
AUTOMATION = "AUTOMATION"
"""Prefect's name of the creator of a flow run that an automation has started."""


async def is_automatic() -> bool:
    """Return whether an automation has created the current flow run."""
    flow_run_id = runtime.flow_run.get_id()
    if not flow_run_id:
        return False
    try:
        async with get_client() as client:
            creator = (await client.read_flow_run(UUID(flow_run_id))).created_by
    except UNANSWERED as error:
        log.warning("cannot read from Prefect who has started this flow run: %s", error)
        return False
    return creator is not None and creator.type == AUTOMATION


async def enforce_limit(run: ObjectStore, run_id: str, restarts_max: int) -> None:
    """Fail the run if more than `restarts_max` of its supervisors have died within WINDOW.

    Its members then leave. Raises AstraFlowError.
    """
    try:
        num_crashed = await _num_crashed(run_id)
    except UNANSWERED as error:
        log.warning("cannot read from Prefect how often the supervisor died: %s", error)
        return
    if num_crashed <= restarts_max:
        return
    reason = (
        f"its supervisor died {num_crashed} times within an hour; the logs of its flow runs say "
        "more"
    )
    await asyncio.to_thread(runs.request_stop, run, Stop("failed", reason, time.time()))
    raise AstraFlowError(f"run {run_id} failed: {reason}")


async def _num_crashed(run_id: str) -> int:
    which = FlowRunFilter(
        name=FlowRunFilterName(any_=[run_id]),  # the run's members have other names
        tags=FlowRunFilterTags(all_=[f"run:{run_id}"]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
        end_time=FlowRunFilterEndTime(after_=datetime.now(UTC) - WINDOW),
    )
    async with get_client() as client:
        return len(await client.read_flow_runs(flow_run_filter=which))
