"""The states of a supervisor's flow run in Prefect around a suspension of its run."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Pause
from prefect.states import Cancelled, Completed, Failed

from tasks.supervision import suspension
from tasks.supervision.suspension import SuspensionWatch, last_mark, was_suspended
from tests.support.runs.flow_run_states import FlowRunStates, history

REASON = "its flow run was suspended in Prefect"


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> FlowRunStates:
    return FlowRunStates(monkeypatch)


def within(monkeypatch: pytest.MonkeyPatch, *flow_runs: UUID) -> None:
    """Let the current flow run be the first one, in a process of the last one."""
    own = str(flow_runs[0]) if flow_runs else None
    monkeypatch.setattr(suspension.runtime.flow_run, "get_id", lambda: own)
    monkeypatch.delenv(suspension.MARK, raising=False)
    if flow_runs:
        monkeypatch.setenv(suspension.MARK, str(flow_runs[-1]))


def look(watch: SuspensionWatch, *, run_is_over: bool = False) -> bool:
    return asyncio.run(watch.look(run_is_over))


@pytest.mark.parametrize("name", ["Suspended", "Paused"])
def test_a_suspension_is_noticed_and_loses_its_time_limit(
    prefect: FlowRunStates, name: str
) -> None:
    own = prefect.add("Pending", "Running")
    watch = SuspensionWatch((own,))
    assert not look(watch)
    prefect.states[own] += history(name)
    assert prefect.last(own).state_details.pause_timeout is not None
    assert look(watch)
    last = prefect.last(own)
    assert (last.type, last.name) == (StateType.RUNNING, "Suspending")
    assert last.state_details.pause_timeout is None
    assert prefect.forced == [True], "by Prefect's rules, it would be refused"
    assert not look(watch), "once is enough"
    assert not watch.resumed.is_set()


def test_a_second_suspension_while_members_leave_is_put_back(prefect: FlowRunStates) -> None:
    own = prefect.add("Running", "Suspending", "Suspended")
    assert look(SuspensionWatch((own,)))
    assert prefect.last(own).name == "Suspending"


def test_a_suspension_of_a_run_that_is_over_is_answered_with_closing(
    prefect: FlowRunStates,
) -> None:
    own = prefect.add("Running", "Suspended")
    assert look(SuspensionWatch((own,)), run_is_over=True)
    assert (prefect.last(own).type, prefect.last(own).name) == (StateType.RUNNING, "Closing")


def test_a_suspension_of_the_night_is_one_of_its_run(prefect: FlowRunStates) -> None:
    own, night = prefect.add("Running", deployed=False), prefect.add("Running", "Suspended")
    assert look(SuspensionWatch((own, night)))
    assert (prefect.last(own).name, prefect.last(night).name) == ("Running", "Suspending")


@pytest.mark.parametrize(
    ("name", "resumed"), [("Resuming", True), ("Pending", True), ("Cancelling", False)]
)
def test_a_resume_before_the_suspension_was_noticed_is_noticed(
    prefect: FlowRunStates, name: str, resumed: bool
) -> None:
    own = prefect.add("Running", "Suspended", name)
    watch = SuspensionWatch((own,))
    assert not look(watch)
    assert watch.resumed.is_set() is resumed
    assert len(prefect.states[own]) == 3


def test_without_an_answer_of_prefect_nothing_is_noticed(prefect: FlowRunStates) -> None:
    watch = SuspensionWatch((prefect.add("Running", "Suspended"),))
    prefect.away = True
    assert not look(watch)
    prefect.away = False
    assert look(watch)
    assert not look(SuspensionWatch(())), "outside of flows"


def suspend() -> State[Any]:
    return asyncio.run(suspension.suspend("tiny-1", REASON))


@pytest.mark.parametrize("name", ["Running", "Suspending", "Suspended"])
def test_the_flow_run_of_a_suspended_run_can_be_resumed_without_a_time_limit(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    own = prefect.add("Running", name)
    within(monkeypatch, own)
    with pytest.raises(Pause) as ended:
        suspend()
    last = prefect.last(own)
    assert (last.type, last.name, last.message) == (StateType.PAUSED, "Suspended", REASON)
    assert (last.state_details.pause_reschedule, last.state_details.pause_timeout) == (True, None)
    assert ended.value.state.name == "Suspended"
    assert prefect.forced == [True]


def test_a_flow_that_was_called_as_a_function_ends_with_how_to_go_on(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = prefect.add("Running", "Suspending", deployed=False)
    within(monkeypatch, own)
    final = suspend()
    assert final.name == "Cancelled"
    assert final.message == f"{REASON}; start the run again with the run id tiny-1 to go on"
    within(monkeypatch)
    assert suspend().message == final.message, "outside of flows"


def test_a_suspended_run_whose_flow_run_is_cancelled_is_cancelled(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = prefect.add("Running", "Suspending", "Cancelling")
    within(monkeypatch, own)
    assert suspend().name == "Cancelled"
    assert prefect.last(own).name == "Cancelling", "Prefect's engine sets its end"


def test_the_night_of_a_suspended_run_is_suspended(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, night = prefect.add("Running", deployed=False), prefect.add("Running", name="math")
    within(monkeypatch, own, night)
    with pytest.raises(Pause):
        suspend()
    assert (prefect.last(own).name, prefect.last(night).name) == ("Cancelled", "Suspended")


def settle(final: State[Any]) -> State[Any]:
    return asyncio.run(suspension.settle(final))


@pytest.mark.parametrize("final", [Completed(message="all done"), Failed(message="no")])
def test_the_end_of_a_run_that_was_over_when_it_was_suspended_is_set_here(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch, final: State[Any]
) -> None:
    own = prefect.add("Pending", "Running", "Suspended", "Closing")
    within(monkeypatch, own)
    assert settle(final) == final
    assert prefect.last(own) == final


@pytest.mark.parametrize(
    "names",
    [("Pending", "Running"), ("Suspended", "Resuming", "Pending", "Running")],
)
def test_the_end_of_other_runs_is_set_by_prefects_engine(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    own = prefect.add(*names)
    final: State[Any] = Completed(message="all done")
    within(monkeypatch, own)
    assert settle(final) == final
    assert len(prefect.states[own]) == len(names)
    prefect.away = True
    assert settle(final) == final
    within(monkeypatch)
    assert settle(final) == final


def test_a_night_suspended_when_its_run_was_over_can_be_resumed(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = prefect.add("Running", deployed=False)
    night = prefect.add("Running", "Suspended", "Closing", name="math")
    within(monkeypatch, own, night)
    with pytest.raises(Pause):
        settle(Completed(message="all done"))
    assert (prefect.last(own).name, prefect.last(night).name) == ("Completed", "Suspended")
    assert prefect.last(night).state_details.pause_timeout is None


def test_a_suspended_night_goes_on_when_its_run_was_cancelled_while_the_members_left(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's engine ends its process at its next task; another one reports the end."""
    own = prefect.add("Running", deployed=False)
    night = prefect.add("Running", "Suspended", "Suspending", name="math")
    within(monkeypatch, own, night)
    with pytest.raises(Pause):
        settle(Cancelled(message="by a person"))
    assert prefect.last(own).name == "Cancelled"
    assert prefect.names(night)[-2:] == ["Suspended", "Resuming"]


