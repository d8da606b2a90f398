"""What services report of themselves every few seconds. Hints: overwritten, never the base of a
correctness decision.

A heartbeat is overwritten all the time, and every view of a run reads all of them. So its numbers
are finite and bounded, its texts are short, and its key is its member's own: `parse` refuses any
other, whoever reads it, and `HeartbeatWriter` writes no other.
"""

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, TypeAlias, get_args

from storage import layout
from storage.errors import UNREADABLE, AstraFlowError, ConfigError, CorruptError, NotFoundError
from storage.formats.json_objects import decode, encode
from storage.formats.json_values import storable_text
from storage.records.control import Heartbeat
from storage.records.numbers import QUANTITY_MAX
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)

Kind: TypeAlias = Literal[
    "supervisor", "base_model", "dataflow", "rollout", "trainer", "evaluation", "mirror"
]

STORE_PATIENCE_S = 2.5
"""A beat's look at what stands, and its write, each give up on a failing store after so long: the
next one says more.
"""
CLOSE_TIMEOUT_S = 15.0
"""How long leaving a `HeartbeatWriter` waits for its thread."""
_KEY = re.compile(rf"{layout.HEARTBEATS}/{layout.NAME.pattern}/{layout.NAME.pattern}\.json")
"""Other keys are no objects of the run."""
_FOLDERS = {f"{layout.HEARTBEATS}/{kind}" for kind in get_args(Kind)}
"""What is listed under such a key, a link or a file, hides the heartbeats of a kind."""

BYTES_MAX = 1_000_000
TEXT_MAX = 2_000
"""Characters of a note, and of every other text; what is longer is cut where it is written and
where it is read.
"""


@dataclass(frozen=True)
class Heartbeats:
    """The newest beats of a run's members, sorted by key."""

    beats: list[Heartbeat]
    unreadable: Mapping[str, str]
    """Key → why it cannot be read. The member's next beat replaces it, unless that cannot be read
    either. `heartbeats` alone: not even their names are known.
    """


def look(run: ObjectStore) -> Heartbeats:
    """Read the newest beat of every member."""
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
    """The newest beat of every member whose beat can be read, sorted by key. ConfigError when they
    cannot even be listed.
    """
    seen = look(run)
    if layout.HEARTBEATS in seen.unreadable:
        raise ConfigError(seen.unreadable[layout.HEARTBEATS])
    return seen.beats


def parse(body: bytes, key: str) -> Heartbeat:
    """The heartbeat in the object `key`; CorruptError for numbers out of bounds, or for another
    member's beat.
    """
    if len(body) > BYTES_MAX:
        raise CorruptError(f"{key} has {len(body):,} bytes; a heartbeat has at most {BYTES_MAX:,}")
    beat = decode(Heartbeat, body, key)
    try:
        own = layout.heartbeat(beat.kind, beat.id)
    except ConfigError as error:
        raise CorruptError(f"{key}: {error}") from error
    if own != key:
        raise CorruptError(f"{key} holds the heartbeat of {own}")
    if beat.region and not layout.NAME.fullmatch(beat.region):
        raise CorruptError(
            f"{key} names the region {beat.region[:TEXT_MAX]!r}; a region is letters, digits, '_' "
            "and '-'"
        )
    return replace(
        beat, host=beat.host[:TEXT_MAX], state=beat.state[:TEXT_MAX], note=beat.note[:TEXT_MAX]
    )


class HeartbeatWriter:
    """A member's heart: a thread that writes its beat every `interval_s`, from entering to leaving
    the `with` block.

        with Pulse(run, "trainer", "trainer-solver", attempt=0, interval_s=2.0) as pulse:
            with pulse.span("wait"):
                batch = next_batch()
            pulse.update(state="working", progress={"step": 3}, versions={"solver": 2})

    With `leave`, attempts are fenced: when the beat of a higher attempt stands, this heart stops
    for good and calls `leave` once, so that of two living attempts of a member the newer one stays.
    All methods may be called from any thread. A failing store never breaks the service: it is
    logged, once per kind.
    """

    def __init__(
        self,
        run: ObjectStore,
        kind: Kind,
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
        self._stopped = False
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name=f"pulse-{id}", daemon=True)
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
            state="starting",
            region=region,
        )

    def update(
        self,
        *,
        state: str | None = None,
        note: str | None = None,
        progress: Mapping[str, float] | None = None,
        rates: Mapping[str, float] | None = None,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        """Merge into what the next beat says; keys not named keep their values. A number that no
        beat can hold is left out.
        """
        with self._lock:
            beat = self._beat
            self._beat = replace(
                beat,
                state=beat.state if state is None else state,
                note=beat.note if note is None else storable_text(note[:TEXT_MAX]),
                progress={**beat.progress, **_measured(progress or {})},
                rates={**beat.rates, **_measured(rates or {})},
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
        """What the last beat said, with every update since."""
        with self._lock:
            return self._beat

    def __enter__(self) -> "HeartbeatWriter":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if error is None:
            self.update(state="done")
        else:
            self.update(state="failed", note=f"{type(error).__name__}: {error}")
        self._write()

    def _beat_on(self) -> None:
        self._write()
        while not self._left.wait(self._interval_s):
            self._write()

    def _write(self) -> None:
        if self._is_superseded():
            return
        with self._lock:
            beat = self._beat
            seconds = {**beat.seconds, "cpu": _cpu_seconds()}
            self._beat = beat = replace(
                beat, beats=beat.beats + 1, beat_s=time.time(), seconds=seconds
            )
        try:
            self._run.put(self._key, encode(beat))
        except AstraFlowError as error:
            if type(error) not in self._logged:
                self._logged.add(type(error))
                log.warning("%s goes on without heartbeats: %s", beat.id, error)

    def _is_superseded(self) -> bool:
        """Whether a higher attempt has beaten. What cannot be read proves nothing."""
        if self._leave is None or self._stopped:
            return self._stopped
        try:
            stands = parse(self._run.get(self._key), self._key)
        except AstraFlowError as error:
            log.debug("no heartbeat in %s: %s", self._key, error)
            return False
        mine = self.last
        if stands.attempt <= mine.attempt:
            return False
        self._stopped = True
        log.warning(
            "%s: attempt %d lives, so attempt %d leaves", mine.id, stands.attempt, mine.attempt
        )
        self._leave()
        return True


def _measured(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if 0 <= value <= QUANTITY_MAX}


def _cpu_seconds() -> float:
    """CPU time of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
