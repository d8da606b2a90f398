"""The effect of SIGTERM on the process of a flow: it sets an event, and the previous handler is
restored.
"""

import asyncio
import os
import signal
import threading

import pytest
from prefect.exceptions import TerminationSignal

from tasks.services import sigterm
from tests.support.patience import PATIENCE_S


def test_sigterm_sets_an_event_and_the_previous_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with sigterm.stop_on_sigterm() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(PATIENCE_S)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.timeout(60)  # a handler that needs the main thread's lock blocks permanently
def test_sigterm_is_handled_at_any_moment_of_a_wait() -> None:
    with sigterm.stop_on_sigterm() as stop:
        with stop._cond:  # as within `stop.wait`, which the handler interrupts  # type: ignore[attr-defined]
            signal.raise_signal(signal.SIGTERM)
        assert stop.wait(PATIENCE_S)


def test_sigterm_sets_the_event_of_an_event_loop() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def hear() -> None:
        async with sigterm.sigterm_as_event() as told:
            assert not told.is_set()
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
            await asyncio.wait_for(told.wait(), PATIENCE_S)

    asyncio.run(hear())
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("cancelling", [True, False])
def test_a_drained_service_is_cancelled_on_prefects_request_and_crashed_otherwise(
    cancelling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sigterm, "is_being_cancelled", lambda: cancelling)
    if cancelling:
        assert sigterm.drained().is_cancelled()
    else:
        with pytest.raises(TerminationSignal):
            sigterm.drained()