def test_a_night_that_is_cancelled_after_its_suspension_is_not_suspended_again(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = prefect.add("Running", deployed=False)
    night = prefect.add("Running", "Suspended", "Closing", "Cancelling", name="math")
    within(monkeypatch, own, night)
    final: State[Any] = Completed(message="all done")
    assert settle(final) == final
    assert (prefect.last(own).name, prefect.last(night).name) == ("Completed", "Cancelling")


def test_the_suspended_flow_runs_of_a_run_that_goes_on_elsewhere_are_cancelled(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, old = prefect.add("Running", "Suspended"), prefect.add("Running", "Suspended")
    other = prefect.add("Running", "Suspended", name="other", tags=("run:other",))
    running = prefect.add("Running")
    within(monkeypatch, own)
    asyncio.run(suspension.retire_suspended("tiny-1"))
    assert [prefect.last(each).name for each in (own, old, other, running)] == [
        *("Suspended", "Cancelled", "Suspended", "Running")
    ]
    prefect.away = True
    asyncio.run(suspension.retire_suspended("tiny-1"))


@pytest.mark.parametrize(
    ("names", "mark"),
    [
        (("Scheduled", "Pending", "Running"), None),
        (("Running", "Suspended", "Resuming", "Late", "Pending", "Running"), "Resuming"),
        (("Running", "Suspended", "Resuming", "Running", "Suspended", "Suspending"), "Suspending"),
        (("Running", "Suspended", "Pending", "Running"), "Suspended"),
        (("Running", "Suspending", "Crashed", "Scheduled", "Running"), "Crashed"),
    ],
)
def test_the_newest_suspension_resume_or_end_decides(
    names: tuple[str, ...], mark: str | None
) -> None:
    found = last_mark(history(*names))
    assert (found.name if found else None) == mark


def test_a_flow_run_was_suspended_if_it_was_since_its_process_was_started() -> None:
    assert was_suspended(history("Pending", "Running", "Suspended", "Closing"))
    assert not was_suspended(history("Suspended", "Resuming", "Pending", "Running"))
    assert not was_suspended(history("Pending", "Running", "Cancelling"))
    assert not was_suspended([])


def test_states_are_read_oldest_first(prefect: FlowRunStates) -> None:
    own = prefect.add("Scheduled", "Pending", "Running")
    states = asyncio.run(suspension.read_states(prefect, own))  # type: ignore[arg-type]  # all that is asked of a client here
    assert [state.name for state in states] == ["Scheduled", "Pending", "Running"]
