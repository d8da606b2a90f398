"""How a supervisor was started, and the end of runs whose supervisors keep dying."""

import asyncio

import pytest

from storage.errors import AstraFlowError
from storage.records.control import Stop
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.supervision import suspension
from tasks.supervision.automatic_restart import (
    Start,
    died_suspended,
    enforce_limit,
    read_start,
    start_of,
)
from tests.support.runs.flow_run_states import FlowRunStates, history

MEMBER = "trainer-solver #1 · tiny-1"
ROWS_MAX = 200
"""Of one response of Prefect's API."""
BEGUN = ("Scheduled", "Pending", "Running")


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> FlowRunStates:
    return FlowRunStates(monkeypatch)


@pytest.mark.parametrize(
    ("creator", "names", "start"),
    [
        ("AUTOMATION", BEGUN, Start.AUTOMATIC),
        ("DEPLOYMENT", BEGUN, Start.REQUESTED),
        (None, BEGUN, Start.REQUESTED),
        (None, (*BEGUN, "Suspended", "Resuming", "Pending", "Running"), Start.RESUMED),
        ("AUTOMATION", (*BEGUN, "Suspended", "Resuming", "Late", "Running"), Start.RESUMED),
        (None, (*BEGUN, "Suspending", "Pending", "Running"), Start.AUTOMATIC),
        (None, (*BEGUN, "Suspending", "Crashed", *BEGUN), Start.REQUESTED),
        ("AUTOMATION", (*BEGUN, "Suspending", "Crashed", *BEGUN), Start.AUTOMATIC),
    ],
)
def test_the_start_of_a_supervisor_is_read_from_its_creator_and_its_states(
    prefect: FlowRunStates,
    monkeypatch: pytest.MonkeyPatch,
    creator: str | None,
    names: tuple[str, ...],
    start: Start,
) -> None:
    assert start_of(creator, history(*names)) is start
    process = prefect.add(*names, creator=creator)
    own = prefect.add("Running", deployed=False)
    monkeypatch.setattr(suspension, "own_flow_runs", lambda: (own, process))
    assert asyncio.run(read_start()) is start


def test_without_an_answer_a_supervisor_counts_as_started_by_a_person(
    prefect: FlowRunStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = prefect.add(*BEGUN, creator="AUTOMATION")
    monkeypatch.setattr(suspension, "own_flow_runs", lambda: (own,))
    prefect.away = True
    assert asyncio.run(read_start()) is Start.REQUESTED
    monkeypatch.setattr(suspension, "own_flow_runs", tuple)
    assert asyncio.run(read_start()) is Start.REQUESTED, "outside of flows"


def test_a_run_whose_supervisors_keep_dying_fails(
    memory_store: ObjectStore, prefect: FlowRunStates
) -> None:
    for name in ("tiny-1", "tiny-1", MEMBER):
        prefect.add(*BEGUN, "Crashed", name=name)
    asyncio.run(enforce_limit(memory_store, "tiny-1", 2))
    assert runs.read_stop(memory_store) is None
    prefect.away = True
    asyncio.run(enforce_limit(memory_store, "tiny-1", 0))
    prefect.away = False
    with pytest.raises(AstraFlowError, match="run tiny-1 failed: its supervisor died 2 times"):
        asyncio.run(enforce_limit(memory_store, "tiny-1", 1))
    stop = runs.read_stop(memory_store)
    assert stop is not None
    assert (stop.state, stop.reason[:22]) == ("failed", "its supervisor died 2 ")


def test_crashed_members_hide_no_supervisor(
    memory_store: ObjectStore, prefect: FlowRunStates
) -> None:
    for name in ("tiny-1", "tiny-1", *[MEMBER] * ROWS_MAX):
        # the members died later, and one response has the newest only
        prefect.add(*BEGUN, *["Running"] * (name == MEMBER), "Crashed", name=name)
    prefect.rows_max = ROWS_MAX
    with pytest.raises(AstraFlowError, match="its supervisor died 2 times"):
        asyncio.run(enforce_limit(memory_store, "tiny-1", 1))


def test_a_run_that_had_ended_keeps_its_end(
    memory_store: ObjectStore, prefect: FlowRunStates
) -> None:
    for _ in range(2):
        prefect.add(*BEGUN, "Crashed")
    runs.request_stop(memory_store, Stop("completed", "all done", 1.0))
    with pytest.raises(AstraFlowError):
        asyncio.run(enforce_limit(memory_store, "tiny-1", 1))
    stop = runs.read_stop(memory_store)
    assert stop is not None
    assert stop.state == "completed"


@pytest.mark.parametrize(
    ("died", "expected"),
    [
        ([(*BEGUN, "Suspended", "Crashed")], True),
        ([(*BEGUN, "Suspending", "Crashed")], True),
        ([(*BEGUN, "Crashed")], False),
        ([("Running", "Suspended", "Crashed"), (*BEGUN, "Pending", "Running", "Crashed")], False),
        ([], False),
    ],
)
def test_a_supervisor_may_die_before_it_has_stored_its_suspension(
    prefect: FlowRunStates, died: list[tuple[str, ...]], expected: bool
) -> None:
    for names in died:
        prefect.add(*names)
    prefect.add(*BEGUN, "Pending", "Running", "Suspending", "Crashed", name=MEMBER)
    assert asyncio.run(died_suspended("tiny-1")) is expected
    prefect.away = True
    assert not asyncio.run(died_suspended("tiny-1"))
