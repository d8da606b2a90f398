"""`astraflow suspend`, `resume`, and `cancel` of a suspended run: what they store and request, and their
errors.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from typer.testing import CliRunner, Result

from deployments.cli.app import app
from deployments.registration import flow_runs
from deployments.stack import up_down
from storage.errors import ConfigError
from storage.records.control import RunEnd, Stop
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from tasks.recipes import loader
from tasks.supervision.suspension import RESUMING
from tests.support.runs.flow_run_states import history

AGAIN = "`astraflow run --run-id tiny-1` with the same settings"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(up_down, "adopt_server", lambda home: "http://x/api")
    config = loader.load("multi_policy_tiny").model_dump(mode="json")
    return runs.create_run(open_store(str(tmp_path / "store")), "tiny-1", config)


class Server:
    """Flow runs of a Prefect server, each with its state and the flow run around it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: dict[UUID, FlowRun] = {}
        self.resumed: list[UUID] = []
        self.refusal = ""
        monkeypatch.setattr(flow_runs, "connected", lambda *_: nullcontext(self))

    def add(self, state: str, name: str = "tiny-1", within: UUID | None = None) -> UUID:
        (found,) = history(state)
        flow_run = FlowRun(flow_id=uuid4(), name=name, state=found, parent_task_run_id=within)
        self.runs[flow_run.id] = flow_run
        return flow_run.id

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        return self.runs[flow_run_id]

    def read_task_run(self, task_run_id: UUID) -> SimpleNamespace:
        return SimpleNamespace(flow_run_id=task_run_id)  # a test gives both the same id

    def read_flow_runs(self, flow_run_filter: Any, **page: Any) -> list[FlowRun]:
        assert flow_run_filter.tags.all_ == ["run:tiny-1"]
        return [each for each in self.runs.values() if each.name == "tiny-1"][-1:]

    def resume_flow_run(self, flow_run_id: UUID) -> SimpleNamespace:
        self.resumed.append(flow_run_id)
        (state,) = history("Suspended" if self.refusal else "Resuming")
        return SimpleNamespace(state=state, details=SimpleNamespace(reason=self.refusal))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def stop_state(run: ObjectStore) -> str:
    """The state of the stored stop, or nothing."""
    stop = runs.read_stop(run)
    return stop.state if stop else ""


def call(command: str, run_id: str = "tiny-1") -> Result:
    return CliRunner().invoke(app, [command, run_id])


def test_a_suspension_is_stored_and_a_second_one_changes_nothing(
    run: ObjectStore, server: Server
) -> None:
    server.add("Running")
    first = call("suspend")
    assert (first.exit_code, first.output) == (
        0,
        "tiny-1 is being suspended; `astraflow resume tiny-1` goes on when its members have left\n",
    )
    stop = runs.read_stop(run)
    assert stop is not None
    assert (stop.state, stop.reason) == ("suspended", "suspended from the command line")
    second = call("suspend")
    assert (second.exit_code, second.output) == (
        0,
        "tiny-1 is already suspended: suspended from the command line; `astraflow resume tiny-1` "
        "goes on\n",
    )
    assert runs.read_stop(run) == stop


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled", "exhausted"])
def test_a_run_that_is_over_is_neither_suspended_nor_resumed(
    run: ObjectStore, server: Server, state: RunEnd
) -> None:
    stop = runs.request_stop(run, Stop(state, "that is why", 1.0))
    refused = call("suspend")
    assert refused.exit_code == 2
    assert f"tiny-1 is {state}, so it cannot be suspended: that is why" in refused.stderr
    refused = call("resume")
    assert refused.exit_code == 2
    assert f"tiny-1 is {state}, not suspended: that is why" in refused.stderr
    assert (AGAIN in refused.stderr) is (state != "completed")
    assert runs.read_stop(run) == stop


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_a_run_that_does_not_exist_is_an_error_with_similar_names(
    run: ObjectStore, command: str
) -> None:
    unknown = call(command, "tiny-2")
    assert unknown.exit_code == 2
    assert "did you mean tiny-1" in unknown.stderr


def test_a_run_that_goes_on_is_not_resumed(run: ObjectStore, server: Server) -> None:
    refused = call("resume")
    assert refused.exit_code == 2
    assert "tiny-1 is not suspended; `astraflow status tiny-1`" in refused.stderr


def test_the_suspended_flow_run_of_the_run_is_resumed(run: ObjectStore, server: Server) -> None:
    call("suspend")
    suspended = server.add("Suspended")
    resumed = call("resume")
    assert (resumed.exit_code, resumed.output) == (
        0,
        "tiny-1 is resumed; `astraflow attach tiny-1` shows it\n",
    )
    assert server.resumed == [suspended]
    assert runs.read_stop(run) is not None, "its supervisor deletes it"


def test_the_night_of_a_suspended_run_is_resumed(run: ObjectStore, server: Server) -> None:
    call("suspend")
    night = server.add("Suspended", name="math 20260101-0200")
    server.add("Cancelled", within=night)
    assert call("resume").exit_code == 0
    assert server.resumed == [night]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("Suspending", "the flow run tiny-1 is Suspending, not yet Suspended: the members of"),
        ("Running", "the flow run tiny-1 is Running, not yet Suspended"),
        ("Cancelled", f"Prefect has no suspended flow run of tiny-1; start it with {AGAIN}"),
        (None, f"Prefect has no suspended flow run of tiny-1; start it with {AGAIN}"),
    ],
)
def test_without_a_suspended_flow_run_the_error_says_what_to_do(
    run: ObjectStore, server: Server, state: str | None, words: str
) -> None:
    call("suspend")
    if state is not None:
        server.add(state)
    refused = call("resume")
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert server.resumed == []


