"""Heartbeats: the state of each service, written every few seconds. Hints: overwritten, never the
base of a correctness decision.

    HeartbeatWriter ──encode──▶ heartbeats/{kind}/{id}.json ──parse──▶ Heartbeat ──▶ supervisor,
                                                                        status, gc, benchmarks

Every view of a run reads all of its heartbeats, so each is small and bounded: its numbers are
finite, its texts are short, and it lies under its member's own key. `parse` refuses any other
heartbeat, and `HeartbeatWriter` writes no other. States, wait reasons and progress fields of a
newer release are read as far as this release has them.
"""

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from types import TracebackType
from typing import Any, get_args

from storage import layout
from storage.errors import UNREADABLE, AstraFlowError, ConfigError, CorruptError, NotFoundError
from storage.formats import json_objects
from storage.formats.json_objects import build, decode, dump
from storage.formats.json_values import storable_text
from storage.records.control import (
    ClosingStep,
    Heartbeat,
    HeartbeatHeader,
    ServiceState,
    WaitReason,
)
from storage.records.numbers import QUANTITY_MAX, Quantity
from storage.records.progress import PROGRESS_OF, Progress, ServiceKind
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)

STORE_PATIENCE_S = 2.5
"""The read and the write of one heartbeat each give up on a failing store after this time; the next
heartbeat tries again.
"""
CLOSE_TIMEOUT_S = 15.0
"""How long the end of a `HeartbeatWriter`'s block waits for its thread."""
_KEY = re.compile(rf"{layout.HEARTBEATS}/{layout.NAME.pattern}/{layout.NAME.pattern}\.json")
"""Other keys are no objects of the run."""
_FOLDERS = {f"{layout.HEARTBEATS}/{kind}" for kind in get_args(ServiceKind)}
"""An object or a link under such a key hides the heartbeats of a kind."""

BYTES_MAX = 1_000_000
TEXT_MAX = 2_000
"""Characters of a note, and of every other text; longer texts are cut when written and when read.
"""


@dataclass(frozen=True, kw_only=True)
class _StoredHeartbeat(HeartbeatHeader):
    """A heartbeat as it is stored: the progress record split into numbers and numbers by policy."""

    progress: Mapping[str, Quantity] = field(default_factory=dict)
    by_policy: Mapping[str, Mapping[str, Quantity]] = field(default_factory=dict)
    """Field of the progress record → policy → number."""
    rates: Mapping[str, Quantity] = field(default_factory=dict)
    """More numbers of the progress record, where an earlier release wrote the heartbeat."""


@dataclass(frozen=True)
class Heartbeats:
    """The newest heartbeats of a run's members, sorted by key."""

    beats: list[Heartbeat]
    unreadable: Mapping[str, str]
    """Key → why it cannot be read. The member's next heartbeat replaces it, unless that cannot be
    read either. With the key `heartbeats` alone, not even their names could be listed.
    """


def look(run: ObjectStore) -> Heartbeats:
    """Read the newest heartbeat of every member."""
    beats: list[Heartbeat] = []
    unreadable: dict[str, str] = {}
    try:
        keys = run.list(layout.HEARTBEATS)
    except ConfigError as error:
        return Heartbeats(beats, {layout.HEARTBEATS: str(error)})
    for key in keys:
        if key in _FOLDERS:
            unreadable[key] = (
                f"{run.url}/{key} is no folder, where the heartbeats of a kind of members belong; "
                "remove it"
            )
        if not _KEY.fullmatch(key):
            continue
        try:
            beats.append(parse(run.get(key), key))
        except NotFoundError:
            continue
        except UNREADABLE as error:
            log.debug("no heartbeat in %s: %s", key, error)
            unreadable[key] = str(error)
    return Heartbeats(beats, unreadable)


def read_all(run: ObjectStore) -> list[Heartbeat]:
    """Read the newest readable heartbeat of every member, sorted by key.

    Raises:
        ConfigError: the heartbeats cannot be listed.
    """
    seen = look(run)
    if layout.HEARTBEATS in seen.unreadable:
        raise ConfigError(seen.unreadable[layout.HEARTBEATS])
    return seen.beats


def parse(body: bytes, key: str) -> Heartbeat:
    """Parse the heartbeat in the object `key`.

    Raises:
        CorruptError: it is too large, holds a number out of bounds, or is another member's.
    """
    if len(body) > BYTES_MAX:
        raise CorruptError(f"{key} has {len(body):,} bytes; a heartbeat has at most {BYTES_MAX:,}")
    stored = decode(_StoredHeartbeat, body, key)
    try:
        stored_key = layout.heartbeat(stored.kind, stored.id)
    except ConfigError as error:
        raise CorruptError(f"{key}: {error}") from error
    if stored_key != key:
        raise CorruptError(f"{key} holds the heartbeat of {stored_key}")
    if stored.region and not layout.NAME.fullmatch(stored.region):
        raise CorruptError(
            f"{key} names the region {stored.region[:TEXT_MAX]!r}; a region is letters, digits, "
            "'_' and '-'"
        )
    header = {name: getattr(stored, name) for name in _HEADER}
    cut = {name: getattr(stored, name)[:TEXT_MAX] for name in ("host", "note")}
    return Heartbeat(
        **header
        | cut
        | {
            "state": _member_of(stored.state[:TEXT_MAX], ServiceState, ClosingStep),
            "wait_reason": _member_of(stored.wait_reason[:TEXT_MAX], WaitReason),
            "progress": build(PROGRESS_OF[stored.kind], dump(_progress_fields(stored)), key),
        }
    )


