import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import CreatedBy, StateType

from storage.errors import AstraFlowError
from storage.records.control import Stop
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.supervision import automatic_restart
from tasks.supervision.automatic_restart import enforce_limit, is_automatic

SUPERVISOR, MEMBER = "tiny-1", "trainer-solver #1 · tiny-1"
ROWS_MAX = 200
"""Of one response of Prefect's API."""


class Prefect:
    """A client of a server with crashed flow runs of these names, on which `creator` began this
    one.
    """

    def __init__(self, creator: str | None = None, crashed: Sequence[str] = ()) -> None:
        self.creator, self.crashed = creator, crashed
        self.away = False

    async def read_flow_run(self, flow_run_id: Any) -> SimpleNamespace:
        self._answer()
        creator = CreatedBy(id=uuid4(), type=self.creator) if self.creator else None
        return SimpleNamespace(created_by=creator)

    async def read_flow_runs(self, flow_run_filter: Any) -> list[SimpleNamespace]:
        self._answer()
        assert flow_run_filter.tags.all_ == ["run:tiny-1"]
        assert flow_run_filter.state.type.any_ == [StateType.CRASHED]
        assert flow_run_filter.end_time.after_ is not None
        names = flow_run_filter.name.any_ if flow_run_filter.name else self.crashed
        found = [name for name in self.crashed if name in names]
        return [
            SimpleNamespace(tags=["run:tiny-1", *([] if name == SUPERVISOR else ["member:m"])])
            for name in found[:ROWS_MAX]
        ]

    def _answer(self) -> None:
        if self.away:
            raise httpx.ConnectError("away")


def _use(monkeypatch: pytest.MonkeyPatch, prefect: Prefect) -> Prefect:
    @asynccontextmanager
    async def get_client() -> AsyncIterator[Prefect]:
        yield prefect

    monkeypatch.setattr(automatic_restart, "get_client", get_client)
    runtime = SimpleNamespace(flow_run=SimpleNamespace(get_id=lambda: str(uuid4())))
    monkeypatch.setattr(automatic_restart, "runtime", runtime)
    return prefect


@pytest.mark.parametrize(
    ("creator", "expected"), [("AUTOMATION", True), ("DEPLOYMENT", False), (None, False)]
)
def test_a_supervisor_knows_whether_an_automation_has_started_it(
    monkeypatch: pytest.MonkeyPatch, creator: str | None, expected: bool
) -> None:
    _use(monkeypatch, Prefect(creator))
    assert asyncio.run(is_automatic()) == expected


def test_without_an_answer_a_supervisor_counts_as_started_by_a_person(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _use(monkeypatch, Prefect("AUTOMATION")).away = True
    assert not asyncio.run(is_automatic())


def test_a_run_whose_supervisors_keep_dying_fails(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefect = _use(monkeypatch, Prefect(crashed=[SUPERVISOR, SUPERVISOR, MEMBER]))
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
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, Prefect(crashed=[*[MEMBER] * ROWS_MAX, SUPERVISOR, SUPERVISOR]))
    with pytest.raises(AstraFlowError, match="its supervisor died 2 times"):
        asyncio.run(enforce_limit(memory_store, "tiny-1", 1))


def test_a_run_that_had_ended_keeps_its_end(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, Prefect(crashed=[SUPERVISOR, SUPERVISOR]))
    runs.request_stop(memory_store, Stop("completed", "all done", 1.0))
    with pytest.raises(AstraFlowError):
        asyncio.run(enforce_limit(memory_store, "tiny-1", 1))
    stop = runs.read_stop(memory_store)
    assert stop is not None
    assert stop.state == "completed"
