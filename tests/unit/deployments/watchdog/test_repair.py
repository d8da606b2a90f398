import os
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from filelock import FileLock
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import PrefectHTTPStatusError

from deployments.paths import Home
from deployments.servers import auth
from deployments.stack import commands, cpu_features, processes, readiness, state
from deployments.stack.processes import Process
from deployments.stack.state import MLFLOW, SERVER, WATCHDOG, Stack
from deployments.watchdog import repair
from storage.errors import ConfigError
from tests.support.runs.flow_run_states import history
from tests.unit.deployments.watchdog.test_watch import _dead, _saved

SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]
PARENT = Process(WATCHDOG, os.getppid(), 1.0, "", processes.start_of(os.getppid()))
"""A repair is a child of its watchdog."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    made = Home(tmp_path / "home")
    made.create()
    auth.create(made)
    monkeypatch.setattr(commands, "prefect_server", lambda port: SLEEP)
    monkeypatch.setattr(commands, "mlflow_server", lambda home, port: SLEEP)
    monkeypatch.setattr(commands, "worker", lambda pool: SLEEP)
    monkeypatch.setattr(cpu_features, "isa_ceiling", lambda cache: {})
    yield made
    processes.sweep(str(made.root), 0.0)


def _responds(monkeypatch: pytest.MonkeyPatch, *, yes: bool) -> None:
    monkeypatch.setattr(readiness, "responds", lambda url: yes)


def _changed(home: Home, before: Stack) -> set[str]:
    after = state.load(home)
    assert after is not None
    assert replace(after, processes=()) == replace(before, processes=())
    assert len(after.processes) == len(before.processes)
    return {each.name for each in after.processes if each not in before.processes}


def test_the_named_processes_are_started_in_the_recorded_stack(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    _responds(monkeypatch, yes=True)
    parts = (SERVER, MLFLOW, "worker-control", "worker-rollout")
    before = _saved(home, PARENT, *map(_dead, parts))
    repair.start_again(home, [SERVER, "worker-rollout"])
    assert _changed(home, before) == {SERVER, "worker-rollout"}
    after = state.load(home)
    assert after is not None
    assert after.process(SERVER) is not None
    assert after.process("worker-rollout") is not None
    repair.start_again(home, [SERVER, "worker-rollout", MLFLOW])
    assert _changed(home, after) == {MLFLOW}, "never a second one of anything"


def test_workers_wait_for_the_prefect_server(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    _responds(monkeypatch, yes=False)
    before = _saved(home, PARENT, _dead(SERVER), _dead("worker-control"))
    repair.start_again(home, [SERVER, "worker-control"])
    assert _changed(home, before) == {SERVER}
    external = state.save(home, replace(before, own_server=False))
    repair.start_again(home, ["worker-control"])
    assert _changed(home, external) == {"worker-control"}


@pytest.mark.parametrize("case", ["locked", "not ready", "no watchdog", "another watchdog"])
def test_nothing_is_started_that_belongs_to_somebody_else(
    home: Home, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    _responds(monkeypatch, yes=True)
    watchdog = {
        "no watchdog": _dead(WATCHDOG),
        "another watchdog": replace(PARENT, pid=os.getpid(), start=processes.start_of(os.getpid())),
    }.get(case, PARENT)
    before = _saved(home, watchdog, _dead(SERVER), ready=case != "not ready")
    lock = FileLock(home.lock)
    if case == "locked":
        holder = threading.Thread(target=lock.acquire)
        holder.start()
        holder.join()
    repair.start_again(home, [SERVER])
    assert _changed(home, before) == set()


@pytest.mark.parametrize(
    ("state", "age_s", "has_run", "reported"),
    [
        ("Pending", 3.0, True, None),
        ("Pending", repair.WORKER_GRACE_S + 5.0, True, "Crashed"),
        ("Pending", 3.0, False, "Crashed"),
        ("Running", 3.0, True, "Crashed"),
        ("Cancelling", 3.0, True, "Cancelled"),
    ],
)
def test_a_flow_run_that_was_resumed_is_not_reported_while_its_process_is_started(
    monkeypatch: pytest.MonkeyPatch, state: str, age_s: float, has_run: bool, reported: str | None
) -> None:
    (found,) = history(state)
    found.timestamp = datetime.now(UTC) - timedelta(seconds=age_s)
    flow_run = FlowRun(
        flow_id=uuid.uuid4(),
        name="tiny-1",
        state=found,
        state_type=found.type,
        start_time=datetime.now(UTC) if has_run else None,
    )
    ends: list[str] = []
    client = SimpleNamespace(
        read_flow_run=lambda flow_run_id: flow_run,
        set_flow_run_state=lambda flow_run_id, state, force: ends.append(state.name),
    )
    monkeypatch.setattr(repair, "connected", lambda api_url: nullcontext(client))
    if reported is None:
        with pytest.raises(ConfigError, match=r"not reported yet: tiny-1 \(it is starting again\)"):
            repair.report_ended("http://x/api", [uuid.uuid4()])
    else:
        repair.report_ended("http://x/api", [uuid.uuid4()])
    assert ends == [reported] * (reported is not None)


def test_a_report_without_a_server_is_tried_again(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repair, "home", lambda: home)
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
    _saved(home, PARENT)
    assert repair.main(["--ended", str(uuid.uuid4())]) == repair.TRY_AGAIN
    assert "does not respond" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        repair.main(["--ended", "no-uuid"])


class Prefect:
    """A client that refuses to answer for some flow runs."""

    def __init__(self, statuses: Mapping[uuid.UUID, int]) -> None:
        self.statuses = statuses
        self.crashed: list[uuid.UUID] = []

    def read_flow_run(self, flow_run_id: uuid.UUID) -> FlowRun:
        if (status := self.statuses[flow_run_id]) != 200:
            response = httpx.Response(status, request=httpx.Request("GET", "http://server"))
            raise PrefectHTTPStatusError("no", request=response.request, response=response)
        return FlowRun(id=flow_run_id, flow_id=flow_run_id, state_type=StateType.RUNNING)

    def set_flow_run_state(self, flow_run_id: uuid.UUID, state: State[None], force: bool) -> None:
        assert force
        assert state.is_crashed()
        self.crashed.append(flow_run_id)


def test_a_flow_run_that_cannot_be_reported_keeps_no_other_from_it(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = uuid.uuid4(), uuid.uuid4()
    prefect = Prefect({bad: 500, good: 200})
    monkeypatch.setattr(repair, "home", lambda: home)
    monkeypatch.setattr(repair, "connected", lambda url: nullcontext(prefect))
    _saved(home, PARENT)
    assert repair.main(["--ended", str(bad), str(good)]) == repair.TRY_AGAIN
    assert prefect.crashed == [good]
    assert f"not reported yet: {bad} (no)" in capsys.readouterr().out
    assert repair.main(["--ended", str(good)]) == 0


def test_a_server_that_refuses_access_is_asked_once(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = uuid.uuid4(), uuid.uuid4()
    prefect = Prefect({first: 401, second: 200})
    monkeypatch.setattr(repair, "connected", lambda url: nullcontext(prefect))
    with pytest.raises(PrefectHTTPStatusError):
        repair.report_ended("http://server/api", [first, second])
    assert prefect.crashed == []
