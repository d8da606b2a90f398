import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from deployments.cli import run_follower
from deployments.cli.run_follower import Followed, Follower
from deployments.paths import Home
from deployments.registration.flow_runs import FlowRun
from storage import layout
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import AstraFlowError, ConfigError
from storage.formats.json_objects import seal
from storage.records.control import ClosingStep, RunEnd, ServiceState, Stop
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from tasks.monitoring import closing_steps
from tasks.recipes import loader
from tasks.supervision.flow_processes import FlowProcesses

NOWHERE = "http://127.0.0.1:1/api"
RUNNING = FlowRun("f", "Running", False, "")
COMPLETED = FlowRun("f", "Completed", True, "")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_follower, "POLL_S", 0.0)
    monkeypatch.setattr(run_follower, "FLOW_POLL_S", -1.0)


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    home = Home(tmp_path / "home")
    home.create()
    monkeypatch.setattr(
        run_follower, "last_words", lambda followed, flow_run: f"the end of {flow_run}"
    )  # they come from Prefect, which is not running
    return Followed(
        store=open_store(str(tmp_path / "store")),
        run_id="tiny-1",
        api_url=NOWHERE,
        flow_run_id="f",
        links={},
        home=home,
    )


def _create(store: ObjectStore) -> ObjectStore:
    return runs.create_run(
        store, "tiny-1", loader.load("multi_policy_tiny").model_dump(mode="json")
    )


def _create_an_hour_ago(store: ObjectStore) -> ObjectStore:
    """A run whose supervisor never wrote a heartbeat: it is interrupted from the first look."""
    run = _create(store)
    run.put(layout.RUN, seal(replace(runs.read_run(run), created_s=time.time() - 3600.0)))
    return run


def _script(*acts: FlowRun | Callable[[], FlowRun]) -> Callable[[Followed, str], FlowRun]:
    """Prefect's responses in turn; the last one is repeated."""
    left = list(acts)

    def read(followed: Followed, flow_run_id: str) -> FlowRun:
        act = left.pop(0) if len(left) > 1 else left[0]
        return act if isinstance(act, FlowRun) else act()

    return read


def _interrupt() -> FlowRun:
    raise KeyboardInterrupt


def _console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


@pytest.mark.parametrize("terminal", [True, False])
def test_following_ends_with_the_supervisors_flow_run(followed: Followed, terminal: bool) -> None:
    run = _create(followed.store)

    def end() -> FlowRun:
        runs.request_stop(run, Stop("completed", "all done", 5.0))
        return COMPLETED

    console = _console(terminal)
    last = Follower(followed, console, read_flow=_script(RUNNING, end)).follow()
    assert last is not None
    assert (last.state, last.reason) == ("completed", "all done")
    assert "completed" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


@pytest.mark.parametrize("state", ["completed", "cancelled", "failed", "exhausted", "suspended"])
def test_a_run_has_ended_with_any_kind_of_end(followed: Followed, state: RunEnd) -> None:
    run = _create(followed.store)
    runs.request_stop(run, Stop(state, "over", 5.0))
    last = Follower(followed, _console(False), read_flow=_script(COMPLETED)).follow()
    assert last is not None
    assert (last.state, last.reason) == (state, "over")


def test_following_ends_when_the_run_is_suspended(followed: Followed) -> None:
    run = _create(followed.store)

    def suspend() -> FlowRun:
        runs.request_stop(run, Stop("suspended", "by a person", 5.0))
        return FlowRun("f", "Suspending", False, "")

    suspended = FlowRun("f", "Suspended", False, "", is_suspended=True)
    last = Follower(followed, _console(False), read_flow=_script(suspend, suspended)).follow()
    assert last is not None
    assert (last.state, last.reason) == ("suspended", "by a person")


def test_a_supervisor_that_dies_before_the_run_exists_is_an_error(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_follower, "SUCCESSOR_ANSWERS", 1)
    crashed = FlowRun("f", "Crashed", True, "")
    with pytest.raises(
        AstraFlowError, match=r"tiny-1 never began: its flow run ended as Crashed\. the end of f"
    ):
        Follower(followed, _console(False), read_flow=_script(RUNNING, crashed)).follow()


def test_the_last_words_are_those_of_the_supervisor_that_was_started_last(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_follower, "SUCCESSOR_ANSWERS", 1)
    _create(followed.store)
    again = FlowRun("again", "Crashed", True, "")
    with pytest.raises(AstraFlowError, match="the end of again"):
        Follower(followed, _console(False), read_flow=_script(RUNNING, again)).follow()


