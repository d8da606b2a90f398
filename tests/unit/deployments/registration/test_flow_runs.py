"""Cancelling flow runs: the rest is waited for while flow runs end one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType

from deployments.registration import flow_runs


class Server:
    """Flow runs that end one by one, one at every poll; polls are `look_s` apart."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, look_s: float, ends: bool = True
    ) -> None:
        self.now_s, self.look_s, self.ends = 0.0, look_s, ends
        state = SimpleNamespace(is_scheduled=lambda: False)
        self.living = [
            SimpleNamespace(id=uuid4(), state=state, start_time="12:00") for _ in range(count)
        ]
        self.set: dict[UUID, str] = {}
        monkeypatch.setattr(flow_runs, "connected", self.connected)
        monkeypatch.setattr(flow_runs, "_unfinished", self.unfinished)
        monkeypatch.setattr(flow_runs.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(flow_runs.time, "sleep", lambda pause_s: None)

    @contextmanager
    def connected(self, api_url: str) -> Iterator["Server"]:
        yield self

    def unfinished(self, api_url: str, tag: str) -> list[SimpleNamespace]:
        self.now_s += self.look_s
        if self.set and self.ends:
            self.living.pop()
        return list(self.living)

    def set_flow_run_state(self, flow_run_id: UUID, state: object, force: bool) -> None:
        self.set[flow_run_id] = state.name  # type: ignore[attr-defined]  # a state of Prefect's


def test_slow_flow_runs_are_all_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(monkeypatch, count=5, look_s=40.0)
    assert flow_runs.cancel_all(
        "http://x/api", "astraflow", processes_alive=True, timeout_s=45.0
    ) == (5, 0)
    assert set(server.set.values()) == {"Cancelling"}
    assert server.now_s == 6 * 40.0, "more than five times the limit for one"


def test_suspended_flow_runs_wait_for_a_person_and_are_not_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[set[StateType]] = []

    def read_flow_runs(flow_run_filter: FlowRunFilter, **page: int) -> list[object]:
        assert flow_run_filter.state is not None
        assert flow_run_filter.state.type is not None
        asked.append(set(flow_run_filter.state.type.any_ or []))
        return []

    client = SimpleNamespace(read_flow_runs=read_flow_runs)
    monkeypatch.setattr(flow_runs, "connected", lambda api_url: nullcontext(client))
    assert flow_runs.cancel_all("http://x/api", "astraflow", processes_alive=True) == (0, 0)
    assert asked == [
        {StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING}
    ]


def test_flow_runs_that_do_not_end_are_given_up_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(monkeypatch, count=2, look_s=10.0, ends=False)
    assert flow_runs.cancel_all(
        "http://x/api", "astraflow", processes_alive=True, timeout_s=45.0
    ) == (2, 2)
    assert server.now_s == 60.0


def test_a_flow_run_that_never_started_is_marked_cancelled_after_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(monkeypatch, count=2, look_s=10.0, ends=False)
    server.living[1].start_time = None
    assert flow_runs.cancel_all(
        "http://x/api", "astraflow", processes_alive=True, timeout_s=45.0
    ) == (2, 1)
    assert [server.set[flow_run.id] for flow_run in server.living] == ["Cancelling", "Cancelled"]
