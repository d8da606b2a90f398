"""The states of a supervisor's flow run in Prefect while its run is suspended and resumed.

    Suspended, by a person ─look─▶ Suspending: the members leave ─suspend─▶ Suspended
    Resume, by a person ─▶ Scheduled, named Resuming ─▶ a worker starts the same flow run again

Prefect's page suspends a flow run for a time, after which Prefect sets it to Failed, and offers to
resume it while its members still leave. So the flow run is `Suspending`, which is of the type
Running, until they have left, and then Suspended without a time limit. Once Prefect's engine has
noticed a suspension, it ends the process without the state that the flow returns; `settle` sets it.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, Pause
from prefect.states import Cancelled, Running, Suspended

from tasks.services.prefect_errors import UNANSWERED
from tasks.supervision.flow_processes import MARK
from tasks.supervision.launcher import CLOSING, SUSPENDING

log = logging.getLogger(__name__)

RESUMING = "Resuming"
"""Prefect's name of the scheduled state of a flow run that a person has resumed."""
BY_PREFECT = "its flow run was suspended in Prefect"
_WAITING = (StateType.SCHEDULED, StateType.PENDING)


def own_flow_runs() -> tuple[UUID, ...]:
    """Return the ids of the current flow run and of the flow run of this process, which is another
    one where the current one is a subflow, such as the training of a night. Empty outside of flows.
    """
    ids = (runtime.flow_run.get_id(), os.environ.get(MARK))
    return tuple(dict.fromkeys(UUID(str(each)) for each in ids if each))


