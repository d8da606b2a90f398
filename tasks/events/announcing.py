"""Sends a run's events to Prefect in the background, so that a server that does not answer slows
nothing; the events wait for it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.runtime import flow_run

from storage.errors import AstraFlowError
from storage.store.object_store import ObjectStore
from tasks.events.run_events import EventQueue, body
from tasks.services.prefect_errors import UNANSWERED, is_bad_content

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
EVENTS_MAX = 50
"""Events in one request."""
LAST_TRIES = 3
"""Looks at the end of the run, for what has not been sent by then."""


@contextlib.asynccontextmanager
async def announcing(
    run: ObjectStore, run_id: str, queue: EventQueue, interval_s: float = INTERVAL_S
) -> AsyncIterator[None]:
    """Send the queue's events while the block runs, and what is left at its end."""
    over = asyncio.Event()
    flow_run_id = flow_run.get_id() or ""

    async def send_all() -> None:
        while not over.is_set():
            await _look_and_send(run, run_id, queue, flow_run_id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), interval_s)

    sending = asyncio.create_task(send_all())
    try:
        yield
    finally:
        over.set()
        try:
            await sending
            for _ in range(LAST_TRIES):
                if await _look_and_send(run, run_id, queue, flow_run_id):
                    break
        except Exception:  # whatever Prefect's client raises: no event is worth a run
            log.exception("sending events to Prefect ended early")


async def _look_and_send(
    run: ObjectStore, run_id: str, queue: EventQueue, flow_run_id: str
) -> bool:
    """Queue what is new in the store, and send the queue; return whether nothing is left."""
    try:
        await asyncio.to_thread(queue.look)
    except AstraFlowError as error:
        log.debug("the store was not read for events: %s", error)
    try:
        async with get_client() as client:
            while events := queue.waiting()[:EVENTS_MAX]:
                bodies = [body(event, run, run_id, flow_run_id) for event in events]
                await _send(client, bodies)
                queue.sent(events)
    except UNANSWERED as error:
        log.debug("Prefect did not take %d events: %s", len(queue.waiting()), error)
        return False
    return True


async def _send(client: PrefectClient, bodies: Sequence[dict[str, Any]]) -> None:
    """Send events in one request; one that the server refuses is logged, and delays no other."""
    try:
        await client.request("POST", "/events", json=list(bodies))
    except UNANSWERED as error:
        if not is_bad_content(error):
            raise
        if len(bodies) == 1:
            log.warning("Prefect refuses the event %s: %s", bodies[0]["event"], error)
            return
        for each in bodies:
            await _send(client, [each])
