import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prefect.exceptions import PrefectHTTPStatusError

from storage.store.object_store import ObjectStore
from tasks.events import announcing as module
from tasks.events.announcing import announcing
from tasks.events.run_events import EventQueue


class Prefect:
    """A client that records the events that it takes; `away` requests fail first."""

    def __init__(self, away: int = 0) -> None:
        self.away = away
        self.refuses = ""
        """An event because of which it refuses the whole request."""
        self.status = 422
        self.taken: list[str] = []
        self.requests = 0
        self.took = asyncio.Event()

    async def request(self, method: str, path: str, json: list[dict[str, Any]]) -> None:
        assert (method, path) == ("POST", "/events")
        self.requests += 1
        if self.away:
            self.away -= 1
            raise httpx.ConnectError("away")
        if self.refuses in (each["event"] for each in json):
            response = httpx.Response(self.status, request=httpx.Request(method, "http://server"))
            raise PrefectHTTPStatusError("no", request=response.request, response=response)
        self.taken += [each["event"] for each in json]
        self.took.set()


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Prefect:
    client = Prefect()

    @asynccontextmanager
    async def get_client() -> AsyncIterator[Prefect]:
        yield client

    monkeypatch.setattr(module, "get_client", get_client)
    return client


async def _run(store: ObjectStore, *names: str, interval_s: float = 3600.0) -> EventQueue:
    queue = EventQueue(store, [])
    async with announcing(store, "r", queue, interval_s):
        for name in names:
            queue.add(name, "1")
    return queue


def test_events_are_sent_at_the_end_at_the_latest(
    prefect: Prefect, memory_store: ObjectStore
) -> None:
    queue = asyncio.run(_run(memory_store, "run.started", "run.completed"))
    assert prefect.taken == ["astraflow.run.started", "astraflow.run.completed"]
    assert queue.waiting() == []


def test_events_wait_for_a_server_that_does_not_answer(
    prefect: Prefect, memory_store: ObjectStore
) -> None:
    prefect.away = module.LAST_TRIES - 1
    asyncio.run(_run(memory_store, "run.started"))
    assert prefect.taken == ["astraflow.run.started"]
    prefect.away = 1000
    queue = asyncio.run(_run(memory_store, "run.completed"))
    assert len(queue.waiting()) == 1, "the run ends without it"


def test_an_event_that_the_server_refuses_delays_no_other(
    prefect: Prefect, memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    prefect.refuses = "astraflow.b"
    queue = asyncio.run(_run(memory_store, *"abc"))
    assert prefect.taken == ["astraflow.a", "astraflow.c"]
    assert queue.waiting() == []
    assert "refuses the event astraflow.b" in caplog.text


@pytest.mark.parametrize("status", [401, 429, 500])
def test_no_event_is_dropped_for_a_server_that_may_take_it_later(
    prefect: Prefect, memory_store: ObjectStore, status: int
) -> None:
    prefect.refuses, prefect.status = "astraflow.b", status
    queue = asyncio.run(_run(memory_store, *"abc"))
    assert [event.name for event in queue.waiting()] == ["a", "b", "c"]


def test_many_events_are_sent_in_several_requests(
    prefect: Prefect, memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVENTS_MAX", 2)
    asyncio.run(_run(memory_store, *"abc"))
    assert prefect.taken == ["astraflow.a", "astraflow.b", "astraflow.c"]
    assert prefect.requests == 2


def test_events_are_sent_while_the_run_goes_on(prefect: Prefect, memory_store: ObjectStore) -> None:
    async def run() -> list[str]:
        queue = EventQueue(memory_store, [])
        queue.add("run.started", "1")
        async with announcing(memory_store, "r", queue, 0.001):
            await prefect.took.wait()
            return list(prefect.taken)

    assert asyncio.run(run()) == ["astraflow.run.started"]


def test_an_unexpected_error_of_the_client_fails_no_run(
    prefect: Prefect,
    memory_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def surprise(*_: Any, **__: Any) -> None:
        raise RuntimeError("a surprise")

    monkeypatch.setattr(prefect, "request", surprise)
    asyncio.run(_run(memory_store, "run.started"))
    assert "sending events to Prefect ended early" in caplog.text
