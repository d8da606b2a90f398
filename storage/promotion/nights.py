"""Nights of recurring trainings: a plan and an outcome each, created once.

    nights/{name}/20260102-0200/plan.json     what it does, written when it begins
                                starts/00000001.json  it was started again
                                outcome.json  how it ended; a skipped night has no plan

A night with a plan and without an outcome runs, or its process died: its heartbeat, in the same
folder, says which.
"""

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from storage import layout
from storage.errors import UNREADABLE, ConfigError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.plain_names import RUN_ID
from storage.records.nights import NightOutcome, NightPlan, NightStart
from storage.store.galloping_search import first_absent
from storage.store.object_store import ObjectStore, read_twice

READ_THREADS = 16
BYTES_MAX = 1_000_000
"""Limit for one record: a plan of a hundred policies has 20 kB."""
_NIGHT_ID = re.compile(r"\d{8}-\d{4}", re.ASCII)
"""A folder with another name, such as a copy that a person made, is not a night."""

Record = TypeVar("Record", NightPlan, NightOutcome, NightStart)


@dataclass(frozen=True)
class Night:
    """What is stored of one night."""

    id: str
    plan: NightPlan | None
    outcome: NightOutcome | None


@dataclass(frozen=True)
class Nights:
    """The nights of a recurring training, in the order of their ids, which is that of time."""

    name: str
    readable: tuple[Night, ...]
    unreadable: Mapping[str, str]
    """Id of a night → why it cannot be read."""


def create_plan(store: ObjectStore, plan: NightPlan) -> None:
    """Create the plan.

    Raises:
        ConflictError: the night has one.
        ConfigError: it could not be read back, such as one with a name that is too long for a run.
    """
    _create(store, layout.night_plan(plan.name, plan.night), plan)


def create_outcome(store: ObjectStore, outcome: NightOutcome) -> None:
    """Create the outcome; ConflictError when the night has one, ConfigError as `create_plan`."""
    _create(store, layout.night_outcome(outcome.name, outcome.night), outcome)


def create_start(store: ObjectStore, start: NightStart) -> None:
    """Create the record; ConflictError when there is one of its number."""
    _create(store, layout.night_start(start.name, start.night, start.number), start)


def read_starts(store: ObjectStore, name: str, night: str, newest: int) -> list[NightStart]:
    """Read the `newest` records of the night's further starts, oldest first.

    Those behind a missing number are not read: none could follow the largest number.

    Raises CorruptError for an invalid one.
    """

    def key_of(number: int) -> str:
        return layout.night_start(name, night, number)

    numbers = {*layout.numbers(store.list(key_of(0).rpartition("/")[0]), key_of)}
    end = first_absent(numbers.__contains__, 1)
    starts = []
    for number in range(max(1, end - newest), end):
        start = _read(store, NightStart, lambda *_, n=number: key_of(n), name, night)
        if start is not None and start.number != number:
            raise CorruptError(f"{key_of(number)} holds start {start.number} of the night")
        starts += [] if start is None else [start]
    return starts


def read_plan(store: ObjectStore, name: str, night: str) -> NightPlan | None:
    """Read a night's plan; None when it has none, CorruptError for an invalid one."""
    return _read(store, NightPlan, layout.night_plan, name, night)


def read_outcome(store: ObjectStore, name: str, night: str) -> NightOutcome | None:
    """Read a night's outcome; None when it has none, CorruptError for an invalid one."""
    return _read(store, NightOutcome, layout.night_outcome, name, night)


def read_night(store: ObjectStore, name: str, night: str) -> Night:
    """Read a night; CorruptError when a record of it is invalid."""
    return Night(night, read_plan(store, name, night), read_outcome(store, name, night))


def read_all(store: ObjectStore, name: str) -> Nights:
    """Read every night of a name; one that cannot be read is listed with the reason.

    Raises ConfigError for an invalid name, and for a folder that cannot be listed.
    """
    ids = sorted(filter(_NIGHT_ID.fullmatch, store.folders(layout.nights(name))))
    unreadable: dict[str, str] = {}

    def read_one(night: str) -> Night | str:
        try:
            return read_night(store, name, night)
        except UNREADABLE as error:
            return str(error)

    readable: list[Night] = []
    with ThreadPoolExecutor(READ_THREADS) as pool:
        results = list(pool.map(read_one, ids))
    for night, result in zip(ids, results, strict=True):
        if isinstance(result, Night):
            readable.append(result)
        else:
            unreadable[night] = result
    return Nights(name, tuple(readable), unreadable)


def names(store: ObjectStore) -> list[str]:
    """List the names that have nights."""
    return sorted(name for name in store.folders(layout.NIGHTS) if RUN_ID.fullmatch(name))


def _create(store: ObjectStore, key: str, record: Record) -> None:
    body = seal(record)
    try:
        _decoded(type(record), body, key)
    except CorruptError as error:
        raise ConfigError(
            f"the night {record.night} of {record.name} cannot be stored: {error}"
        ) from error
    store.create(key, body)


def _read(
    store: ObjectStore,
    kind: type[Record],
    key_of: Callable[[str, str], str],
    name: str,
    night: str,
) -> Record | None:
    key = key_of(name, night)
    try:
        record = read_twice(lambda: _decoded(kind, store.get(key), key))
    except NotFoundError:
        return None
    if (record.name, record.night) != (name, night):
        raise CorruptError(f"{key} holds the night {record.night} of {record.name}")
    return record


def _decoded(kind: type[Record], body: bytes, key: str) -> Record:
    if len(body) > BYTES_MAX:
        raise CorruptError(f"{key} has {len(body):,} bytes; a record has at most {BYTES_MAX:,}")
    return unseal(kind, body, key)
