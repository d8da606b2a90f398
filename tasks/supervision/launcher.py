"""Flow runs of members in Prefect: launch, read the newest, cancel. No decisions are made here.

A member's flow runs have the tags `run:{run id}` and `member:{member id}`, by which a restarted
supervisor finds them; for people, also `attempt:{number from 1}`, and `policy:`, `node:` or
`region:` where the member has one. While Prefect does not answer, the calls return None and log it.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort, LogSort
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Cancelled, Cancelling, Crashed

from storage.errors import ConfigError
from tasks.services import last_words
from tasks.services.attempt_names import attempt_name
from tasks.services.prefect_errors import UNANSWERED
from tasks.services.prefect_settings import SERVER_ERROR, TRY_LATER
from tasks.supervision.members import FlowRunPhase, Member

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 1_000_000
"""A flow run with a higher attempt was not launched by a supervisor."""
SUSPENDING, CLOSING = "Suspending", "Closing"
"""Names of Running states of a supervisor: of a suspended run whose members leave, and of a run
that was over when it was suspended.
"""
_CREATED_TWICE = "Data integrity conflict"
"""Begin of the server's answer when two requests create one row at the same time, such as the work
queue of a new region. The next request finds the row."""
_PAGE = 200
"""Most rows the API returns at once."""


@dataclass(frozen=True)
class Launched:
    """A member's newest flow run."""

    attempt: int
    phase: FlowRunPhase
    flow_run_id: str
    state_name: str
    message: str = ""
    """Of that state, for people."""


class Launcher(Protocol):
    """Starts, reads and ends the flow runs of a run's members."""

    async def launch(self, member: Member, attempt: int) -> Launched | None: ...
    async def newest(self) -> Mapping[str, Launched] | None: ...
    async def declare_crashed(self, launched: Launched, reason: str) -> None: ...
    async def cancel(self, launched: Launched) -> None: ...
    async def bury(self, ended: Sequence[Launched]) -> None: ...
    async def last_words(self, ended: Launched) -> Sequence[str]: ...


