"""Runs: `run.json` with the frozen configuration, and `stop.json`, which ends the run."""

import difflib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from storage import layout
from storage.errors import (
    UNREADABLE,
    AstraFlowError,
    ConfigError,
    ConflictError,
    CorruptError,
    NotFoundError,
    TransientError,
)
from storage.formats.json_objects import seal, unseal
from storage.formats.json_values import storable_text
from storage.plain_names import RUN_ID, PartName, RunId
from storage.records.control import Stop
from storage.records.numbers import UnixTime
from storage.records.types import Json
from storage.records.weights import Origin
from storage.records.windows import WINDOWS_MAX, PromptWindow
from storage.store.object_store import ObjectStore, read_twice

STOP_BYTES_MAX = 1_000_000
"""Limit for `stop.json`, which every service reads every few seconds."""
REASON_MAX = 10_000
"""Characters of a reason; a longer one is truncated when it is written and when it is read."""
_DIFFERENCES_MAX = 10
"""Differing settings that one error message lists."""

_NO_ORIGINS: Mapping[str, Origin] = MappingProxyType({})
_NO_WINDOWS: Mapping[str, PromptWindow] = MappingProxyType({})

FillDefaults: TypeAlias = Callable[[Json], Json]
"""Returns a configuration with every default written out."""


@dataclass(frozen=True)
class RunRecord:
    """`run.json`. Example: `RunRecord("tiny-1", 1700000000.0, "multi-policy", {"seed": 0, …})`."""

    run_id: RunId
    created_s: UnixTime
    deployment: str
    """The Prefect deployment that started the run; empty for none."""
    config: Json
    origins: Mapping[PartName, Origin] = field(default_factory=dict)
    """policy → the version of another run that is its version 0; without the other policies."""
    windows: Annotated[Mapping[str, PromptWindow], Field(max_length=WINDOWS_MAX)] = field(
        default_factory=dict
    )
    """Place in the recipe, `data.prompts` or `evaluation.prompts` → its frozen rows, for each place
    with a data window.
    """


def create_run(
    store: ObjectStore,
    run_id: str,
    config: Json,
    deployment: str = "",
    fill_defaults: FillDefaults = lambda config: config,
    origins: Mapping[str, Origin] = _NO_ORIGINS,
    windows: Mapping[str, PromptWindow] = _NO_WINDOWS,
) -> ObjectStore:
    """Create a run, or join an existing one, and return its sub-store.

    An existing run keeps its own origins and windows.

    Args:
        fill_defaults: adds today's defaults to a configuration that an earlier release froze.

    Raises:
        ConfigError: the run exists with another configuration.
    """
    run = store.sub(layout.run_prefix(run_id))
    body = seal(RunRecord(run_id, time.time(), deployment, config, origins, windows))
    try:
        run.create(layout.RUN, body)
    except ConflictError:
        requested = unseal(RunRecord, body, layout.RUN).config  # as it comes back from JSON
        _check_same_config(run_id, fill_defaults(read_run(run).config), fill_defaults(requested))
    return run


def check_restart(
    store: ObjectStore,
    run_id: str,
    config: Json | None,
    fill_defaults: FillDefaults = lambda config: config,
    is_closed: Callable[[ObjectStore], bool] = lambda run: True,
) -> Stop | None:
    """Return the stop that a restart of the run would clear; None without one or without a run.

    Args:
        is_closed: whether all that follows the end of a completed run was done. If not, a restart
            keeps the stop, and does the rest.

    Raises ConfigError when the run is completed and closed, or when it has a configuration other
    than `config`.
    """
    run = store.sub(layout.run_prefix(run_id))
    if not run.exists(layout.RUN):
        return None
    if config is not None:
        _check_same_config(run_id, fill_defaults(read_run(run).config), fill_defaults(config))
    stop = read_stop(run)
    if stop is None or stop.state != "completed":
        return stop
    if is_closed(run):
        raise ConfigError(f"run {run_id} is completed; choose another run id")
    return None


def run_id(run: ObjectStore) -> str:
    """Return the run id in the prefix of a run's sub-store."""
    return run.prefix.rstrip("/").rpartition("/")[2]


def sibling(run: ObjectStore, run_id: str) -> ObjectStore:
    """Return the sub-store of another run of the store that `run` is in; it need not exist.

    ConfigError when `run` is not the sub-store of a run, or for an invalid run id.
    """
    return store_of(run).sub(layout.run_prefix(run_id))


def store_of(run: ObjectStore) -> ObjectStore:
    """Return the store that a run is in; ConfigError when `run` is not the sub-store of a run."""
    root = layout.store_prefix(run.prefix)
    own = run.prefix[len(root) :].rstrip("/")
    if not own:
        raise ConfigError(f"{run.url} is not the folder of a run, so no other run is beside it")
    return replace(run, prefix=root, url=run.url.removesuffix(f"/{own}"))