@dataclass
class SuspensionWatch:
    """Notices that a person has suspended or resumed the flow run of this process."""

    flow_runs: Sequence[UUID]
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the flow run was resumed before its suspension was noticed: it gets a second process
    that supervises the run.
    """

    async def look(self, run_is_over: bool) -> bool:
        """Return whether the flow run was suspended since the last look; its state is then
        Suspending, or Closing when the run is over already.
        """
        noticed = False
        if not self.flow_runs:
            return noticed
        try:
            async with get_client() as client:
                for flow_run_id in self.flow_runs:
                    state = (await client.read_flow_run(flow_run_id)).state
                    if state is not None and state.type in _WAITING:
                        self.resumed.set()
                    if state is not None and state.type is StateType.PAUSED:
                        noticed = True
                        answer = _closing() if run_is_over else _suspending()
                        await client.set_flow_run_state(flow_run_id, answer, force=True)
        except (*UNANSWERED, ObjectNotFound) as error:
            log.debug("whether the run is suspended cannot be read from Prefect: %s", error)
        return noticed


def superseded() -> Pause:
    """Return the signal that ends this process and leaves the flow run to its second process."""
    return Pause(state=Suspended(message="the flow run was resumed in another process"))


async def suspend(run_id: str, reason: str) -> State[Any]:
    """End the process of a suspended run whose members have left; its flow run is Suspended.

    Returns the flow run's final state when it cannot be resumed in Prefect: when it has no
    deployment, or is being cancelled. The flow run of a night is suspended, not that of its run.

    Raises:
        Pause: Prefect's signal for a suspended flow run; the process exits with 0.
    """
    final: State[None] = Cancelled(
        message=f"{reason}; start the run again with the run id {run_id} to go on"
    )
    flow_runs = own_flow_runs()
    if not flow_runs:
        return final
    async with get_client() as client:
        process = await client.read_flow_run(flow_runs[-1])
        if process.deployment_id is None or _is_cancelled(process):
            return await _settle(client, flow_runs, final)
        await _suspend_outermost(client, flow_runs, final, reason)
        raise Pause(state=Suspended(message=reason))


async def settle(final: State[Any]) -> State[Any]:
    """Return `final`, the last state of the current flow run; set it where Prefect's engine would
    not, after a suspension that came when the run was over.

    Raises:
        Pause: the suspension is that of the night around this run; it can be resumed, and is if the
            run was cancelled.
    """
    flow_runs = own_flow_runs()
    if not flow_runs:
        return final
    try:
        async with get_client() as client:
            return await _settle(client, flow_runs, final)
    except (*UNANSWERED, ObjectNotFound) as error:
        log.warning("whether the flow run was suspended cannot be read from Prefect: %s", error)
        return final


async def _settle(
    client: PrefectClient, flow_runs: Sequence[UUID], final: State[Any]
) -> State[Any]:
    if not any([was_suspended(await read_states(client, each)) for each in flow_runs]):
        return final
    process = await client.read_flow_run(flow_runs[-1])
    if len(flow_runs) > 1 and process.deployment_id is not None and not _is_cancelled(process):
        await _suspend_outermost(client, flow_runs, final, BY_PREFECT)
        if final.is_cancelled():  # nobody would resume it: another process reports the night's end
            await client.resume_flow_run(flow_runs[-1])
        raise Pause(state=Suspended(message=BY_PREFECT))
    await client.set_flow_run_state(flow_runs[0], final, force=True)
    return final


async def _suspend_outermost(
    client: PrefectClient, flow_runs: Sequence[UUID], final: State[Any], reason: str
) -> None:
    """Suspend the flow run of this process without a time limit; one inside it gets `final`."""
    for inner in flow_runs[:-1]:
        await client.set_flow_run_state(inner, final, force=True)
    state: State[None] = Suspended(message=reason)
    await client.set_flow_run_state(flow_runs[-1], state, force=True)


async def read_states(client: PrefectClient, flow_run_id: UUID) -> Sequence[State[Any]]:
    """Read all states of a flow run, oldest first."""
    states = await client.read_flow_run_states(flow_run_id)
    return sorted(states, key=lambda state: state.timestamp)


def was_suspended(states: Sequence[State[Any]]) -> bool:
    """Return whether a flow run was suspended since its process was last started.

    Args:
        states: all states of the flow run, oldest first.
    """
    for state in reversed(states):
        if state.type in _WAITING:
            return False
        if state.type is StateType.PAUSED:
            return True
    return False


def last_mark(states: Sequence[State[Any]]) -> State[Any] | None:
    """Return the newest state that decides whether the flow run's run goes on: Suspended,
    Suspending, Resuming or a final one; None without any.
    """
    return next(filter(_decides, reversed(states)), None)


def _decides(state: State[Any]) -> bool:
    is_named = state.name in (SUSPENDING, RESUMING)
    return is_named or state.type is StateType.PAUSED or state.is_final()


async def retire_suspended(run_id: str) -> None:
    """Cancel the suspended flow runs of a run that goes on in the current one: resumed later, they
    would be refused.
    """
    suspended = FlowRunFilter(
        name=FlowRunFilterName(any_=[run_id]),
        tags=FlowRunFilterTags(all_=[f"run:{run_id}"]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED])),
    )
    state: State[None] = Cancelled(message="the run goes on in another flow run")
    try:
        async with get_client() as client:
            for each in await client.read_flow_runs(flow_run_filter=suspended):
                if each.id not in own_flow_runs():
                    await client.set_flow_run_state(each.id, state, force=True)
    except (*UNANSWERED, ObjectNotFound) as error:
        log.warning("suspended flow runs of %s stay in Prefect: %s", run_id, error)


@contextmanager
def ignored() -> Iterator[None]:
    """Run the flow's tasks in the block also after a suspension; Prefect would end the flow at the
    next task, and a run that is over would not be closed.
    """
    context = FlowRunContext.get()
    if context is None:
        yield
        return
    never = type(context.flow_run_suspension_request)()
    with context.model_copy(update={"flow_run_suspension_request": never}):
        yield


def _suspending() -> State[None]:
    return Running(name=SUSPENDING, message="the members save their work and leave")


def _closing() -> State[None]:
    return Running(name=CLOSING, message="it was over when it was suspended")


def _is_cancelled(flow_run: FlowRun) -> bool:
    state = flow_run.state
    return state is not None and (state.is_cancelling() or state.is_cancelled())
