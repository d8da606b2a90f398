"""How a service outlives its store: try again, with bounded pauses, until told to leave. Knows nothing of training."""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from storage.coordination.heartbeats import Pulse
from storage.errors import TransientError

log = logging.getLogger(__name__)

PAUSE_S = 0.5
PAUSE_MAX_S = 10.0

R = TypeVar("R")


def insist(what: str, call: Callable[[], R], pulse: Pulse, stop: threading.Event) -> R:
    """The result of `call`, tried again as often as the store fails transiently, with pauses of 0.5 s doubling to 10 s.

    TransientError only once `stop` is set: a service that shall leave does not wait for a store that is away.
    """
    pause_s = PAUSE_S
    while True:
        try:
            return call()
        except TransientError as error:
            if stop.is_set():
                raise
            note = f"{what} failed and is tried again in {pause_s:g} s: {error}"
            pulse.update(note=note)
            log.warning("%s", note)
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)