def open_run(store: ObjectStore, run_id: str) -> ObjectStore:
    """Return the sub-store of an existing run; ConfigError, with similar ids, for none."""
    if RUN_ID.fullmatch(run_id):
        run = store.sub(layout.run_prefix(run_id))
        if run.exists(layout.RUN):
            return run
    ids = read_all(store).ids
    similar = difflib.get_close_matches(run_id, ids, n=3, cutoff=0.5) or ids[-3:]
    hint = f"did you mean {' or '.join(similar)}?" if similar else "the store holds no run yet"
    raise ConfigError(f"there is no run {run_id!r} in {store.url}; {hint}")


def read_run(run: ObjectStore) -> RunRecord:
    """Read `run.json`; NotFoundError when there is none, CorruptError when it is damaged."""
    where = f"{run.url}/{layout.RUN}"
    record = read_twice(lambda: unseal(RunRecord, run.get(layout.RUN), where))
    if record.run_id != run_id(run):
        raise CorruptError(f"{where} is the record of run {record.run_id}")
    return record


def read_run_config(run: ObjectStore) -> Json:
    """Read the resolved configuration, as it was frozen when the run was created."""
    return read_run(run).config


@dataclass(frozen=True)
class Runs:
    """The runs of a store."""

    ids: tuple[str, ...]
    """Readable runs, oldest first."""
    unreadable: Mapping[str, str]
    """Id → why its `run.json` cannot be read."""


def read_all(store: ObjectStore) -> Runs:
    """List all runs. A folder without `run.json`, or whose name is no run id, is not a run."""
    created: list[tuple[float, str]] = []
    unreadable: dict[str, str] = {}
    for run_id in filter(RUN_ID.fullmatch, store.folders(layout.RUNS)):
        try:
            created.append((read_run(store.sub(layout.run_prefix(run_id))).created_s, run_id))
        except NotFoundError:
            continue
        except (*UNREADABLE, TransientError) as error:
            unreadable[run_id] = fault_of_one(store, error)
    return Runs(tuple(run_id for _, run_id in sorted(created)), unreadable)


def fault_of_one(store: ObjectStore, error: AstraFlowError) -> str:
    """Return why one run cannot be read. An object on a bad sector is a fault of its run, like any
    other; raises TransientError where the whole store does not answer.
    """
    if isinstance(error, TransientError):
        store.folders(layout.RUNS)
    return str(error)


def request_stop(run: ObjectStore, stop: Stop) -> Stop:
    """End the run and return the stop that is in effect: the first one that was requested."""
    stop = replace(stop, reason=storable_text(stop.reason[:REASON_MAX]))
    try:
        run.create(layout.STOP, seal(stop))
    except ConflictError:
        return read_stop(run) or stop
    return stop


def replace_suspension(run: ObjectStore, stop: Stop) -> Stop:
    """End a suspended run for good; return the stop that is in effect."""
    stored = request_stop(run, stop)
    if stored.state != "suspended":
        return stored
    stop = replace(stop, reason=storable_text(stop.reason[:REASON_MAX]))
    run.put(layout.STOP, seal(stop))
    return stop


def read_stop(run: ObjectStore) -> Stop | None:
    """Read the stop of the run; None while it has none.

    Raises CorruptError for a damaged one: then it is unknown whether the run is completed, and a
    person must repair it.
    """
    try:
        return read_twice(lambda: _decode_stop(run.get(layout.STOP)))
    except NotFoundError:
        return None
    except CorruptError as error:
        raise CorruptError(
            f"the run's end cannot be read: {error}; put {run.url}/{layout.STOP} back from a copy, "
            "or delete it to resume the run"
        ) from error


def _decode_stop(body: bytes) -> Stop:
    if len(body) > STOP_BYTES_MAX:
        raise CorruptError(
            f"{layout.STOP} has {len(body):,} bytes; it has at most {STOP_BYTES_MAX:,}"
        )
    stop = unseal(Stop, body, layout.STOP)
    return replace(stop, reason=stop.reason[:REASON_MAX])


def clear_stop(run: ObjectStore) -> None:
    """Delete the stop, so that the run can be resumed."""
    run.delete(layout.STOP)


def _check_same_config(run_id: str, stored: Json, requested: Json) -> None:
    differences = list(_differences(stored, requested, ""))
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


def _differences(stored: Any, requested: Any, path: str) -> Iterator[str]:
    """Yield `data.max_staleness is 8 there, 4 here` for every leaf that differs."""
    if isinstance(stored, dict) and isinstance(requested, dict):
        for key in sorted(stored.keys() | requested.keys()):
            yield from _differences(
                stored.get(key, "absent"),
                requested.get(key, "absent"),
                f"{path}.{key}" if path else key,
            )
    elif stored != requested:
        yield f"{path} is {stored!r} there, {requested!r} here"