def test_a_slow_server_has_time_to_start_a_successor_and_one_that_starts_none_is_not_waited_for(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now_s = _create(followed.store), [0.0]
    monkeypatch.setattr("deployments.cli.run_follower.time.monotonic", lambda: now_s[0])

    def crashed() -> FlowRun:
        now_s[0] += 1000.0
        return FlowRun("f", "Crashed", True, "")

    def end() -> FlowRun:
        runs.request_stop(run, Stop("completed", "all done", 5.0))
        return COMPLETED

    slow = [crashed] * (run_follower.SUCCESSOR_ANSWERS - 1)
    script = _script(RUNNING, *slow, RUNNING, *slow, end)
    last = Follower(followed, _console(False), read_flow=script).follow()
    assert last is not None
    assert last.state == "completed"
    runs.clear_stop(run)
    with pytest.raises(
        AstraFlowError, match="none was started in its place while Prefect answered 30 times; start"
    ):
        Follower(followed, _console(False), read_flow=_script(RUNNING, crashed)).follow()


def test_a_supervisor_that_hangs_after_the_end_is_waited_for_up_to_a_limit(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_follower, "FINISH_TIMEOUT_S", 0.0)
    runs.request_stop(_create(followed.store), Stop("failed", "no worker", 5.0))
    last = Follower(followed, _console(False), read_flow=_script(RUNNING)).follow()
    assert last is not None
    assert last.state == "failed"


def test_ctrl_c_asks_and_by_default_the_run_continues(followed: Followed) -> None:
    run = _create(followed.store)
    requested: list[str] = []

    def leave(question: str) -> str:
        requested.append(question)
        return ""

    assert Follower(followed, _console(True), leave, _script(_interrupt)).follow() is None
    assert len(requested) == 1
    assert runs.read_stop(run) is None


def test_ctrl_c_and_c_cancel_the_run_and_wait_for_its_end(followed: Followed) -> None:
    run = _create(followed.store)
    last = Follower(
        followed, _console(True), lambda question: "c", _script(_interrupt, RUNNING, COMPLETED)
    ).follow()
    assert last is not None
    assert last.state == "cancelled"
    stop = runs.read_stop(run)
    assert stop is not None
    assert stop.reason == "cancelled from the command line"


def test_a_second_ctrl_c_does_not_stop_the_run(followed: Followed) -> None:
    run = _create(followed.store)

    def impatient(question: str) -> str:
        raise KeyboardInterrupt

    assert Follower(followed, _console(True), impatient, _script(_interrupt)).follow() is None
    assert runs.read_stop(run) is None


def test_without_a_terminal_ctrl_c_does_not_stop_the_run(followed: Followed) -> None:
    _create(followed.store)

    def nobody(question: str) -> str:
        raise AssertionError("nobody is there")

    assert Follower(followed, _console(False), nobody, _script(_interrupt)).follow() is None


def test_a_refused_restart_shows_the_supervisors_message_and_not_the_old_end(
    followed: Followed,
) -> None:
    previous_stop = runs.request_stop(_create(followed.store), Stop("completed", "all done", 5.0))
    refused = FlowRun("f", "Failed", True, "run tiny-1 is completed; choose another run id")
    with pytest.raises(
        AstraFlowError, match="tiny-1: run tiny-1 is completed; choose another run id"
    ):
        Follower(
            replace(followed, previous_stop=previous_stop),
            _console(False),
            read_flow=_script(RUNNING, refused),
        ).follow()


def test_a_supervisor_refused_beside_a_running_one_shows_the_reason(followed: Followed) -> None:
    _create(followed.store)
    refused = FlowRun("f", "Failed", True, "run 'tiny-1' exists with another configuration")
    with pytest.raises(
        AstraFlowError, match="tiny-1: run 'tiny-1' exists with another configuration"
    ):
        Follower(followed, _console(False), read_flow=_script(RUNNING, refused)).follow()


def test_a_stopped_run_counts_as_starting_until_its_new_supervisor_clears_the_stop(
    followed: Followed,
) -> None:
    run = _create(followed.store)
    previous_stop = runs.request_stop(run, Stop("cancelled", "by a person", 5.0))

    def lift() -> FlowRun:
        runs.clear_stop(run)
        return RUNNING

    def end() -> FlowRun:
        runs.request_stop(run, Stop("completed", "all done", 9.0))
        return COMPLETED

    console = _console(False)
    last = Follower(
        replace(followed, previous_stop=previous_stop),
        console,
        read_flow=_script(RUNNING, lift, end),
    ).follow()
    assert last is not None
    assert last.reason == "all done"
    assert "cancelled" not in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


def _away() -> FlowRun:
    raise ConfigError("the Prefect server does not answer")


def test_a_run_is_followed_to_its_end_through_a_slow_supervisor_and_prefect(
    followed: Followed,
) -> None:
    run = _create(followed.store)

    def end() -> FlowRun:
        runs.request_stop(run, Stop("completed", "all done", 5.0))
        return COMPLETED

    last = Follower(
        followed, _console(False), read_flow=_script(_away, _away, _away, RUNNING, _away, end)
    ).follow()
    assert last is not None
    assert last.state == "completed"


def test_closing_steps_after_the_end_are_shown_and_waited_for(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_follower, "FINISH_TIMEOUT_S", 0.0)
    run = _create(followed.store)
    heartbeat_writer = HeartbeatWriter(run, "supervisor", "supervisor", 0, 3600.0)

    def records(step: ClosingStep, part: str = "", share: float = 0.0) -> Callable[[], FlowRun]:
        def act() -> FlowRun:
            closing_steps.record(heartbeat_writer, step, part, share)
            heartbeat_writer._write()
            return RUNNING

        return act

    def stop() -> FlowRun:
        runs.request_stop(run, Stop("completed", "all done", 5.0))
        return records(ClosingStep.LEAVING, "evaluation")()

    def end() -> FlowRun:
        heartbeat_writer.update(state=ServiceState.DONE)
        heartbeat_writer._write()
        return COMPLETED

    steps = [
        records(ClosingStep.VERIFYING, "shards", 0.42),
        records(ClosingStep.REPORTING),
        records(ClosingStep.TRACKING),
    ]
    console = _console(False)
    last = Follower(followed, console, read_flow=_script(stop, *steps, end)).follow()
    assert last is not None
    assert last.closing is None
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    assert [line.partition("]")[2] for line in lines] == [
        " completed  waiting for members to leave: evaluation",
        " completed  verifying shards 42%",
        " completed  writing the report",
        " completed  registering metrics, report and models in MLflow",
        " completed  its supervisor's flow run is Completed",
    ]


def test_following_ends_when_the_whole_stack_of_the_run_is_gone(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_follower, "AWAY_LIMIT_S", 0.2)
    _create_an_hour_ago(followed.store)

    with pytest.raises(AstraFlowError, match="the supervisor of tiny-1 ended before the run did"):
        Follower(followed, _console(False), read_flow=_script(RUNNING, _away)).follow()


@pytest.mark.parametrize("over", [True, False])
def test_a_supervisor_whose_process_works_on_this_machine_is_slow_and_waited_for(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """Neither its heartbeat nor Prefect answers, on a machine with far too much to do."""
    run, now_s, used_s = _create_an_hour_ago(followed.store), [0.0], [0.0]
    monkeypatch.setattr("deployments.cli.run_follower.time.monotonic", lambda: now_s[0])
    if over:
        runs.request_stop(run, Stop("completed", "all done", 5.0))

    def away() -> FlowRun:
        now_s[0] += 50.0
        used_s[0] += 50.0
        raise ConfigError("the Prefect server does not answer")

    follower = Follower(followed, _console(False), read_flow=_script(RUNNING, away))
    follower.processes = FlowProcesses(
        cpu_s=lambda flow_run: min(used_s[0], 1000.0), clock=lambda: now_s[0]
    )
    if over:
        assert getattr(follower.follow(), "state", None) == "completed"
    else:
        with pytest.raises(AstraFlowError, match="the supervisor of tiny-1 ended before the run"):
            follower.follow()
    assert 1000.0 < now_s[0] < 2000.0, "it uses no CPU time any more after 1,000 s"


def test_without_prefect_a_run_is_over_when_its_supervisors_heartbeat_is_the_last_one(
    followed: Followed,
) -> None:
    run = _create(followed.store)
    runs.request_stop(run, Stop("completed", "all done", 5.0))
    with HeartbeatWriter(run, "supervisor", "supervisor", 0, 3600.0):
        pass
    polls = iter([None])

    def away() -> FlowRun:
        next(polls)
        raise ConfigError("there is no Prefect server")

    console = _console(False)
    last = Follower(followed, console, read_flow=_script(away)).follow()
    assert getattr(last, "state", None) == "completed"
    assert console.file.getvalue().endswith("] completed\n")  # type: ignore[attr-defined]  # a StringIO


def test_a_silent_supervisor_of_an_ended_run_is_waited_for_with_one_line(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.request_stop(_create(followed.store), Stop("completed", "all done", 5.0))
    now_s = [0.0]
    monkeypatch.setattr("deployments.cli.run_follower.time.monotonic", lambda: now_s[0])

    def away() -> FlowRun:
        now_s[0] += 10.0
        raise ConfigError("there is no Prefect server")

    console = _console(False)
    last = Follower(followed, console, read_flow=_script(away)).follow()
    assert getattr(last, "state", None) == "completed"
    assert now_s[0] > run_follower.FINISH_TIMEOUT_S
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    assert lines == ["[0:10] completed  waiting for its supervisor to end"]


def test_ctrl_c_after_the_end_of_the_run_asks_nothing(followed: Followed) -> None:
    run = _create(followed.store)

    def end() -> FlowRun:
        runs.request_stop(run, Stop("completed", "all done", 5.0))
        return RUNNING

    def nobody(question: str) -> str:
        raise AssertionError("there is nothing to cancel")

    follower = Follower(followed, _console(True), nobody, _script(end, _interrupt))
    assert follower.follow() is None
    assert follower.seen is not None
    assert follower.seen.state == "completed"
