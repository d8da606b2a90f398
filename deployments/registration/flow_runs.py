"""Start, read, resume and cancel flow runs on a Prefect server, and read their logs."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from deployments.registration.client import connected
from storage.errors import ConfigError
from tasks.services.prefect_settings import COMMAND, RequestLimits, import_prefect

CANCEL_TIMEOUT_S = 45.0
"""Longest time without the end of any cancelled flow run. Prefect kills each after 30 s."""
POLL_S = 0.5
PAGE = 200
"""Maximum number of rows in one response of the API."""
LOG_LINES_MAX = 200
PARENTS_MAX = 3
"""Flow runs around that of a supervisor: a night is one."""


@dataclass(frozen=True)
class FlowRun:
    """The state of a flow run. Example: `FlowRun("5f…", "Crashed", True, "…")`."""

    id: str
    state: str
    """Prefect's name of it: `Scheduled`, `Running`, `Crashed`, …"""
    final: bool
    message: str
    created_s: float = 0.0
    """Unix time."""
    is_suspended: bool = False
    """It has no process until a person resumes it."""


def start(
    api_url: str, deployment: str, parameters: Mapping[str, Any], name: str, tags: list[str]
) -> FlowRun:
    """Create a flow run of a deployment, which a worker then starts.

    Raises ConfigError when the server has no such deployment.
    """
    import_prefect()
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

    with connected(api_url) as client:
        try:
            target = client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            names = deployments_of(api_url, deployment.partition("/")[0])
            raise ConfigError(
                f"{api_url} has no deployment {deployment}; it has "
                f"{', '.join(names) or 'none of this flow'}; `astraflow deploy` registers those of "
                "AstraFlow"
            ) from None
        try:
            created = client.create_flow_run_from_deployment(
                target.id,
                parameters={**target.parameters, **parameters},
                name=name,
                tags=tags,
                idempotency_key=str(uuid4()),  # a retried request must not start a second run
            )
        except PrefectHTTPStatusError as error:
            raise ConfigError(
                f"Prefect refused to start {deployment}: {error.response.text[:500]}"
            ) from error
        return _state_of(created)


def deployments_of(api_url: str, flow: str) -> list[str]:
    """Return the full names of a flow's deployments, sorted."""
    import_prefect()
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    with connected(api_url) as client:
        rows = client.read_deployments(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])), limit=PAGE
        )
    return sorted(f"{flow}/{row.name}" for row in rows)


def read(api_url: str, flow_run_id: str, limits: RequestLimits = COMMAND) -> FlowRun:
    """Return the state of a flow run."""
    with connected(api_url, limits) as client:
        return _state_of(client.read_flow_run(UUID(flow_run_id)))


def newest_supervisor(api_url: str, run_id: str, limits: RequestLimits = COMMAND) -> FlowRun | None:
    """Return the newest flow run that supervises the run; None for none."""
    import_prefect()
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterName,
        FlowRunFilterTags,
    )
    from prefect.client.schemas.sorting import FlowRunSort

    which = FlowRunFilter(
        name=FlowRunFilterName(any_=[run_id]), tags=FlowRunFilterTags(all_=[f"run:{run_id}"])
    )
    with connected(api_url, limits) as client:
        found = client.read_flow_runs(
            flow_run_filter=which, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1
        )
    return _state_of(found[0]) if found else None


def resume(api_url: str, run_id: str, suspended_s: float) -> FlowRun | None:
    """Resume the suspended flow run that supervises the run, or the night around it; return it.

    None when there is none. Raises ConfigError when its supervisor has not left yet, when it was
    resumed since `suspended_s`, or Prefect refuses.
    """
    with connected(api_url) as client:
        flow_run = _suspended_or_own(client, api_url, run_id)
        if flow_run is None or _state_of(flow_run).final:
            return None
        if _goes_on(flow_run, suspended_s):
            raise ConfigError(
                f"{run_id} is being resumed already; `astraflow status {run_id}` shows its state"
            )
        if not _state_of(flow_run).is_suspended:
            raise ConfigError(
                f"the flow run {flow_run.name} is {_state_of(flow_run).state}, not yet Suspended: "
                f"the members of {run_id} still save their work; repeat the command when they "
                "have left"
            )
        return _resume(client, flow_run)


def resume_if_suspended(api_url: str, run_id: str) -> FlowRun | None:
    """Resume as `resume` does; None, too, for a flow run whose process has not left."""
    with connected(api_url) as client:
        flow_run = _suspended_or_own(client, api_url, run_id)
        if flow_run is None or not _state_of(flow_run).is_suspended:
            return None
        return _resume(client, flow_run)


def is_being_resumed(api_url: str, run_id: str, suspended_s: float) -> bool:
    """Return whether a run with a suspension of this time is being resumed: its supervisor, which
    deletes the suspension, has not begun.
    """
    with connected(api_url) as client:
        flow_run = _suspended_or_own(client, api_url, run_id)
        return flow_run is not None and _goes_on(flow_run, suspended_s)


def is_taken_up(api_url: str, run_id: str, suspended_s: float) -> bool:
    """Return whether such a run is being resumed by a process that was started already."""
    with connected(api_url) as client:
        flow_run = _suspended_or_own(client, api_url, run_id)
        return (
            flow_run is not None
            and _goes_on(flow_run, suspended_s)
            and not flow_run.state.is_scheduled()
        )


