"""How the current supervisor was started: by a person, by an automation after the one before it
died, or by a person who resumed its suspended flow run.

Unlike a person who starts a run again, an automation does not mean to take up a run that was
stopped: such a supervisor completes what the one before it could not, the end of the run. Nor does
an automation count: a run whose supervisors keep dying fails here.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort

from storage.errors import AstraFlowError
from storage.records.control import Stop
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.services.prefect_errors import UNANSWERED
from tasks.supervision import suspension
from tasks.supervision.launcher import SUSPENDING

log = logging.getLogger(__name__)

WINDOW = timedelta(hours=1)
"""Supervisors that died earlier do not count."""
AUTOMATION = "AUTOMATION"
"""Prefect's name of the creator of a flow run that an automation has started."""


class Start(Enum):
    REQUESTED = "requested"
    """By a person, who means to take up a run that was stopped."""
    RESUMED = "resumed"
    """By a person, in the flow run that was suspended."""
    AUTOMATIC = "automatic"
    """By no person: a stop of the run stays."""


async def read_start() -> Start:
    """Return how the flow run of this process was started; REQUESTED if Prefect does not answer."""
    flow_runs = suspension.own_flow_runs()
    if not flow_runs:
        return Start.REQUESTED
    try:
        async with get_client() as client:
            creator = (await client.read_flow_run(flow_runs[-1])).created_by
            states = await suspension.read_states(client, flow_runs[-1])
    except UNANSWERED as error:
        log.warning("cannot read from Prefect who has started this flow run: %s", error)
        return Start.REQUESTED
    return start_of(creator.type if creator else None, states)


def start_of(creator: str | None, states: Sequence[State[Any]]) -> Start:
    """Return how a flow run was started, from all of its states, oldest first.

    A process that is started again without a person's request, such as a pod that was moved while
    its run was being suspended, continues the suspension.
    """
    mark = suspension.last_mark(states)
    if mark is not None and mark.name == suspension.RESUMING:
        return Start.RESUMED
    if mark is not None and not mark.is_final():
        return Start.AUTOMATIC
    return Start.AUTOMATIC if creator == AUTOMATION else Start.REQUESTED


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
    async with get_client() as client:
        return len(await _crashed(client, run_id))


async def died_suspended(run_id: str) -> bool:
    """Return whether the newest supervisor that died had been suspended; it may have died before it
    stored that. False while Prefect does not answer.
    """
    try:
        async with get_client() as client:
            crashed = await _crashed(client, run_id)
            if not crashed:
                return False
            states = await suspension.read_states(client, crashed[0].id)
    except UNANSWERED as error:
        log.warning("cannot read from Prefect whether the supervisor was suspended: %s", error)
        return False
    before = [state for state in states if not state.is_final()][-1:]
    return any(each.type is StateType.PAUSED or each.name == SUSPENDING for each in before)


async def _crashed(client: PrefectClient, run_id: str) -> Sequence[FlowRun]:
    """Read the supervisors of the run that died within WINDOW, newest first."""
    which = FlowRunFilter(
        name=FlowRunFilterName(any_=[run_id]),  # the run's members have other names
        tags=FlowRunFilterTags(all_=[f"run:{run_id}"]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
        end_time=FlowRunFilterEndTime(after_=datetime.now(UTC) - WINDOW),
    )
    return await client.read_flow_runs(flow_run_filter=which, sort=FlowRunSort.END_TIME_DESC)
