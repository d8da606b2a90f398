"""Attaching to a run that another process has started; Prefect's answers are scripted."""

import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.cli import run_attachment, run_follower
from deployments.paths import Home
from deployments.registration import flow_runs
from deployments.registration.flow_runs import FlowRun
from deployments.stack import up_down
from storage import layout
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import AstraFlowError, ConfigError
from storage.formats.json_objects import seal
from storage.records.control import ClosingStep, RunEnd, ServiceState, Stop
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from tasks.monitoring.status import Status, status
from tasks.recipes import loader
from tests.support.runs import builders

RUNNING = FlowRun("f", "Running", False, "", created_s=1.0)
COMPLETED = FlowRun("f", "Completed", True, "", created_s=1.0)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(run_follower, "POLL_S", 0.0)
    monkeypatch.setattr(run_follower, "FLOW_POLL_S", -1.0)
    monkeypatch.setattr(up_down, "adopt_server", lambda home: "http://127.0.0.1:1/api")
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def create(store: ObjectStore) -> Callable[[], ObjectStore]:
    return lambda: runs.create_run(
        store, "tiny-1", loader.load("multi_policy_tiny").model_dump(mode="json")
    )


class Attached:
    """One call of `attach`, and what it printed."""

    def __init__(self, store: ObjectStore, tmp_path: Path) -> None:
        home = Home(tmp_path / "home")
        home.create()
        self.said: list[str] = []
        self.completed = run_attachment.attach(home, store, "tiny-1", self.said.append)


def prefect_has(
    monkeypatch: pytest.MonkeyPatch, supervisor: FlowRun | None, *then: Callable[[], FlowRun]
) -> None:
    """Prefect's newest supervisor of the run, and its answers to later polls, the last repeated."""
    left = list(then)

    def read(api_url: str, flow_run_id: str, limits: object) -> FlowRun:
        assert flow_run_id == "f"
        return (left.pop(0) if len(left) > 1 else left[0])()

    monkeypatch.setattr(flow_runs, "newest_supervisor", lambda *args: supervisor)
    monkeypatch.setattr(flow_runs, "read", read)


def completing(run: ObjectStore) -> Callable[[], FlowRun]:
    """An answer of Prefect before which the run completes."""

    def end() -> FlowRun:
        runs.request_stop(run, Stop("completed", "all done", time.time()))
        return COMPLETED

    return end


@pytest.mark.parametrize(
    ("state", "completed"),
    [("completed", True), ("exhausted", True), ("failed", False), ("cancelled", False)],
)
def test_a_run_that_has_ended_is_shown_as_it_was(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: RunEnd,
    completed: bool,
) -> None:
    runs.request_stop(create(), Stop(state, "that is why", time.time()))
    prefect_has(monkeypatch, COMPLETED)
    attached = Attached(store, tmp_path)
    assert attached.completed is completed
    assert attached.said == [f"tiny-1 is {state}: that is why"]
    shown = capsys.readouterr().out
    assert "0 of 80 steps" in shown
    assert "verifier" in shown


