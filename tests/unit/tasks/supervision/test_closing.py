"""The closing steps of a run on a Prefect server: their order in the graph, names, tags, retries and
time limits, and what Prefect shows of a run whose steps fail.
"""

import asyncio
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.states import Suspended
from prefect.tasks import Task

from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import ConfigError
from storage.records.control import ClosingStep, Stop
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from storage.verify.verify import Progress, Verdict
from tasks.services import prefect_tasks
from tasks.supervision import closing, suspension
from tests.support.checkout import ROOT
from tests.support.patience import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.timeout(method="thread"),  # Prefect's time limits need the alarm signal
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # of Prefect's clients
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # the same
]

RUN_ID = "old-1"
TASKS = ("last_evaluation", "verify_run", "write_report", "register", "notify")
STEPS = (
    "last evaluation of old-1",
    "verify old-1",
    "report old-1",
    "register old-1 in MLflow",
    "notify old-1",
)
EVALUATION = "evals/solver-00000003.arrow"
STOP = Stop("completed", "all policies reached version 5", 1.0)
HURRIED_S = 1.0
PAGE = "http://mlflow/#/experiments/1/runs/2"


class Tracker:
    """Fails so often; then gives the run's page."""

    def __init__(self, page: str | None = PAGE, failures: int = 0) -> None:
        self.page, self.failures = page, failures
        self.states: list[str] = []

    def finish(self, state: str) -> str | None:
        self.states.append(state)
        if len(self.states) <= self.failures:
            raise RuntimeError("a surprise of MLflow")
        return self.page


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A copy of a whole run."""
    shutil.copytree(ROOT / "tests" / "old_run" / "store", tmp_path / "store")
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    return runs.open_run(open_store(str(tmp_path / "store")), RUN_ID)


def _hurried(with_options: Callable[..., Task[..., Any]], timeout_seconds: float) -> object:
    assert timeout_seconds == PATIENCE_S
    return with_options(timeout_seconds=HURRIED_S)


class Closed:
    """What Prefect shows of a flow that took the closing steps."""

    def __init__(
        self,
        run: ObjectStore,
        tracker: Tracker | None,
        hanging: str | None = None,
        *,
        is_suspended: bool = False,
    ) -> None:
        """`hanging`: the name of the task that is given little time. The others have time for a
        busy machine.
        """
        self.heartbeats: list[str] = []

        @flow
        async def close() -> str:
            with (
                HeartbeatWriter(run, "supervisor", "supervisor", 0, 60.0) as heartbeat,
                pytest.MonkeyPatch.context() as patch,
                tags("run:old-1"),
            ):
                patch.setattr(heartbeat, "update", self._noted(heartbeat.update))
                context = FlowRunContext.get()
                assert context is not None
                request = context.flow_run_suspension_request
                if is_suspended:
                    request.mark_requested(Suspended())
                with suspension.ignored():
                    closing.close(RUN_ID, STOP, tracker, heartbeat, PATIENCE_S)  # type: ignore[arg-type]  # all that is asked of a tracker here
                assert FlowRunContext.get() is context
                assert request.is_requested() is is_suspended, "Prefect's engine is not deceived"
                request.mark_requested(None)  # type: ignore[arg-type]  # or this flow would not return
            return str(flow_run.get_id())

        self.steps: dict[str, TaskRun] = {}
        """Name → task run. They are noted here, since the server stores them a while later."""
        with pytest.MonkeyPatch.context() as patch:
            for name in TASKS:
                step = getattr(prefect_tasks, name).with_options(
                    retry_delay_seconds=0, on_completion=[self._note], on_failure=[self._note]
                )
                if name == hanging:
                    patch.setattr(step, "with_options", partial(_hurried, step.with_options))
                patch.setattr(prefect_tasks, name, step)
            self.flow_run_id = UUID(asyncio.run(close()))

    def _note(self, task: object, task_run: TaskRun, state: State[Any]) -> None:
        self.steps[task_run.name] = task_run.model_copy(update={"state": state})

    def _noted(self, update: Callable[..., None]) -> Callable[..., None]:
        def noted(**fields: Any) -> None:
            if isinstance(state := fields.get("state"), ClosingStep):
                self.heartbeats.append(state.value)
            update(**fields)

        return noted

    def before(self, name: str) -> set[str]:
        """The names of the steps on which a step depends."""
        names = {each.id: each.name for each in self.steps.values()}
        inputs = self.steps[name].task_inputs.values()
        return {names[each.id] for group in inputs for each in group}  # type: ignore[union-attr]  # only task runs

    def states(self) -> list[str]:
        states = [self.steps[name].state for name in STEPS if name in self.steps]
        return [state.name or "" for state in states if state is not None]

    def artifacts(self) -> dict[str, str]:
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[self.flow_run_id]))
        with get_client(sync_client=True) as client:
            return {
                each.key or "": str(each.data)
                for each in client.read_artifacts(artifact_filter=wanted)
            }


def test_the_steps_follow_each_other_in_prefects_graph(run: ObjectStore) -> None:
    tracker = Tracker(failures=1)
    closed = Closed(run, tracker)
    assert closed.states() == ["Completed"] * len(STEPS)
    assert [closed.before(name) for name in STEPS[:-1]] == [
        set(),
        {STEPS[0]},
        {STEPS[1]},
        {STEPS[2]},
    ]
    assert closed.before(STEPS[-1]) == set(STEPS[:-1]), "it shows the results of all"
    assert {frozenset(each.tags) for each in closed.steps.values()} == {
        frozenset({"closing", "run:old-1"})
    }
    assert closed.steps[STEPS[3]].run_count == 2, "the first attempt failed"
    assert tracker.states == ["completed", "completed"]
    assert list(dict.fromkeys(closed.heartbeats)) == [
        *("verifying", "reporting", "tracking", "notifying")
    ]
    shown = closed.artifacts()
    assert list(shown) == ["run-summary"]
    assert f"MLflow: {PAGE}" in shown["run-summary"]
    assert shown["run-summary"].startswith("# old-1: completed\n\nall policies reached version 5")
    assert "verify: clean" in shown["run-summary"]
    assert f"Last evaluation: `{EVALUATION}`" in shown["run-summary"]
    assert f"{runs.store_of(run).url}/runs/old-1/report.html" in shown["run-summary"]
    assert b"old-1" in run.get("report.html")


def test_a_run_that_was_over_when_it_was_suspended_is_closed(run: ObjectStore) -> None:
    closed = Closed(run, Tracker(), is_suspended=True)
    assert closed.states() == ["Completed"] * len(STEPS)
    assert sorted(closed.artifacts()) == ["run-summary"]


@pytest.mark.parametrize("failures", [0, 1])
def test_mlflow_shows_that_a_run_is_suspended_and_its_errors_are_only_logged(
    run: ObjectStore, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(failures=failures)
    with HeartbeatWriter(run, "supervisor", "supervisor", 0, 60.0) as heartbeat:
        closing.suspend(tracker, heartbeat)  # type: ignore[arg-type]  # all that is asked of a tracker here
        assert heartbeat.last.state is ClosingStep.TRACKING
        closing.suspend(None, heartbeat)
    assert tracker.states == ["suspended"]
    assert ("a surprise of MLflow" in caplog.text) is bool(failures)


def test_a_run_without_tracking_has_no_step_for_it(run: ObjectStore) -> None:
    closed = Closed(run, None)
    assert sorted(closed.steps) == sorted({*STEPS} - {STEPS[3]})
    assert closed.before(STEPS[-1]) == set(STEPS[:3])
    assert sorted(closed.artifacts()) == ["run-summary"]
    assert "MLflow" not in closed.artifacts()["run-summary"]
    assert "tracking" not in closed.heartbeats


def test_steps_that_hang_or_fail_neither_stop_the_later_ones_nor_fail_the_run(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def hang(run: ObjectStore, terms: object, progress: Progress) -> Verdict:
        attempts.append("verify")
        time.sleep(10 * PATIENCE_S)
        raise AssertionError("its time limit should have ended it")

    def fail(run: ObjectStore, run_id: str) -> str:
        attempts.append("report")
        raise ConfigError("no *room* for the report")

    monkeypatch.setattr(prefect_tasks, "verify", hang)
    monkeypatch.setattr("tasks.reports.page.write_report", fail)
    closed = Closed(run, Tracker(failures=9), hanging="verify_run")
    assert closed.states() == ["Completed", "TimedOut", "Failed", "Failed", "Completed"]
    assert attempts[-1] == "report"
    assert len({*attempts}) == len(attempts), "repeated, they would fail again"
    assert closed.steps[STEPS[3]].run_count == 1 + prefect_tasks.RETRIES
    shown = closed.artifacts()
    assert sorted(shown) == ["run-summary"]
    assert "verify: **not finished** (TaskRunTimeoutError: " in shown["run-summary"]
    assert r"Report: **not finished** (ConfigError: no \*room\* for" in shown["run-summary"]
    assert "`astraflow report old-1` writes it" in shown["run-summary"]
    assert "MLflow: **not finished** (RuntimeError: a surprise of MLflow)" in shown["run-summary"]


def test_a_summary_that_cannot_be_made_fails_its_step_alone(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(**artifact: str) -> None:
        raise ConnectionError(f"no server for {artifact['key']}")

    monkeypatch.setattr(prefect_tasks, "create_markdown_artifact", unreachable)
    closed = Closed(run, Tracker(page=None))
    assert closed.states() == [*["Completed"] * 4, "Failed"]
    assert closed.artifacts() == {}
