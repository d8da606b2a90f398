"""The few questions that the stack and the command line put to Prefect about flow runs: start one,
how is it, what did it say, cancel them all.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from deployments.registration.client import connected
from storage.errors import ConfigError

CANCEL_TIMEOUT_S = 45.0
"""Longest time in which none of the cancelled flow runs ends. Prefect gives each 30 s before it
kills it.
"""
POLL_S = 0.5
PAGE = 200
"""Most rows the API returns at once."""
LOG_LINES_MAX = 200


@dataclass(frozen=True)
class FlowRun:
    """A flow run as a person sees it."""

    id: str
    state: str
    """Prefect's word: `Scheduled`, `Running`, `Crashed`, …"""
    final: bool
    message: str


def start(
    api_url: str, deployment: str, parameters: Mapping[str, Any], name: str, tags: list[str]
) -> FlowRun:
    """Creates a flow run of a deployment; a worker picks it up. Raises ConfigError when there is no
    such deployment.
    """
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

    with connected(api_url) as client:
        try:
            found = client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            known = (
                ", ".join(deployments_of(api_url, deployment.partition("/")[0]))
                or "none of this flow"
            )
            raise ConfigError(
                f"{api_url} has no deployment {deployment}; it has {known}; `astraflow deploy` "
                "registers ours"
            ) from None
        try:
            created = client.create_flow_run_from_deployment(
                found.id, parameters={**found.parameters, **parameters}, name=name, tags=tags
            )
        except PrefectHTTPStatusError as error:
            raise ConfigError(
                f"Prefect refused to start {deployment}: {error.response.text[:500]}"
            ) from error
        return _seen(created)


def deployments_of(api_url: str, flow: str) -> list[str]:
    """Full names of a flow's deployments, sorted."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    with connected(api_url) as client:
        found = client.read_deployments(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])), limit=PAGE
        )
    return sorted(f"{flow}/{row.name}" for row in found)


def read(api_url: str, flow_run_id: str) -> FlowRun:
    with connected(api_url) as client:
        return _seen(client.read_flow_run(UUID(flow_run_id)))


def logs(api_url: str, flow_run_id: str) -> list[str]:
    """The newest lines that the flow run logged to Prefect, oldest first."""
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.client.schemas.sorting import LogSort

    which = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[UUID(flow_run_id)]))
    with connected(api_url) as client:
        found = client.read_logs(log_filter=which, limit=LOG_LINES_MAX, sort=LogSort.TIMESTAMP_DESC)
    return [line.message for line in reversed(found)]


def cancel(api_url: str, flow_run_id: str) -> None:
    """Asks for the end of one flow run; a worker that has it sees to that."""
    from prefect.states import Cancelled, Cancelling

    with connected(api_url) as client:
        waiting = client.read_flow_run(UUID(flow_run_id)).state.is_scheduled()
        client.set_flow_run_state(
            UUID(flow_run_id), Cancelled() if waiting else Cancelling(), force=waiting
        )


def cancel_all(
    api_url: str,
    tag: str,
    processes_alive: bool,
    timeout_s: float = CANCEL_TIMEOUT_S,
    among: Callable[[Any], bool] = lambda flow_run: True,
) -> tuple[int, int]:
    """Cancels every unfinished flow run with the tag, `among` those that are meant, and waits until
    they are gone, or none has gone for `timeout_s`; runs that a schedule planned for later are
    left. Where no worker lives that could end them, they are declared cancelled at once. So is,
    after the wait, one that never ran: a process that starts in a cancelled flow run exits, and
    Prefect then leaves the flow run in Cancelling for ever. Returns how many were cancelled, and
    how many of them had not ended by then.
    """
    from prefect.states import Cancelled, Cancelling

    moved_at, fewest = time.monotonic(), math.inf
    asked: set[UUID] = set()
    while True:
        unfinished = [flow_run for flow_run in _unfinished(api_url, tag) if among(flow_run)]
        with connected(api_url) as client:
            for flow_run in unfinished:
                if flow_run.id not in asked:
                    asked.add(flow_run.id)
                    at_once = flow_run.state.is_scheduled() or not processes_alive
                    client.set_flow_run_state(
                        flow_run.id, Cancelled() if at_once else Cancelling(), force=at_once
                    )
        if len(unfinished) < fewest:
            moved_at, fewest = time.monotonic(), len(unfinished)
        if not unfinished or time.monotonic() - moved_at > timeout_s:
            running = [flow_run for flow_run in unfinished if flow_run.start_time is not None]
            with connected(api_url) as client:
                for flow_run in unfinished:
                    if flow_run not in running:
                        client.set_flow_run_state(flow_run.id, Cancelled(), force=True)
            return len(asked), len(running)
        time.sleep(POLL_S)


def _unfinished(api_url: str, tag: str) -> list[Any]:
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        FlowRunFilterTags,
    )
    from prefect.client.schemas.objects import StateType

    living = [
        StateType.SCHEDULED,
        StateType.PENDING,
        StateType.RUNNING,
        StateType.CANCELLING,
        StateType.PAUSED,
    ]
    which = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[tag]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=living)),
    )
    found: list[Any] = []
    with connected(api_url) as client:
        while True:
            page = client.read_flow_runs(flow_run_filter=which, limit=PAGE, offset=len(found))
            found += page
            if len(page) < PAGE:
                break
    return [run for run in found if not (run.auto_scheduled and run.state.is_scheduled())]


def _seen(flow_run: Any) -> FlowRun:
    state = flow_run.state
    return FlowRun(
        id=str(flow_run.id),
        state=state.name if state else "unknown",
        final=bool(state and state.is_final()),
        message=(state.message or "") if state else "",
    )