def encode(beat: Heartbeat) -> bytes:
    """Return the stored form of a heartbeat."""
    header = {name: getattr(beat, name) for name in _HEADER}
    values = {name: value for name, value in vars(beat.progress).items() if value is not None}
    by_policy = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    numbers = {name: value for name, value in values.items() if name not in by_policy}
    return json_objects.encode({**header, "progress": numbers, "by_policy": by_policy})


_HEADER = tuple(each.name for each in fields(HeartbeatHeader))


def _member_of(text: str, *enums: type[StrEnum]) -> str:
    """The enum member with this value; `text` itself when no enum has it."""
    return next((enum(text) for enum in enums if text in set(enum)), text)


def _progress_fields(stored: _StoredHeartbeat) -> dict[str, Any]:
    """Join the numbers of a progress record.

    Earlier releases wrote `rates` beside `progress`, and numbers by policy as
    `weights_bytes_home_solver` and `batches/solver`.
    """
    numbers = {**stored.rates, **stored.progress}
    joined: dict[str, Any] = {**numbers, **stored.by_policy}
    for each in fields(PROGRESS_OF[stored.kind]):
        if each.default_factory is dict and each.name not in stored.by_policy:
            prefixes = (f"{each.name}_", f"{each.name}/")
            joined[each.name] = {
                name[len(each.name) + 1 :]: value
                for name, value in numbers.items()
                if name.startswith(prefixes)
            }
    return joined


class HeartbeatWriter:
    """Writes a member's heartbeat every `interval_s`, from the start to the end of a `with` block.

        with HeartbeatWriter(run, "trainer", "trainer-solver", attempt=0, interval_s=2.0) as heartbeat:
            with heartbeat.span("wait"):
                batch = next_batch()
            heartbeat.update(
                state=ServiceState.WORKING, progress=TrainerProgress(step=3), versions={"solver": 2}
            )

    With `leave`, attempts are fenced: when the stored heartbeat is a higher attempt's, this writer
    stops for good and calls `leave` once, so that of two living attempts of a member the newer one
    stays. All methods may be called from any thread. A store that fails later than the first write
    never breaks the service: it is logged, once per kind of error.
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
    ) -> None:
        self._run = replace(run, patience_s=min(run.patience_s, STORE_PATIENCE_S))
        self._key = layout.heartbeat(kind, id)
        self._interval_s = interval_s
        self._leave = leave
        self._superseded = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"heartbeat-{id}", daemon=True)
        self._logged: set[type[AstraFlowError]] = set()
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
            progress: replaces the progress record as a whole; numbers in it that no heartbeat can
                hold are left out.
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
        """Add the wall-clock of the block to `seconds[component]`, also when it raises. Spans of
        threads add up.
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
            ConfigError: it cannot be written before a person has corrected the store. Observers
                would take the service for dead, and replace it again and again.
        """
        try:
            self._write()
        except ConfigError as error:
            raise ConfigError(f"cannot write the heartbeat {self._key}: {error}") from error
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

    def _write(self) -> None:
        if self._is_superseded():
            return
        with self._lock:
            beat = self._beat
            seconds = {**beat.seconds, "cpu": _cpu_seconds()}
            self._beat = beat = replace(
                beat, beats=beat.beats + 1, beat_s=time.time(), seconds=seconds
            )
        self._run.put(self._key, encode(beat))

    def _log(self, error: AstraFlowError) -> None:
        if type(error) not in self._logged:
            self._logged.add(type(error))
            log.warning("%s goes on without heartbeats: %s", self._beat.id, error)

    def _is_superseded(self) -> bool:
        """Whether the stored heartbeat is a higher attempt's. One that cannot be read is not."""
        if self._leave is None or self._superseded:
            return self._superseded
        try:
            stored = parse(self._run.get(self._key), self._key)
        except AstraFlowError as error:
            log.debug("no heartbeat in %s: %s", self._key, error)
            return False
        last = self.last
        if stored.attempt <= last.attempt:
            return False
        self._superseded = True
        log.warning(
            "%s: attempt %d lives, so attempt %d leaves", last.id, stored.attempt, last.attempt
        )
        self._leave()
        return True


def _storable(progress: Progress) -> Progress:
    """The record with the default in place of every number that no heartbeat can hold."""
    changes: dict[str, Any] = {}
    for name, value in vars(progress).items():
        if isinstance(value, Mapping):
            changes[name] = {key: each for key, each in value.items() if _is_quantity(each)}
        elif value is not None and not _is_quantity(value):
            changes[name] = vars(type(progress)())[name]
    return replace(progress, **changes)


def _is_quantity(value: float) -> bool:
    return 0 <= value <= QUANTITY_MAX


def _cpu_seconds() -> float:
    """CPU time of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