@pytest.mark.parametrize("state", [RESUMING, "Pending", "Running"])
def test_a_run_that_is_being_resumed_is_neither_suspended_nor_resumed_again(
    run: ObjectStore, server: Server, state: str
) -> None:
    """Its supervisor, which deletes the suspension, has not begun."""
    stop = runs.request_stop(run, Stop("suspended", "suspended from the command line", 1.0))
    server.add(state)
    suspended = call("suspend")
    assert suspended.exit_code == 2
    assert "tiny-1 is being resumed; suspend it when `astraflow status" in suspended.stderr
    resumed = call("resume")
    assert resumed.exit_code == 2
    assert "tiny-1 is being resumed already" in resumed.stderr
    assert server.resumed == []
    assert runs.read_stop(run) == stop


@pytest.mark.parametrize("state", ["Suspended", "Suspending", "Cancelled"])
def test_a_suspended_run_that_is_not_resumed_stays_suspended(
    run: ObjectStore, server: Server, state: str
) -> None:
    runs.request_stop(run, Stop("suspended", "suspended from the command line", 1.0))
    server.add(state)
    assert call("suspend").output.startswith("tiny-1 is already suspended")


def test_prefects_refusal_is_the_error(run: ObjectStore, server: Server) -> None:
    call("suspend")
    server.add("Suspended")
    server.refusal = "no deployment"
    refused = call("resume")
    assert refused.exit_code == 2
    assert "Prefect does not resume the flow run tiny-1: no deployment" in refused.stderr


def test_without_prefect_a_run_is_suspended_and_not_resumed(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(home: object) -> str:
        raise ConfigError("there is no Prefect server")

    monkeypatch.setattr(up_down, "adopt_server", away)
    assert call("suspend").exit_code == 0
    assert call("suspend").output.startswith("tiny-1 is already suspended")
    refused = call("resume")
    assert refused.exit_code == 2
    assert "there is no Prefect server" in refused.stderr


def test_a_suspended_run_is_cancelled_and_its_flow_run_closes_it(
    run: ObjectStore, server: Server
) -> None:
    call("suspend")
    suspended = server.add("Suspended")
    cancelled = call("cancel")
    assert (cancelled.exit_code, cancelled.output) == (
        0,
        "tiny-1 is being cancelled: its flow run goes on with the closing steps\n",
    )
    stop = runs.read_stop(run)
    assert stop is not None
    assert (stop.state, stop.reason) == ("cancelled", "cancelled from the command line")
    assert server.resumed == [suspended]


@pytest.mark.parametrize("ends", ["begins", "dies"])
def test_a_run_whose_resumed_supervisor_has_not_begun_is_cancelled_when_it_has(
    run: ObjectStore, server: Server, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """It has read the suspension, and deletes whatever is stored in its place. It does so, or dies,
    in the pause between two looks of the command; `Server` has no flow runs that never began.
    """
    runs.request_stop(run, Stop("suspended", "suspended from the command line", 1.0))
    own = server.add("Running")

    def begin(_: float) -> None:
        if ends == "begins":
            runs.clear_stop(run)
        else:
            (server.runs[own].state,) = history("Crashed")

    monkeypatch.setattr("time.sleep", begin)
    monkeypatch.setattr("deployments.cli.run_follower.cancel_before_it_began", lambda *_: False)
    cancelled = call("cancel")
    assert cancelled.exit_code == 0
    assert "tiny-1 is being resumed: it is cancelled when its supervisor has" in cancelled.output
    assert stop_state(run) == "cancelled"


@pytest.mark.parametrize("state", [RESUMING, "Suspending"])
def test_a_cancel_waits_for_no_process_that_was_not_started(
    run: ObjectStore, server: Server, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    runs.request_stop(run, Stop("suspended", "suspended from the command line", 1.0))
    server.add(state)
    monkeypatch.setattr("deployments.cli.run_follower.cancel_before_it_began", lambda *_: False)
    assert call("cancel").output == "tiny-1 is cancelled\n"
    assert stop_state(run) == "cancelled"


def test_the_night_of_a_suspended_run_ends_when_the_run_is_cancelled(
    run: ObjectStore, server: Server
) -> None:
    call("suspend")
    night = server.add("Suspended", name="math 20260101-0200")
    server.add("Cancelled", within=night)
    assert call("cancel").exit_code == 0
    assert server.resumed == [night]


@pytest.mark.parametrize("state", ["Suspending", "Cancelled", None])
def test_a_suspended_run_without_a_suspended_flow_run_is_cancelled(
    run: ObjectStore, server: Server, state: str | None
) -> None:
    call("suspend")
    if state is not None:
        server.add(state)
    assert call("cancel").output == "tiny-1 is cancelled\n"
    stop = runs.read_stop(run)
    assert stop is not None
    assert stop.state == "cancelled"
    assert server.resumed == []
    assert "is already cancelled: cancelled from the command line" in call("cancel").output


def test_a_cancelled_run_whose_flow_run_is_suspended_is_closed_by_a_second_command(
    run: ObjectStore, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(home: object) -> str:
        raise ConfigError("there is no Prefect server")

    call("suspend")
    suspended = server.add("Suspended")
    with monkeypatch.context() as patch:
        patch.setattr(up_down, "adopt_server", away)
        alone = call("cancel")
    assert alone.exit_code == 0
    assert "its flow run in Prefect is as before: there is no Prefect server" in alone.stderr
    assert "repeat the command" in alone.stderr
    stop = runs.read_stop(run)
    assert stop is not None
    assert stop.state == "cancelled"
    assert "is being cancelled" in call("cancel").output
    assert server.resumed == [suspended]
