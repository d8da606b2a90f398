"""A Prefect server for tests without one: flow runs with all their states, in memory."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import states
from prefect.client.schemas.objects import CreatedBy, FlowRun, State, StateType

from tasks.supervision import automatic_restart, launcher, suspension
from tasks.supervision.launcher import CLOSING, SUSPENDING
from tasks.supervision.suspension import RESUMING

BEGIN = datetime.now(UTC) - timedelta(minutes=30)
NAMED = {
    "Scheduled": states.Scheduled,
    RESUMING: lambda: states.Scheduled(name=RESUMING),
    "Late": lambda: states.Late(),
    "Pending": states.Pending,
    "Running": states.Running,
    SUSPENDING: lambda: states.Running(name=SUSPENDING),
    CLOSING: lambda: states.Running(name=CLOSING),
    "Suspended": lambda: states.Suspended(timeout_seconds=300),
    "Paused": lambda: states.Paused(timeout_seconds=300),
    "Crashed": states.Crashed,
    "Cancelling": states.Cancelling,
    "Cancelled": states.Cancelled,
    "Failed": states.Failed,
}


def history(*names: str) -> list[State[Any]]:
    """States with these names, one a second."""
    result = []
    for second, name in enumerate(names):
        state: State[Any] = NAMED[name]()  # type: ignore[operator]  # all of them take no argument
        result.append(state.model_copy(update={"timestamp": BEGIN + timedelta(seconds=second)}))
    return result


class FlowRunStates:
    """Flow runs by id. Replaces the Prefect client of the modules that read states."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: dict[UUID, FlowRun] = {}
        self.states: dict[UUID, list[State[Any]]] = {}
        self.away = False
        self.rows_max: int | None = None
        """Of one response."""
        self.forced: list[bool] = []
        for module in (suspension, automatic_restart, launcher):
            monkeypatch.setattr(module, "get_client", self._client)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator["FlowRunStates"]:
        yield self

    def add(
        self,
        *names: str,
        deployed: bool = True,
        creator: str | None = None,
        name: str = "tiny-1",
        tags: Iterable[str] = ("run:tiny-1",),
    ) -> UUID:
        """Add a flow run that had the states with these names; it began when it was first Running."""
        flow_run_id, found = uuid4(), history(*names)
        running = [each.timestamp for each in found if each.type is StateType.RUNNING]
        self.states[flow_run_id] = found
        self.runs[flow_run_id] = FlowRun(
            id=flow_run_id,
            flow_id=uuid4(),
            name=name,
            tags=list(tags),
            deployment_id=uuid4() if deployed else None,
            created_by=CreatedBy(id=uuid4(), type=creator) if creator else None,
            start_time=running[0] if running else None,
            end_time=found[-1].timestamp if found[-1].is_final() else None,
        )
        return flow_run_id

    def names(self, flow_run_id: UUID) -> list[str | None]:
        return [state.name for state in self.states[flow_run_id]]

    def last(self, flow_run_id: UUID) -> State[Any]:
        return self.states[flow_run_id][-1]

    async def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        self._answer()
        state = self.last(flow_run_id)
        return self.runs[flow_run_id].model_copy(
            update={"state": state, "state_type": state.type, "state_name": state.name}
        )

    async def read_flow_run_states(self, flow_run_id: UUID) -> Sequence[State[Any]]:
        self._answer()
        return self.states[flow_run_id][::-1]  # in whatever order

    async def set_flow_run_state(
        self, flow_run_id: UUID, state: State[Any], force: bool = False
    ) -> None:
        self._answer()
        self.forced.append(force)
        self.states[flow_run_id].append(state)

    async def resume_flow_run(self, flow_run_id: UUID) -> None:
        self._answer()
        self.states[flow_run_id] += history(RESUMING)

    async def read_flow_runs(self, flow_run_filter: Any, **order: Any) -> list[FlowRun]:
        """Those with the name, the tags and one of the types of states, newest end first."""
        self._answer()
        named, tagged = flow_run_filter.name, flow_run_filter.tags
        found = [await self.read_flow_run(each) for each in self.runs]
        found.sort(key=lambda each: each.end_time or BEGIN, reverse=True)
        return [
            each
            for each in found
            if each.state_type in flow_run_filter.state.type.any_
            and set(tagged.all_) <= set(each.tags)
            and (named is None or each.name in named.any_)
            and (flow_run_filter.end_time is None or each.end_time is not None)
        ][: self.rows_max]

    def _answer(self) -> None:
        if self.away:
            raise httpx.ConnectError("away")
