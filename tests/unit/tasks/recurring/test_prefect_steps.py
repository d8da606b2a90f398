"""The steps of a night on a Prefect server: their order in the graph, names, tags and retries."""

import asyncio
import dataclasses
import gc
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, TaskRun
from prefect.runtime import flow_run

from storage.errors import ConfigError, TransientError
from storage.promotion import nights
from storage.records.control import Stop
from storage.records.nights import NightEnd
from storage.records.promotions import GateVerdict
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from tasks.promotion import contest
from tasks.promotion.candidates import Candidate
from tasks.promotion.contest import Contest
from tasks.recipes import loader
from tasks.recurring import night, planning, prefect_steps, reporting
from tasks.recurring.night import NightRequest
from tasks.recurring.planning import Schedule
from tests.support.runs.promotable import EVALUATED_RECIPE, create_run, evaluate, team

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.timeout(method="thread"),  # Prefect's time limits need the alarm signal
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),  # of Prefect's clients
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # the same
]

NIGHT, RUN_ID = "20260102-0200", "tiny-20260102-0200"
RECIPE = (
    EVALUATED_RECIPE
    + "gate: {datasets: {d: {builtin: chained_addition, split: test, limit: 50}}}\n"
)
STEPS = (
    "resolve the champion of tiny",
    f"freeze the data of {RUN_ID}",
    "train",
    f"play {RUN_ID} against the champion",
    f"promote or reject {RUN_ID}",
    f"report tiny {NIGHT}",
    f"notify slack/on-call of tiny {NIGHT}",
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("tasks.promotion.announcements.prefect_api_url", lambda: "")
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def train(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A training that is over at once, and a contest that nobody plays."""

    @flow(name="train", validate_parameters=True)
    async def train(run_id: str, recipe: str, overrides: dict[str, Any] | None = None) -> str:
        run = runs.open_run(store, run_id)
        runs.request_stop(run, Stop("completed", "done", 1.0))
        return run_id

    def played(*arguments: object, **callbacks: object) -> Contest:
        run = create_run(store, "played")
        for version in (0, 1):
            evaluate(run, version, version)
        return Contest(
            champion=None,
            opponent=team(run, "played", 0),
            candidate=Candidate(team(run, "played", 1), ""),
            outcomes=(),
            verdict=GateVerdict(passed=True, reason="so", test="t", confidence=0.9, rows=()),
        )

    monkeypatch.setattr(contest, "contest", played)
    monkeypatch.setattr("tasks.recurring.judging.trained_versions", lambda run, config: ())
    return train


def request() -> NightRequest:
    schedule = Schedule(late_limit_s=1.0, catches_up=True, begins_with_champion=True)
    return NightRequest(
        recipe=RECIPE,
        overrides={},
        name=None,
        night=NIGHT,
        schedule=schedule,
        notify="slack/on-call",
    )


def shown(train: Any) -> tuple[State[Any], dict[str, TaskRun]]:
    """Run the night; return its final state and name → task run. They are noted here, since the
    server stores their ends a while later.
    """
    ids: list[str] = []
    ended: dict[str, TaskRun] = {}

    def note(task: object, task_run: TaskRun, state: State[Any]) -> None:
        ended[task_run.name] = task_run.model_copy(update={"state_name": state.name})

    @flow
    async def a_night() -> State[None]:
        ids.append(str(flow_run.get_id()))
        return await night.run(request(), train)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("resolve_champion", "freeze_data", "play", "decide", "report", "notify"):
            step = getattr(prefect_steps, name).with_options(
                retry_delay_seconds=0, on_completion=[note], on_failure=[note]
            )
            patch.setattr(prefect_steps, name, step)
        state: State[Any] = asyncio.run(a_night(return_state=True))  # type: ignore[arg-type]  # a coroutine
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(ids[0])]))
    with get_client(sync_client=True) as client:
        subflows = [
            each for each in client.read_task_runs(flow_run_filter=wanted) if each.name == "train-0"
        ]
    return state, {**ended, "train": subflows[0]}


def test_the_steps_of_a_night_follow_from_each_other(
    store: ObjectStore, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def begin(*arguments: Any) -> object:
        begun.append("begin")
        if len(begun) == 1:
            raise TransientError("the store is away")
        return begin_night(*arguments)

    begin_night = planning.begin
    monkeypatch.setattr(planning, "begin", begin)
    monkeypatch.setattr(reporting, "report", lambda *arguments: 1 / 0)
    state, steps = shown(train)
    assert state.name == "Promoted"
    outcome = nights.read_outcome(store, "tiny", NIGHT)
    assert outcome is not None
    assert outcome.end is NightEnd.PROMOTED
    assert sorted(steps) == sorted(STEPS)
    names = {each.id: name for name, each in steps.items()}
    after = {
        name: {names[given.id] for inputs in each.task_inputs.values() for given in inputs}  # type: ignore[union-attr]  # only task runs
        for name, each in steps.items()
    }
    resolve, freeze, trained, play, decide, report, notify = STEPS
    needed = {
        resolve: set(),
        freeze: {resolve},
        trained: {freeze},
        play: {resolve, trained},
        decide: {resolve, play},
        report: {decide},
        notify: {decide, report},
    }
    assert {name: after[name] & needed[name] for name in STEPS} == needed
    assert all(after[name] <= set(STEPS[:place]) for place, name in enumerate(STEPS))
    tagged = {name: set(each.tags) for name, each in steps.items()}
    assert tagged == {
        name: {"night:tiny"} if name == trained else {"night", "night:tiny"} for name in STEPS
    }
    assert steps[resolve].run_count == 2, "the store did not answer the first attempt"
    assert steps[report].state_name == "Failed", "and the night has ended all the same"
    assert steps[report].run_count == 1
    assert steps[notify].state_name == "Completed"


def test_a_webhook_in_the_place_of_its_block_ends_a_night_before_it_begins() -> None:
    async def train() -> State[Any]:
        raise AssertionError("nothing is trained")

    webhook = "https://hooks.slack.com/services/T0/B0/wJalrXUtnFEMI"
    with pytest.raises(ConfigError, match=r"^notify does not name a notification") as raised:
        asyncio.run(night.run(dataclasses.replace(request(), notify=webhook), train))
    assert "wJal" not in str(raised.value)


def test_the_report_of_a_night_is_an_artifact_of_its_flow_run(store: ObjectStore) -> None:
    outcome = planning.end(store, "tiny", NIGHT, NightEnd.SKIPPED, "no new data")
    config = loader.load(RECIPE, {})

    @flow
    async def a_night() -> str:
        await prefect_steps.report(outcome, config)  # type: ignore[misc]  # a coroutine
        return str(flow_run.get_id())

    own = asyncio.run(a_night())  # type: ignore[arg-type]  # a coroutine
    with get_client(sync_client=True) as client:
        shown = {each.key: each for each in client.read_artifacts()}
    assert str(shown["nights-tiny"].flow_run_id) == own
    assert "no new data" in str(shown["nights-tiny"].data)
    gc.collect()  # sockets of Prefect's clients, while their warning is ignored
