"""Prefect's artifacts of a run that goes on, on a Prefect server."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import Artifact
from prefect.runtime import flow_run

from storage.records.progress import TrainerProgress
from tasks.monitoring import live_artifacts
from tasks.monitoring.live_artifacts import NOTE_MAX, LiveArtifacts
from tests.support.runs.small_run import SmallRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # of Prefect's clients
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # the same
]
NOW_S = 5_000_000_000.0
PAGE = "http://mlflow/#/experiments/1/runs/2"


def in_flow(step: Callable[[], Any]) -> list[Artifact]:
    """Run `step` in a flow; return the artifacts of its flow run, oldest first."""

    @flow
    async def supervise() -> str:
        await step()
        return str(flow_run.get_id())

    flow_run_id = asyncio.run(supervise())
    with get_client(sync_client=True) as client:
        found = [each for each in client.read_artifacts() if str(each.flow_run_id) == flow_run_id]
    return sorted(found, key=lambda each: str(each.created))


def test_artifacts_are_created_once_and_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SmallRun("live")
    updated: list[str] = []
    update_progress = live_artifacts.aupdate_progress_artifact

    async def noted(*arguments: Any, description: str) -> None:
        updated.append(description)
        await update_progress(*arguments, description=description)

    monkeypatch.setattr(live_artifacts, "aupdate_progress_artifact", noted)
    pages: list[str] = []
    live = LiveArtifacts(run.run, lambda: pages[0] if pages else None)

    async def go_on() -> None:
        await live.update()
        for version in (0, 1):
            run.version("solver", version)
        run.batch("solver", 1, reward__mean=0.5)
        run.beat("trainer", "trainer-solver", NOW_S, versions={"solver": 1}, state="working")
        run.beat("rollout", "rollout-x-0", NOW_S, region="x", note="y" * 999)
        await live.update()
        pages.append(PAGE)
        run.batch("solver", 2, reward__mean=0.5)
        run.version("solver", 2)
        run.beat(
            "trainer",
            "trainer-solver",
            NOW_S,
            versions={"solver": 2},
            state="done",
            progress=TrainerProgress(step=2),
        )
        await live.update()
        await live.update()

    found = in_flow(go_on)
    shown = {each.key: each for each in found}
    assert updated == [
        "solver: step 1 of 4, mean reward 0.50",
        "solver: step 2 of 4, mean reward 0.50",
    ]
    assert sorted(each.key or "" for each in found) == [
        *("members", "mlflow", "progress-solver", "progress-verifier", "report", "store")
    ]
    assert run.run.address in str(shown["store"].data)
    assert f"{run.run.url}/report.html" in str(shown["report"].data)
    assert PAGE in str(shown["mlflow"].data)
    assert shown["progress-solver"].type == "progress"
    assert shown["progress-solver"].data == 100.0 * 2 / 4
    assert shown["progress-solver"].description == "solver: step 2 of 4, mean reward 0.50"
    assert shown["progress-verifier"].data == 0
    assert shown["progress-verifier"].description == "verifier: step 0 of 4"
    rows = json.loads(str(shown["members"].data))
    assert rows == [
        {
            "member": "rollout-x-0",
            "attempt": "#1",
            "region": "x",
            "state": "working",
            "waits for": "",
            "note": "y" * NOTE_MAX,
        },
        {
            "member": "trainer-solver",
            "attempt": "#1",
            "region": "",
            "state": "done",
            "waits for": "",
            "note": "",
        },
    ]


def _away(*_: Any, **__: Any) -> Any:
    raise httpx.ConnectError("no server")


def _refused(*_: Any, **__: Any) -> Any:
    raise ValueError("refused")


def test_what_cannot_be_shown_is_logged_once_and_shown_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = SmallRun("live-away")
    live = LiveArtifacts(run.run, lambda: None)

    async def go_on() -> None:
        for fails in (_away, _refused):
            with monkeypatch.context() as patch:
                patch.setattr(live_artifacts, "acreate_link_artifact", fails)
                await live.update()
                await live.update()
        await live.update()

    found = in_flow(go_on)
    logged = [each.message for each in caplog.records if "not up to date" in each.message]
    assert logged == [
        f"Prefect's artifacts are not up to date ({what}); the run is not affected"
        for what in ("server", "store", "report")
    ]
    assert {"store", "report"} <= {each.key for each in found}


def test_one_artifact_that_fails_does_not_prevent_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = SmallRun("live-refused")
    run.beat("rollout", "rollout-x-0", NOW_S, region="x")
    create_progress = live_artifacts.acreate_progress_artifact

    async def picky(percent: float, key: str, description: str) -> Any:
        if key == "progress-solver":
            raise ValueError("refused")
        return await create_progress(percent, key, description=description)

    monkeypatch.setattr(live_artifacts, "acreate_link_artifact", _refused)
    monkeypatch.setattr(live_artifacts, "acreate_progress_artifact", picky)
    live = LiveArtifacts(run.run, lambda: PAGE)
    assert {each.key for each in in_flow(live.update)} == {"progress-verifier", "members"}
