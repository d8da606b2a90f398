"""The logs of a run at a Prefect server: those of the flow runs of its supervisor and its members,
of every attempt, merged by time.
"""

import datetime
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from deployments.registration.client import connected
from deployments.registration.flow_runs import PAGE
from storage.errors import ConfigError
from storage.plain_names import NAME
from storage.store.addresses import without_credentials
from tasks.services.prefect_settings import COMMAND, RequestLimits, import_prefect

SUPERVISOR = "supervisor"
FLOW_RUNS_MAX = 2000
"""Flow runs whose logs are read: the newest ones of a run."""
RECORDS_MAX = 10_000
"""New log records of one poll; the next poll returns the others."""


@dataclass(frozen=True)
class Members:
    """The flow runs of a run."""

    of_flow_run: Mapping[UUID, str]
    """Flow run → member."""
    all_ended: bool


def find(api_url: str, run_id: str, limits: RequestLimits = COMMAND) -> Members:
    """Find the flow runs of a run. Raises ConfigError when the server has none."""
    import_prefect()
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterParentFlowRunId,
        FlowRunFilterTags,
    )

    tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"run:{run_id}"]))
    with connected(api_url, limits) as client:
        found = _flow_runs(client, tagged)
        if not found:
            raise ConfigError(
                f"the Prefect server at {without_credentials(api_url)} has no flow run of "
                f"{run_id}; name a run of `astraflow runs`, and in PREFECT_API_URL the server on "
                "which it was started"
            )
        parents = FlowRunFilterParentFlowRunId(any_=[row.id for row in found])
        children = _flow_runs(client, FlowRunFilter(parent_flow_run_id=parents))
    return Members(
        {row.id: _member(row) for row in (*found, *children)},
        all(row.state is not None and row.state.is_final() for row in found),
    )


def newest(
    api_url: str, flow_runs: Collection[UUID], num_lines: int, limits: RequestLimits = COMMAND
) -> list[Any]:
    """Return the newest log records of these flow runs, oldest first."""
    from prefect.client.schemas.sorting import LogSort

    records: list[Any] = []
    with connected(api_url, limits) as client:
        while len(records) < num_lines:
            page = client.read_logs(
                _of(flow_runs),
                limit=min(PAGE, num_lines - len(records)),
                offset=len(records),
                sort=LogSort.TIMESTAMP_DESC,
            )
            records += page
            if len(page) < PAGE:
                break
    return records[::-1]


def since(
    api_url: str,
    flow_runs: Collection[UUID],
    at: datetime.datetime | None,
    known: Container[UUID] = (),
    limits: RequestLimits = COMMAND,
) -> list[Any]:
    """Return the log records of these flow runs from a time on, oldest first; all for None.

    Those with an id in `known` are left out. RECORDS_MAX records or more: there may be others.
    """
    from prefect.client.schemas.sorting import LogSort

    records: list[Any] = []
    num_read = 0
    with connected(api_url, limits) as client:
        while len(records) < RECORDS_MAX:
            page = client.read_logs(
                _of(flow_runs, at), limit=PAGE, offset=num_read, sort=LogSort.TIMESTAMP_ASC
            )
            num_read += len(page)
            records += [record for record in page if record.id not in known]
            if len(page) < PAGE:
                break
    return records


def _of(flow_runs: Collection[UUID], at: datetime.datetime | None = None) -> Any:
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp

    return LogFilter(
        flow_run_id=LogFilterFlowRunId(any_=list(flow_runs)),
        timestamp=None if at is None else LogFilterTimestamp(after_=at),
    )


def _flow_runs(client: Any, which: Any) -> list[Any]:
    """Return the newest flow runs that a filter selects."""
    from prefect.client.schemas.sorting import FlowRunSort

    rows: list[Any] = []
    while len(rows) < FLOW_RUNS_MAX:
        page = client.read_flow_runs(
            flow_run_filter=which,
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=PAGE,
            offset=len(rows),
        )
        rows += page
        if len(page) < PAGE:
            break
    return rows


def _member(flow_run: Any) -> str:
    """Return the member that a flow run is an attempt of, or a part of one; else the supervisor."""
    tags = [tag.removeprefix("member:") for tag in flow_run.tags if tag.startswith("member:")]
    named = tags[0] if tags else flow_run.parameters.get("member")
    return named if isinstance(named, str) and NAME.fullmatch(named) else SUPERVISOR
