"""Prefect's responses to a launch: unreachable, or an error that names the deployment. No server is
used.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Running, Scheduled

from storage.errors import ConfigError
from tasks.supervision import launcher
from tasks.supervision.members import FlowRunPhase, Member
from tests.support.runs.flow_run_states import FlowRunStates

WORKER = Member(
    id="rollout-x-0", kind="rollout", deployment="rollout/x", parameters={"region": "x"}, queue="x"
)


def answer(status: int, detail: str = "region: not a valid parameter") -> PrefectHTTPStatusError:
    request = httpx.Request("POST", "http://prefect/api/deployments/1/create_flow_run")
    response = httpx.Response(status, request=request, json={"exception_detail": detail})
    return PrefectHTTPStatusError.from_httpx_error(
        httpx.HTTPStatusError(f"error {status}", request=request, response=response)
    )


def launch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> launcher.Launched | None:
    async def run_deployment(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(launcher, "arun_deployment", run_deployment)
    return asyncio.run(launcher.PrefectLauncher("r").launch(WORKER, 0))


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        TimeoutError(),
        *map(answer, (408, 429, 500, 502, 503)),
    ],
)
def test_an_unreachable_or_busy_server_is_retried(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(monkeypatch, error) is None


def test_a_work_queue_created_concurrently_by_another_run_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = "Data integrity conflict. This usually means a unique or foreign key constraint was violated."
    assert launch(monkeypatch, answer(409, both)) is None


@pytest.mark.parametrize(("queue", "sent"), [("mars", "mars"), ("", None)])
def test_a_member_is_launched_into_its_work_queue(
    queue: str, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[str, str | None]] = []

    async def run_deployment(name: str, *, work_queue_name: str | None, **_: Any) -> FlowRun:
        requested.append((name, work_queue_name))
        return FlowRun(flow_id=uuid4(), parameters={"attempt": 3}, state=Scheduled())

    monkeypatch.setattr(launcher, "arun_deployment", run_deployment)
    launched = asyncio.run(launcher.PrefectLauncher("r").launch(replace(WORKER, queue=queue), 3))
    assert requested == [("rollout/x", sent)]
    assert launched is not None
    assert (launched.attempt, launched.phase) == (3, FlowRunPhase.SCHEDULED)


def test_a_flow_run_has_its_attempt_in_its_name_and_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: dict[str, Any] = {}

    async def run_deployment(name: str, **arguments: Any) -> FlowRun:
        requested.update(arguments)
        return FlowRun(flow_id=uuid4(), parameters={"attempt": 1}, state=Scheduled())

    monkeypatch.setattr(launcher, "arun_deployment", run_deployment)
    asyncio.run(launcher.PrefectLauncher("r").launch(WORKER, 1))
    assert requested["flow_run_name"] == "rollout-x-0 #2 · r"
    assert requested["tags"] == [
        *("astraflow", "run:r", "member:rollout-x-0", "region:x", "attempt:2")
    ]
    assert requested["parameters"]["attempt"] == 1, "heartbeats count from 0"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422])
def test_a_refused_launch_names_the_deployment_and_the_servers_message(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError,
        match=f"'rollout/x' cannot be run: error {status}.*region: not a valid parameter",
    ):
        launch(monkeypatch, answer(status))


def test_a_missing_deployment_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="no deployment 'rollout/x'; register the deployments: astraflow deploy"
    ):
        launch(monkeypatch, ObjectNotFound(answer(404)))


def test_an_impossible_deployment_name_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'rollout/x' cannot be run: Invalid deployment name"):
        launch(monkeypatch, ValueError("Invalid deployment name format"))


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        (FlowRunPhase.SCHEDULED, "Cancelled"),
        (FlowRunPhase.PENDING, "Cancelled"),
        (FlowRunPhase.RUNNING, "Cancelling"),
    ],
)
def test_a_flow_run_that_has_not_started_is_cancelled_immediately(
    phase: FlowRunPhase, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []

    async def set_state(flow_run_id: UUID, wanted: State[Any], force: bool) -> None:
        requested.append(str(wanted.name))

    monkeypatch.setattr(launcher, "_set_state", set_state)
    launched = launcher.Launched(0, phase, str(uuid4()), "any")
    asyncio.run(launcher.PrefectLauncher("r").cancel(launched))
    assert requested == [state]


def test_a_flow_run_with_the_tags_of_a_member_and_other_parameters_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = [None, "x", -1, launcher.ATTEMPTS_MAX + 1, True, 2, 1]
    rows = [
        FlowRun(
            flow_id=uuid4(),
            parameters={"attempt": attempt},
            state=Running(),
            tags=["run:r", "member:rollout-x-0"],
        )
        for attempt in attempts
    ]

    class Prefect:
        async def read_flow_runs(self, **_: Any) -> list[FlowRun]:
            return rows

    @asynccontextmanager
    async def get_client() -> AsyncIterator[Prefect]:
        yield Prefect()

    monkeypatch.setattr(launcher, "get_client", get_client)
    newest = asyncio.run(launcher.PrefectLauncher("r").newest())
    assert newest is not None
    assert newest["rollout-x-0"].flow_run_id == str(rows[5].id)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (("Running",), True),
        (("Scheduled", "Running", "Cancelling"), True),
        (("Scheduled", *("Running" for _ in range(9)), "Suspending"), True),
        (("Scheduled", *("Running" for _ in range(9)), "Closing"), True),
        (("Scheduled", "Running", "Suspended"), True),
        (("Scheduled", "Running", "Crashed"), False),
        (tuple("Running" for _ in range(9)), False),
    ],
)
def test_the_earlier_of_two_supervisors_is_the_one_whose_process_began_earlier(
    monkeypatch: pytest.MonkeyPatch, other: tuple[str, ...], expected: bool
) -> None:
    """The last flow run has begun first, and was resumed after the current one had begun."""
    prefect = FlowRunStates(monkeypatch)
    resumed = ("Scheduled", "Running", "Suspended", "Resuming", "Pending", "Running")
    own, found = prefect.add(*resumed), prefect.add(*other)
    monkeypatch.setattr(launcher.runtime.flow_run, "get_id", lambda: str(own))
    shown = asyncio.run(launcher.rival("tiny-1"))
    is_suspended = other[-1] == "Suspended"
    assert shown == (launcher.Rival(str(found), is_suspended) if expected else None)


def test_a_supervisor_that_goes_on_is_refused_before_a_suspended_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefect = FlowRunStates(monkeypatch)
    prefect.add("Running", "Suspended")
    running = prefect.add("Running")
    own = prefect.add("Scheduled", "Pending", "Running")
    monkeypatch.setattr(launcher.runtime.flow_run, "get_id", lambda: str(own))
    assert asyncio.run(launcher.rival("tiny-1")) == launcher.Rival(str(running))
    prefect.away = True
    assert asyncio.run(launcher.rival("tiny-1")) is None