class PrefectLauncher:
    """The launcher of one run's flow runs in Prefect."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._tags = ["astraflow", f"run:{run_id}"]

    async def launch(self, member: Member, attempt: int) -> Launched | None:
        """Have Prefect start an attempt; None when Prefect does not answer. A repeated call returns
        the same flow run, by its idempotency key.

        Prefect creates the member's work queue when the deployment's pool has none of this name.

        Raises:
            ConfigError: the server has no such deployment, or refuses to run it.
        """
        try:
            flow_run = await arun_deployment(
                member.deployment,
                parameters={
                    "run_id": self._run_id,
                    "member": member.id,
                    "attempt": attempt,
                    **member.parameters,
                },
                timeout=0,
                flow_run_name=attempt_name(member.id, attempt, self._run_id),
                tags=[*self._tags, *_tags(member, attempt)],
                idempotency_key=f"{self._run_id}:{member.id}:{attempt}",
                work_queue_name=member.queue or None,
            )
        except ObjectNotFound as error:
            raise ConfigError(
                f"the Prefect server has no deployment {member.deployment!r}; register the "
                "deployments: astraflow deploy"
            ) from error
        except (*UNANSWERED, ValueError) as error:  # ValueError: a name other than FLOW/DEPLOYMENT
            if not _is_unreachable(error):
                raise ConfigError(
                    f"the deployment {member.deployment!r} cannot be run: {error}"
                ) from error
            log.warning("could not launch %s: %s", member.id, error)
            return None
        return _launched(flow_run)

    async def newest(self) -> Mapping[str, Launched] | None:
        """Read member id → newest flow run, for every member ever launched; None when Prefect does
        not answer.
        """
        newest: dict[str, Launched] = {}
        try:
            async with get_client() as client:
                flow_runs = await _read_all(
                    client, FlowRunFilter(tags=FlowRunFilterTags(all_=self._tags))
                )
        except UNANSWERED as error:
            log.warning("cannot read the members' flow runs from Prefect: %s", error)
            return None
        for flow_run in filter(_has_attempt, flow_runs):
            launched = _launched(flow_run)
            for member in (
                tag.partition(":")[2] for tag in flow_run.tags if tag.startswith("member:")
            ):
                if member not in newest or newest[member].attempt < launched.attempt:
                    newest[member] = launched
        return newest

    async def declare_crashed(self, launched: Launched, reason: str) -> None:
        """Set the flow run's state to Crashed; Prefect alone does not detect a lost machine.

        If the process still lives, it leaves at its successor's first heartbeat; until then objects
        that are created once keep the two apart.
        """
        await _set_state(UUID(launched.flow_run_id), Crashed(message=reason), force=True)

    async def cancel(self, launched: Launched) -> None:
        """Cancel the flow run: its process is ended; one that waits for a worker is never started.

        While a process is starting no worker would end it, and its flow run would stay in
        Cancelling for ever, so it is set to Cancelled. Prefect runs such a process all the same
        once it has started; it then ends at the run's stop.
        """
        state = Cancelling if launched.phase is FlowRunPhase.RUNNING else Cancelled
        await _set_state(
            UUID(launched.flow_run_id), state(message="the run has ended"), force=False
        )

    async def bury(self, ended: Sequence[Launched]) -> None:
        """Set the unfinished child flow runs of ended ones to Crashed; when their process was
        killed, Prefect would show them as running for ever.
        """
        parents = FlowRunFilterParentFlowRunId(
            any_=[UUID(launched.flow_run_id) for launched in ended]
        )
        unfinished = FlowRunFilterState(type=FlowRunFilterStateType(not_any_=list(TERMINAL_STATES)))
        try:
            async with get_client() as client:
                children = await _read_all(
                    client, FlowRunFilter(parent_flow_run_id=parents, state=unfinished)
                )
        except UNANSWERED as error:
            log.warning("cannot read unfinished child flow runs from Prefect: %s", error)
            return
        for flow_run in children:
            await _set_state(
                flow_run.id, Crashed(message="the process it ran in has ended"), force=True
            )

    async def last_words(self, ended: Launched) -> Sequence[str]:
        """Return the last lines that the flow run's process wrote here; those of its log and its
        children's in Prefect if it ran on another machine.
        """
        lines = await asyncio.to_thread(last_words.of_file, ended.flow_run_id)
        if lines:
            return lines
        flow_run_id = UUID(ended.flow_run_id)
        parents = FlowRunFilterParentFlowRunId(any_=[flow_run_id])
        try:
            async with get_client() as client:
                children = await _read_all(client, FlowRunFilter(parent_flow_run_id=parents))
                ids = [flow_run_id, *(child.id for child in children)]
                records = await client.read_logs(
                    LogFilter(flow_run_id=LogFilterFlowRunId(any_=ids)),
                    limit=last_words.LINES_MAX,
                    sort=LogSort.TIMESTAMP_DESC,
                )
        except UNANSWERED as error:
            log.warning("cannot read the log of a flow run from Prefect: %s", error)
            return []
        return last_words.shown(
            line for record in reversed(records) for line in record.message.splitlines()
        )


async def introduce(name: str, tag: str) -> None:
    """Give the current flow run a name and one more tag, such as `run:tiny-1`."""
    flow_run_id = UUID(str(runtime.flow_run.get_id()))
    try:
        async with get_client() as client:
            tags = {*(await client.read_flow_run(flow_run_id)).tags, tag}
            await client.update_flow_run(flow_run_id, name=name, tags=tags)
    except UNANSWERED as error:
        log.warning("could not name this flow run %s: %s", name, error)


@dataclass(frozen=True)
class Rival:
    """A flow run that supervises the same training run."""

    flow_run_id: str
    is_suspended: bool = False


async def rival(run_id: str) -> Rival | None:
    """Return an earlier flow run that supervises the training run and has not ended; one that is
    not suspended before one that is.

    None if no such flow run exists, or Prefect does not respond.
    """
    own_id = UUID(str(runtime.flow_run.get_id()))
    living = FlowRunFilterState(
        type=FlowRunFilterStateType(
            any_=[StateType.RUNNING, StateType.CANCELLING, StateType.PAUSED]
        )
    )
    named = FlowRunFilter(
        name=FlowRunFilterName(any_=[run_id]),
        tags=FlowRunFilterTags(all_=[f"run:{run_id}"]),
        state=living,
    )
    try:
        async with get_client() as client:
            current = await client.read_flow_run(own_id)
            candidates = await _read_all(client, named)
    except UNANSWERED as error:
        log.warning("cannot read from Prefect which flow runs supervise %s: %s", run_id, error)
        return None
    own_start = _process_start(current)
    earlier = [
        Rival(str(each.id), each.state_type is StateType.PAUSED)
        for each in candidates
        if (start := _process_start(each)) and own_start and start < own_start
    ]
    return min(earlier, key=lambda each: each.is_suspended, default=None)


def _process_start(flow_run: FlowRun) -> datetime | None:
    """Return when the flow run's process was started last, or earlier: a resumed flow run keeps the
    start of its first process.
    """
    state = flow_run.state
    if state is not None and state.is_running() and state.name not in (SUSPENDING, CLOSING):
        return state.timestamp
    return flow_run.start_time


def _tags(member: Member, attempt: int) -> list[str]:
    of_member = [f"{key}:{value}" for key, value in member.parameters.items()]
    return [f"member:{member.id}", *of_member, f"attempt:{attempt + 1}"]


def _is_unreachable(error: Exception) -> bool:
    """Whether the same call may succeed later without any correction."""
    if isinstance(error, PrefectHTTPStatusError):
        status = error.response.status_code
        return (
            status >= SERVER_ERROR or status in TRY_LATER or _CREATED_TWICE in error.response.text
        )
    return isinstance(error, UNANSWERED)


async def _set_state(flow_run_id: UUID, state: State[None], force: bool) -> None:
    try:
        async with get_client() as client:
            await client.set_flow_run_state(flow_run_id, state, force=force)
    except (*UNANSWERED, ObjectNotFound) as error:
        log.warning("could not set the state of flow run %s: %s", flow_run_id, error)


async def _read_all(client: PrefectClient, which: FlowRunFilter) -> Sequence[FlowRun]:
    rows: list[FlowRun] = []
    while True:
        page = await client.read_flow_runs(
            flow_run_filter=which, sort=FlowRunSort.START_TIME_DESC, limit=_PAGE, offset=len(rows)
        )
        rows += page
        if len(page) < _PAGE:
            return rows


def _has_attempt(flow_run: FlowRun) -> bool:
    """Return whether a flow run is an attempt: others may have the tags of a member, too."""
    attempt = flow_run.parameters.get("attempt", 0)
    return type(attempt) is int and 0 <= attempt <= ATTEMPTS_MAX


def _launched(flow_run: FlowRun) -> Launched:
    state = flow_run.state
    if state is None or state.is_scheduled():
        phase = FlowRunPhase.SCHEDULED
    elif state.is_pending():
        phase = FlowRunPhase.PENDING
    elif state.is_final():
        phase = FlowRunPhase.ENDED
    else:
        phase = FlowRunPhase.RUNNING
    return Launched(
        attempt=int(flow_run.parameters.get("attempt", 0)),
        phase=phase,
        flow_run_id=str(flow_run.id),
        state_name=state.name or "" if state else "",
        message=state.message or "" if state else "",
    )
