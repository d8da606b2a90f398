"""A run: its prefix in the store, its frozen configuration, and the object that ends it."""

import difflib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.formats.json_values import storable_text
from storage.plain_names import RUN_ID, RunId
from storage.records.control import Stop
from storage.records.numbers import UnixTime
from storage.records.types import Json
from storage.store.object_store import ObjectStore, read_twice

log = logging.getLogger(__name__)

STOP_BYTES_MAX = 1_000_000
"""Of `stop.json`, which every service reads every few seconds."""
REASON_MAX = 10_000
"""Characters of a reason; what is longer is cut where it is written and where it is read."""
_DIFFERENCES_MAX = 10
"""Differing settings that one error message names."""

Fill: TypeAlias = Callable[[Json], Json]
"""A configuration with every default written out."""


@dataclass(frozen=True)
class RunRecord:
    """`run.json`. Example: `RunRecord("tiny-1", 1700000000.0, "multi-policy", {"seed": 0, …})`."""

    run_id: RunId
    created_s: UnixTime
    deployment: str
    """The Prefect deployment that started the run; empty when none did."""
    config: Json


def create_run(
    store: ObjectStore,
    run_id: str,
    config: Json,
    deployment: str = "",
    filled: Fill = lambda config: config,
) -> ObjectStore:
    """The sub-store of run `run_id`, created or joined; ConfigError when it exists with another
    configuration.

    `filled` writes today's defaults into a configuration that was frozen before they were there.
    """
    run = store.sub(layout.run_prefix(run_id))
    body = seal(RunRecord(run_id, time.time(), deployment, config))
    try:
        run.create(layout.RUN, body)
    except ConflictError:
        _refuse_differences(
            run_id, filled(read_run(run).config), filled(unseal(RunRecord, body, layout.RUN).config)
        )
    return run


def check_restart(
    store: ObjectStore, run_id: str, config: Json | None, filled: Fill = lambda config: config
) -> Stop | None:
    """The stop that starting run `run_id` again would lift; None without one, or without such a
    run.

    Raises ConfigError when the run is completed, or has another configuration than the one that is
    given.
    """
    run = store.sub(layout.run_prefix(run_id))
    if not run.exists(layout.RUN):
        return None
    if config is not None:
        _refuse_differences(run_id, filled(read_run(run).config), filled(config))
    stop = read_stop(run)
    if stop is not None and stop.state == "completed":
        raise ConfigError(f"run {run_id} is completed; choose another run id")
    return stop


def open_run(store: ObjectStore, run_id: str) -> ObjectStore:
    """The sub-store of an existing run; ConfigError names similar runs when there is none."""
    if RUN_ID.fullmatch(run_id):
        run = store.sub(layout.run_prefix(run_id))
        if run.exists(layout.RUN):
            return run
    known = list_runs(store)
    near = difflib.get_close_matches(run_id, known, n=3, cutoff=0.5) or known[-3:]
    hint = f"did you mean {' or '.join(near)}?" if near else "the store holds no run yet"
    raise ConfigError(f"there is no run {run_id!r} in {store.url}; {hint}")


def read_run(run: ObjectStore) -> RunRecord:
    """The whole record of a run; NotFoundError when `run` is no run's sub-store, CorruptError when
    it is damaged.
    """
    record = read_twice(lambda: unseal(RunRecord, run.get(layout.RUN), layout.RUN))
    if record.run_id != run.prefix.rstrip("/").rpartition("/")[2]:
        raise CorruptError(f"{run.url}/{layout.RUN} is the record of run {record.run_id}")
    return record


def run_config(run: ObjectStore) -> Json:
    """The resolved configuration, as it was frozen when the run was created."""
    return read_run(run).config


@dataclass(frozen=True)
class Runs:
    """The runs of a store."""

    found: tuple[str, ...]
    """Ids, oldest first."""
    unreadable: Mapping[str, str]
    """Id → why its `run.json` cannot be read."""


def look(store: ObjectStore) -> Runs:
    """Every folder that holds a run; one without `run.json`, or whose name is no run id, is
    none.
    """
    ages: list[tuple[float, str]] = []
    unreadable: dict[str, str] = {}
    for run_id in filter(RUN_ID.fullmatch, store.folders(layout.RUNS)):
        try:
            ages.append((read_run(store.sub(layout.run_prefix(run_id))).created_s, run_id))
        except NotFoundError:
            continue
        except (
            CorruptError,
            ConfigError,
        ) as error:  # of this one: the folder of all runs was listed
            unreadable[run_id] = str(error)
    return Runs(tuple(run_id for _, run_id in sorted(ages)), unreadable)


def list_runs(store: ObjectStore) -> list[str]:
    """Ids of all runs of the store, oldest first; one whose `run.json` is damaged is left out, with
    a warning.
    """
    seen = look(store)
    for run_id, why in seen.unreadable.items():
        log.warning("the run %s is left out: %s", run_id, why)
    return list(seen.found)


def request_stop(run: ObjectStore, stop: Stop) -> Stop:
    """End the run; the first request stands and is returned."""
    stop = replace(stop, reason=storable_text(stop.reason[:REASON_MAX]))
    try:
        run.create(layout.STOP, seal(stop))
    except ConflictError:
        return read_stop(run) or stop
    return stop


def read_stop(run: ObjectStore) -> Stop | None:
    """The request that stands, or None while the run shall go on. CorruptError for one that cannot
    be read: whether the run is completed is not known then, and nothing but a person can lift it.
    """
    try:
        return read_twice(lambda: _parsed_stop(run.get(layout.STOP)))
    except NotFoundError:
        return None
    except CorruptError as error:
        raise CorruptError(
            f"the run's end cannot be read: {error}; put {run.url}/{layout.STOP} back from a copy, "
            "or delete it to take the "
            "run up again"
        ) from error


def _parsed_stop(body: bytes) -> Stop:
    if len(body) > STOP_BYTES_MAX:
        raise CorruptError(
            f"{layout.STOP} has {len(body):,} bytes; it has at most {STOP_BYTES_MAX:,}"
        )
    stop = unseal(Stop, body, layout.STOP)
    return replace(stop, reason=stop.reason[:REASON_MAX])


def clear_stop(run: ObjectStore) -> None:
    """Let a stopped run be resumed."""
    run.delete(layout.STOP)


def _refuse_differences(run_id: str, stands: Json, wanted: Json) -> None:
    differences = list(_differences(stands, wanted, ""))
    if not differences:
        return
    more = (
        f" and {len(differences) - _DIFFERENCES_MAX} more"
        if len(differences) > _DIFFERENCES_MAX
        else ""
    )
    raise ConfigError(
        f"run {run_id!r} exists with another configuration: "
        f"{'; '.join(differences[:_DIFFERENCES_MAX])}{more}; "
        "use the same settings to resume it, or another run id"
    )


def _differences(stands: Any, wanted: Any, path: str) -> Iterator[str]:
    """`data.max_staleness is 8 there, 4 here` for every leaf that differs."""
    if isinstance(stands, dict) and isinstance(wanted, dict):
        for key in sorted(stands.keys() | wanted.keys()):
            yield from _differences(
                stands.get(key, "absent"),
                wanted.get(key, "absent"),
                f"{path}.{key}" if path else key,
            )
    elif stands != wanted:
        yield f"{path} is {stands!r} there, {wanted!r} here"