def _goes_on(flow_run: Any, suspended_s: float) -> bool:
    """Return whether the flow run was resumed or started since then."""
    from tasks.supervision.launcher import SUSPENDING

    state = flow_run.state
    if state is None or state.is_final() or state.is_paused() or state.is_cancelling():
        return False
    resumed: bool = state.name != SUSPENDING and state.timestamp.timestamp() > suspended_s
    return resumed


def _suspended_or_own(client: Any, api_url: str, run_id: str) -> Any:
    """Return the suspended flow run that supervises the run, or the night around it; without one,
    that of the run or of what is around it. None when there is none.
    """
    newest = newest_supervisor(api_url, run_id)
    if newest is None:
        return None
    flow_run = client.read_flow_run(UUID(newest.id))
    for _ in range(PARENTS_MAX):
        if _state_of(flow_run).is_suspended or flow_run.parent_task_run_id is None:
            break
        flow_run = client.read_flow_run(
            client.read_task_run(flow_run.parent_task_run_id).flow_run_id
        )
    return flow_run


def _resume(client: Any, flow_run: Any) -> FlowRun:
    answer = client.resume_flow_run(flow_run.id)
    if answer.state is None or answer.state.is_paused():
        raise ConfigError(
            f"Prefect does not resume the flow run {flow_run.name}: {answer.details.reason}"
        )
    return _state_of(flow_run)


def logs(api_url: str, flow_run_id: str) -> list[str]:
    """Return the newest messages that the flow run logged to Prefect, oldest first."""
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.client.schemas.sorting import LogSort

    which = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[UUID(flow_run_id)]))
    with connected(api_url) as client:
        rows = client.read_logs(log_filter=which, limit=LOG_LINES_MAX, sort=LogSort.TIMESTAMP_DESC)
    return [row.message for row in reversed(rows)]


def cancel(api_url: str, flow_run_id: str) -> None:
    """Cancel one flow run; the worker that runs it ends its process."""
    from prefect.states import Cancelled, Cancelling

    with connected(api_url) as client:
        is_scheduled = client.read_flow_run(UUID(flow_run_id)).state.is_scheduled()
        client.set_flow_run_state(
            UUID(flow_run_id), Cancelled() if is_scheduled else Cancelling(), force=is_scheduled
        )


def cancel_all(
    api_url: str,
    tag: str,
    processes_alive: bool,
    timeout_s: float = CANCEL_TIMEOUT_S,
    among: Callable[[Any], bool] = lambda flow_run: True,
) -> tuple[int, int]:
    """Cancel the unfinished flow runs with the tag for which `among` is true, and wait for them.

    The wait ends when all have ended, or when none has ended for `timeout_s`. Flow runs that a
    schedule has planned for later are not cancelled. Where no worker is running
    (`processes_alive`), flow runs are set to Cancelled at once. So are, after the wait, those that
    never ran: a process that starts in a cancelled flow run exits, and Prefect leaves the flow run
    in Cancelling. Return the number of cancelled flow runs, and of those that have not ended.
    """
    import_prefect()
    from prefect.states import Cancelled, Cancelling

    progress_at, fewest = time.monotonic(), math.inf
    cancelled: set[UUID] = set()
    while True:
        unfinished = [flow_run for flow_run in _unfinished(api_url, tag) if among(flow_run)]
        with connected(api_url) as client:
            for flow_run in unfinished:
                if flow_run.id not in cancelled:
                    cancelled.add(flow_run.id)
                    at_once = flow_run.state.is_scheduled() or not processes_alive
                    client.set_flow_run_state(
                        flow_run.id, Cancelled() if at_once else Cancelling(), force=at_once
                    )
        if len(unfinished) < fewest:
            progress_at, fewest = time.monotonic(), len(unfinished)
        if not unfinished or time.monotonic() - progress_at > timeout_s:
            running = [flow_run for flow_run in unfinished if flow_run.start_time is not None]
            with connected(api_url) as client:
                for flow_run in unfinished:
                    if flow_run not in running:
                        client.set_flow_run_state(flow_run.id, Cancelled(), force=True)
            return len(cancelled), len(running)
        time.sleep(POLL_S)


def _unfinished(api_url: str, tag: str) -> list[Any]:
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        FlowRunFilterTags,
    )
    from prefect.client.schemas.objects import StateType

    unfinished = [
        *(StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING),
        StateType.CANCELLING,  # suspended ones have no process, and wait for a person
    ]
    which = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[tag]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=unfinished)),
    )
    flow_runs: list[Any] = []
    with connected(api_url) as client:
        while True:
            page = client.read_flow_runs(flow_run_filter=which, limit=PAGE, offset=len(flow_runs))
            flow_runs += page
            if len(page) < PAGE:
                break
    return [run for run in flow_runs if not (run.auto_scheduled and run.state.is_scheduled())]


def _state_of(flow_run: Any) -> FlowRun:
    state = flow_run.state
    return FlowRun(
        id=str(flow_run.id),
        state=state.name if state else "unknown",
        final=bool(state and state.is_final()),
        message=(state.message or "") if state else "",
        created_s=flow_run.created.timestamp() if flow_run.created else 0.0,
        is_suspended=bool(state and state.is_paused()),
    )
