"""Writer of a member's heartbeat: a thread that overwrites it every few seconds.

service ──update, span──▶ HeartbeatWriter ──every interval_s──▶ heartbeats/{kind}/{id}.json
                                 │    └──▶ observe()
                                 └── a stored heartbeat of a higher attempt ──▶ leave()
"""

import contextvars
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from storage import layout
from storage.coordination.heartbeats import TEXT_MAX, encode, is_too_far_ahead, parse
from storage.errors import AstraFlowError, ConfigError
from storage.formats.json_values import storable_text
from storage.records.control import ClosingStep, Heartbeat, ServiceState, WaitReason
from storage.records.machine_use import MachineUse
from storage.records.numbers import QUANTITY_MAX
from storage.records.progress import PROGRESS_OF, SIGNED, Progress, ServiceKind
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)

STORE_PATIENCE_S = 2.5
"""Time after which a read or a write of a heartbeat gives up on a failing store. The next heartbeat
is a new try.
"""
CLOSE_TIMEOUT_S = 15.0
"""Time for which the end of a `HeartbeatWriter`'s block waits for its thread."""


class HeartbeatWriter:
    """Writer of a member's heartbeat: every `interval_s`, until the end of its `with` block.

        with HeartbeatWriter(run, "trainer", "trainer-solver", 0, interval_s=2.0) as heartbeat:
            with heartbeat.span("wait"):
                batch = next_batch()
            heartbeat.update(
                state=ServiceState.WORKING, progress=TrainerProgress(step=3), versions={"solver": 2}
            )

    With `leave`, attempts are fenced: if the stored heartbeat is of a higher attempt, this writer
    stops permanently and calls `leave` once, so that the newer of two running attempts of a member
    remains. `observe` is called with every heartbeat after the first, also with one that could not
    be written. The thread that calls it has the context variables of the one that made the writer.
    `machine` returns the last measurement of the machine, at once.

    All methods may be called from any thread. After the first write, errors of the store do not
    stop the service: they are logged, once per kind of error.
    """

    def __init__(
        self,
        run: ObjectStore,
        kind: ServiceKind,
        id: str,
        attempt: int,
        interval_s: float,
        region: str = "",
        leave: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        observe: Callable[[Heartbeat], None] = lambda beat: None,
        machine: Callable[[], MachineUse | None] = lambda: None,
    ) -> None:
        self._run = replace(run, patience_s=min(run.patience_s, STORE_PATIENCE_S))
        self._key = layout.heartbeat(kind, id)
        self._interval_s = interval_s
        self._leave = leave
        self._superseded = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._serve,),
            name=f"heartbeat-{id}",
            daemon=True,
        )
        self._observe = observe
        self._logged_observer = False
        self._machine = machine
        self._logged: set[type[AstraFlowError]] = set()
        self._clock = clock
        self._born_s = clock()
        now_s = time.time()
        self._beat = Heartbeat(
            kind=kind,
            id=id,
            attempt=attempt,
            beats=0,
            beat_s=now_s,
            started_s=now_s,
            pid=os.getpid(),
            host=socket.gethostname(),
            state=ServiceState.STARTING,
            region=region,
            progress=PROGRESS_OF[kind](),
        )

    def update(
        self,
        *,
        state: ServiceState | ClosingStep | None = None,
        wait_reason: WaitReason | None = None,
        note: str | None = None,
        progress: Progress | None = None,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        """Change fields of the next heartbeat; those not given keep their values.

        Args:
            wait_reason: none if only `state` is given.
            progress: replaces the whole progress record; numbers that are out of a heartbeat's
                bounds are left out.
            versions: merged by policy.
        """
        if wait_reason is None and state is not None:
            wait_reason = WaitReason.NONE
        with self._lock:
            beat = self._beat
            if progress is not None and type(progress) is not type(beat.progress):
                raise TypeError(f"{beat.kind} has no {type(progress).__name__}")
            self._beat = replace(
                beat,
                state=beat.state if state is None else state,
                wait_reason=beat.wait_reason if wait_reason is None else wait_reason,
                note=beat.note if note is None else storable_text(note[:TEXT_MAX]),
                progress=beat.progress if progress is None else _storable(progress),
                versions={**beat.versions, **(versions or {})},
            )

    @contextmanager
    def span(self, component: str) -> Iterator[None]:
        """Add the wall-clock seconds of the block to `seconds[component]`, also when it raises.

        Concurrent spans of several threads add up.
        """
        start_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - start_s
            with self._lock:
                seconds = {
                    **self._beat.seconds,
                    component: self._beat.seconds.get(component, 0.0) + spent_s,
                }
                self._beat = replace(self._beat, seconds=seconds)

    @property
    def last(self) -> Heartbeat:
        """The last heartbeat, with every update since."""
        with self._lock:
            return self._beat

    def __enter__(self) -> "HeartbeatWriter":
        """Write the first heartbeat.

        Raises:
            ConfigError: it cannot be written until a person has corrected the store. Without
                heartbeats, observers would consider the service dead, and replace it repeatedly.
        """
        try:
            self._write()
        except ConfigError as error:
            raise ConfigError(
                f"cannot write the heartbeat {self._key}: {error}; correct that, then start the "
                "run again with the same run id"
            ) from error
        except AstraFlowError as error:
            self._log(error)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if error is None:
            self.update(state=ServiceState.DONE)
        else:
            self.update(state=ServiceState.FAILED, note=f"{type(error).__name__}: {error}")
        self._try_write()

    def _serve(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._try_write()

    def _try_write(self) -> None:
        try:
            self._write()
        except AstraFlowError as error:
            self._log(error)
        if self._superseded:
            return
        try:
            self._observe(self.last)
        except Exception:  # of code that only shows heartbeats: without them the service is lost
            if not self._logged_observer:
                log.exception("heartbeats of %s are written, but not shown", self._beat.id)
            self._logged_observer = True

    def _write(self) -> None:
        if self._is_superseded():
            return
        with self._lock:
            beat = self._beat
            seconds = {**beat.seconds, "cpu": _cpu_seconds()}
            self._beat = beat = replace(
                beat,
                beats=beat.beats + 1,
                beat_s=time.time(),
                alive_s=self._clock() - self._born_s,
                seconds=seconds,
                machine=self._machine(),
            )
        self._run.put(self._key, encode(beat))

    def _log(self, error: AstraFlowError) -> None:
        if type(error) not in self._logged:
            self._logged.add(type(error))
            log.warning("%s continues without heartbeats: %s", self._beat.id, error)

    def _is_superseded(self) -> bool:
        """Return whether the stored heartbeat is a higher attempt's; False if it is unreadable, or
        of an attempt that cannot have been launched.
        """
        if self._leave is None or self._superseded:
            return self._superseded
        try:
            stored = parse(self._run.get(self._key), self._key)
        except AstraFlowError as error:
            log.debug("no heartbeat in %s: %s", self._key, error)
            return False
        last = self.last
        if stored.attempt <= last.attempt or is_too_far_ahead(stored, last.attempt):
            return False
        self._superseded = True
        log.warning(
            "%s: attempt %d is running, so attempt %d stops", last.id, stored.attempt, last.attempt
        )
        self._leave()
        return True


def _storable(progress: Progress) -> Progress:
    """Replace numbers that are out of a heartbeat's bounds by their defaults."""
    changes: dict[str, Any] = {}
    for name, value in vars(progress).items():
        if isinstance(value, Mapping):
            changes[name] = {key: each for key, each in value.items() if _is_quantity(each)}
        elif value is not None and not _is_quantity(abs(value) if name in SIGNED else value):
            changes[name] = vars(type(progress)())[name]
    return replace(progress, **changes)


def _is_quantity(value: float) -> bool:
    return 0 <= value <= QUANTITY_MAX


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