def test_a_suspended_run_is_shown_as_it_was(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs.request_stop(create(), Stop("suspended", "by a person", time.time()))
    suspended = FlowRun("f", "Suspended", False, "", created_s=1.0, is_suspended=True)
    prefect_has(monkeypatch, suspended)
    attached = Attached(store, tmp_path)
    assert not attached.completed
    assert attached.said == ["tiny-1 is suspended: by a person"]


def test_a_run_without_a_supervisor_is_shown_with_the_remedy(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = create()
    hour_ago = replace(runs.read_run(run), created_s=time.time() - 3600.0)
    run.put(layout.RUN, seal(hour_ago))
    prefect_has(monkeypatch, None)
    attached = Attached(store, tmp_path)
    assert not attached.completed
    assert "start the run again with the same run id to go on" in attached.said[0]


def test_a_run_that_goes_on_is_followed_to_its_end(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = create()

    prefect_has(monkeypatch, RUNNING, lambda: RUNNING, completing(run))
    attached = Attached(store, tmp_path)
    assert attached.completed
    assert "] completed  its supervisor's flow run is Completed" in capsys.readouterr().out
    assert any("; all done" in line for line in attached.said)


def test_a_run_that_nobody_has_created_yet_is_waited_for(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def end() -> FlowRun:
        runs.request_stop(create(), Stop("cancelled", "by a person", time.time()))
        return COMPLETED

    prefect_has(monkeypatch, RUNNING, lambda: RUNNING, end)
    assert not Attached(store, tmp_path).completed
    assert "waiting for the supervisor (Prefect: Running)" in capsys.readouterr().out


def test_a_run_that_is_taken_up_again_is_not_over(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = create()
    stopped = runs.request_stop(run, Stop("cancelled", "by a person", time.time()))
    again = FlowRun("f", "Pending", False, "", created_s=stopped.at_s + 1)

    def end() -> FlowRun:
        runs.clear_stop(run)
        runs.request_stop(run, Stop("completed", "all done", time.time() + 9))
        return COMPLETED

    prefect_has(monkeypatch, again, lambda: RUNNING, end)
    assert Attached(store, tmp_path).completed
    assert "cancelled" not in capsys.readouterr().out


def test_a_run_whose_supervisor_is_still_closing_it_is_followed_to_its_end(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its stop is of this start, not of an earlier one."""
    stopped = runs.request_stop(create(), Stop("completed", "all done", time.time()))
    closing = replace(RUNNING, created_s=stopped.at_s - 1)
    prefect_has(monkeypatch, closing, lambda: closing, lambda: COMPLETED)
    assert Attached(store, tmp_path).completed
    assert "] completed  its supervisor's flow run is Running" in capsys.readouterr().out


def test_ctrl_c_leaves_the_run_and_says_so(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = create()
    monkeypatch.setenv("FORCE_COLOR", "1")  # the console counts as a terminal

    def interrupt() -> FlowRun:
        raise KeyboardInterrupt

    prefect_has(monkeypatch, RUNNING, lambda: RUNNING, interrupt)
    attached = Attached(store, tmp_path)
    assert attached.completed
    assert attached.said[-1].startswith("tiny-1 continues; ")
    assert runs.read_stop(run) is None


def test_ctrl_c_after_the_end_of_the_run_does_not_say_that_it_continues(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = create()

    def end() -> FlowRun:
        runs.request_stop(run, Stop("completed", "all done", time.time()))
        return RUNNING

    def interrupt() -> FlowRun:
        raise KeyboardInterrupt

    prefect_has(monkeypatch, RUNNING, end, interrupt)
    attached = Attached(store, tmp_path)
    assert attached.completed
    assert attached.said == ["tiny-1 is completed; `astraflow status tiny-1` shows it"]


def test_without_prefects_server_the_store_alone_is_followed(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = create()

    def nobody(home: Home) -> str:
        raise ConfigError("there is no Prefect server")

    monkeypatch.setattr(up_down, "adopt_server", nobody)
    monkeypatch.setattr(run_follower, "AWAY_LIMIT_S", 0.0)
    with HeartbeatWriter(run, "supervisor", "supervisor", 0, 3600.0):
        monkeypatch.setattr(run_follower, "FINISH_TIMEOUT_S", 0.0)
        looked = status

        def ends(store: ObjectStore, run_id: str) -> object:
            runs.request_stop(run, Stop("completed", "all done", time.time()))
            return looked(store, run_id)

        monkeypatch.setattr(run_follower, "status", ends)
        attached = Attached(store, tmp_path)
    assert attached.said[0] == "only the store is shown: there is no Prefect server"
    assert attached.completed


def test_a_run_in_its_closing_steps_is_followed_without_prefects_server(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = create()
    runs.request_stop(run, Stop("completed", "all done", time.time()))
    closing = builders.heartbeat(
        "supervisor", "supervisor", beat_s=time.time(), state=ClosingStep.REPORTING
    )
    builders.put_heartbeat(run, closing)

    def last_look_before_the_end(store: ObjectStore, run_id: str) -> Status:
        seen = status(store, run_id)
        builders.put_heartbeat(run, replace(closing, state=ServiceState.DONE))
        return seen

    monkeypatch.setattr(up_down, "adopt_server", _does_not_respond)
    monkeypatch.setattr(run_follower, "FINISH_TIMEOUT_S", 0.0)
    monkeypatch.setattr(run_follower, "status", last_look_before_the_end)
    assert Attached(store, tmp_path).completed
    assert [line.partition("]")[2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        " completed  writing the report",
        " completed",
    ]


def _does_not_respond(*args: object) -> FlowRun:
    raise ConfigError("the Prefect server does not respond (ReadTimeout)")


def test_a_server_that_does_not_respond_at_first_is_asked_again(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The supervisor, on another machine, is silent for 130 s, and longer than the limit for both."""
    run, now_s = create(), [0.0]
    monkeypatch.setattr("deployments.cli.run_follower.time.monotonic", lambda: now_s[0])
    beat = builders.heartbeat("supervisor", "supervisor", beat_s=time.time() - 130.0)
    builders.put_heartbeat(run, beat)

    def running() -> FlowRun:
        now_s[0] += 130.0
        return RUNNING

    prefect_has(monkeypatch, RUNNING, running, completing(run))
    questions = iter([False, False, True])
    monkeypatch.setattr(
        flow_runs,
        "newest_supervisor",
        lambda *args: RUNNING if next(questions) else _does_not_respond(),
    )
    attached = Attached(store, tmp_path)
    assert attached.completed
    assert attached.said[0] == (
        "only the store is shown until Prefect answers: the Prefect server does not respond "
        "(ReadTimeout)"
    )
    assert [line.partition("]")[2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        " interrupted",
        " interrupted  its supervisor's flow run is Running",
        " completed  its supervisor's flow run is Completed",
    ]


@pytest.mark.parametrize("has_server", [True, False])
def test_a_supervisor_whose_process_lives_on_this_machine_is_never_given_up(
    store: ObjectStore,
    create: Callable[[], ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_server: bool,
) -> None:
    """It is stopped (SIGSTOP): neither a heartbeat nor CPU time shows that it lives."""
    run, now_s = create(), [0.0]
    monkeypatch.setattr("deployments.cli.run_follower.time.monotonic", lambda: now_s[0])

    def silent(store: ObjectStore, run_id: str) -> Status:
        now_s[0] += 50.0
        if now_s[0] > 1000.0:
            runs.request_stop(run, Stop("completed", "all done", time.time()))
        return status(store, run_id, time.time() + 130.0)

    monkeypatch.setattr(run_attachment, "status", silent)
    monkeypatch.setattr(run_follower, "status", silent)
    monkeypatch.setattr(flow_runs, "newest_supervisor", _does_not_respond)
    if not has_server:
        monkeypatch.setattr(up_down, "adopt_server", _does_not_respond)
    here = builders.heartbeat(
        "supervisor",
        "supervisor",
        beat_s=time.time(),
        pid=os.getpid(),
        host=socket.gethostname(),
    )
    builders.put_heartbeat(run, here)
    assert Attached(store, tmp_path).completed
    runs.clear_stop(run)
    now_s[0] = 0.0
    ended = subprocess.Popen(["true"])
    ended.wait()
    for gone in (replace(here, pid=ended.pid), replace(here, beat_s=1.0), replace(here, host="x")):
        builders.put_heartbeat(run, gone)
        if has_server:
            with pytest.raises(AstraFlowError, match="supervisor of tiny-1 ended before the run"):
                Attached(store, tmp_path)
        else:
            assert not Attached(store, tmp_path).completed


def test_a_run_that_nobody_knows_is_an_error(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefect_has(monkeypatch, COMPLETED)
    with pytest.raises(AstraFlowError, match="there is no run 'tiny-1'"):
        Attached(store, tmp_path)
