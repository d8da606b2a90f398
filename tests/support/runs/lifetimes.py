"""Lifetimes of services for tests."""

import threading
from collections.abc import Callable
from typing import TypeVar

from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.lifetime import Lifetime
from storage.records.control import Heartbeat
from storage.records.progress import ServiceKind
from storage.store.object_store import ObjectStore

WAITS_MAX = 1000

P = TypeVar("P")


def heartbeat_writer_of(run: ObjectStore, kind: ServiceKind, id: str = "") -> HeartbeatWriter:
    """A heartbeat that is never entered: it writes nothing, and `last` is what it would write."""
    return HeartbeatWriter(run, kind, id or kind, attempt=0, interval_s=3600.0)


def progress_of(heartbeat: Heartbeat, record: type[P]) -> P:
    """The progress record of a heartbeat, as the given record type."""
    assert isinstance(heartbeat.progress, record)
    return heartbeat.progress


def lifetime_of(
    run: ObjectStore, kind: ServiceKind, stop: threading.Event | None = None
) -> Lifetime:
    """A lifetime on the real clock."""
    return Lifetime(run, heartbeat_writer_of(run, kind), stop or threading.Event())


class ScriptedLifetime(Lifetime):
    """A lifetime whose pauses take no time: `on_wait(seconds)` is called instead of each.

    A true answer of `on_wait` sets `stop`.
    """

    def __init__(
        self, run: ObjectStore, kind: ServiceKind, on_wait: Callable[[float], object]
    ) -> None:
        super().__init__(run, heartbeat_writer_of(run, kind), threading.Event())
        self.waits_s: list[float] = []
        """Every pause, in seconds, as it was asked for."""
        self._on_wait = on_wait

    def wait(self, seconds: float) -> bool:
        assert len(self.waits_s) < WAITS_MAX, "the service never stops"
        self.waits_s.append(seconds)
        if self._on_wait(seconds):
            self.stop.set()
        return self.should_stop()
