"""What SIGTERM does to a flow's process: it sets an event, and the handler that was there before comes back."""

import asyncio
import os
import signal
import threading

import pytest
from prefect.exceptions import TerminationSignal

from tasks.services import sigterm
from tests.patience import PATIENCE_S


def test_a_service_hears_sigterm_as_an_event_and_whoever_stops_it_otherwise_did_not_tell_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with sigterm.leave_on_sigterm() as leave:
        leave.stop.set()
        assert not leave.told
    with sigterm.leave_on_sigterm() as leave:
        os.kill(os.getpid(), signal.SIGTERM)
        assert leave.stop.wait(PATIENCE_S)
        assert leave.told
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_service_may_be_told_to_leave_from_within() -> None:
    leave = sigterm.Leave()
    leave.tell()
    assert leave.told
    assert leave.stop.is_set()


def test_an_event_loop_hears_sigterm_as_an_event() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def hear() -> None:
        async with sigterm.sigterm_as_event() as told:
            assert not told.is_set()
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
            await asyncio.wait_for(told.wait(), PATIENCE_S)

    asyncio.run(hear())
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("cancelling", [True, False])
def test_a_drained_service_is_cancelled_if_prefect_asked_for_it_and_has_crashed_otherwise(
    cancelling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sigterm, "is_being_cancelled", lambda: cancelling)
    if cancelling:
        assert sigterm.drained().is_cancelled()
    else:
        with pytest.raises(TerminationSignal):
            sigterm.drained()
