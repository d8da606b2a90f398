"""Handle SIGTERM in a flow's process, and choose the final state of its flow run.

Prefect's own handler raises in the middle of whatever runs. Here the signal only sets an event:
services drain, the supervisor winds down, and then the flow returns. The sender decides the final
state: `Cancelled` when Prefect cancelled the flow run, else `Crashed` (through TerminationSignal):
another attempt continues the work.
"""

import _thread
import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled

from tasks.services.prefect_errors import UNANSWERED
from tasks.supervision.flow_processes import MARK

log = logging.getLogger(__name__)


@contextmanager
def stop_on_sigterm() -> Iterator[threading.Event]:
    """Return an event that SIGTERM sets, for a flow in the main thread without an event loop."""
    stop = threading.Event()

    def set_stop(signum: int, frame: FrameType | None) -> None:
        # In a thread: the main thread may be in `stop.wait`, with the lock that `stop.set` takes.
        _thread.start_new_thread(stop.set, ())

    before = signal.signal(signal.SIGTERM, set_stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


@asynccontextmanager
async def sigterm_as_event() -> AsyncIterator[asyncio.Event]:
    """Return an event that SIGTERM sets, for a flow in the main thread's event loop."""
    stop = asyncio.Event()
    before = signal.getsignal(signal.SIGTERM)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def drained() -> State[None]:
    """Return the final state of the flow run of a service that was stopped and has drained.

    Raises TerminationSignal when Prefect did not cancel it: the flow run has then crashed, and
    another attempt does its member's work.
    """
    if not is_being_cancelled():
        raise TerminationSignal(signal=signal.SIGTERM)
    return Cancelled(message="it was cancelled, and drained")


def is_being_cancelled() -> bool:
    """Return whether Prefect is cancelling the current flow run, or that of this process, of which
    the current one may be a subflow; False when its server does not answer.
    """
    ids = dict.fromkeys([str(flow_run.get_id()), os.environ.get(MARK) or ""])
    try:
        with get_client(sync_client=True) as client:
            states = [client.read_flow_run(UUID(each)).state for each in ids if each]
    except (*UNANSWERED, ObjectNotFound) as error:
        log.warning("whether this flow run is cancelled cannot be read from Prefect: %s", error)
        return False
    return any(state and (state.is_cancelling() or state.is_cancelled()) for state in states)
