"""The quarantine: a copy of each unreadable object, with the reason.

The unreadable object itself stays, because created-once objects never change. The dataflow does not
ingest a quarantined shard again. A quarantined order is closed without sequences: its shard, if a
worker creates one later, is not ingested.
"""

from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass

from storage import layout, plain_names
from storage.errors import UNREADABLE, ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.store.object_store import ObjectStore

_REASON_SUFFIX = ".json"
_REASON_ENDINGS = (".json.json", ".arrow.json")


@dataclass(frozen=True)
class _Reason:
    key: str
    reason: str


def quarantine_object(run: ObjectStore, key: str, reason: str) -> None:
    """Copy the object `key` into the quarantine, with the reason. An existing reason stays."""
    copy = layout.quarantine(key)
    # The object is absent or too large, or a copy exists. The reason is stored in any case.
    with suppress(NotFoundError, ConflictError, CorruptError):
        run.create(copy, run.get(key))
    try:
        run.create(copy + _REASON_SUFFIX, seal(_Reason(key, reason)))
    except ConflictError:
        return


def is_quarantined(run: ObjectStore, key: str) -> bool:
    """Return whether the object `key` has a reason in the quarantine."""
    return run.exists(layout.quarantine(key) + _REASON_SUFFIX)


def is_set_aside(quarantined: Container[str], order: int) -> bool:
    """Return whether the shard of an order, or the order itself, is in quarantine.

    The dataflow ingests no sequence of such a shard.
    """
    return layout.shard(order) in quarantined or layout.order(order) in quarantined


def read_quarantine(run: ObjectStore) -> dict[str, str]:
    """Return key → reason of every quarantined object. Unreadable reasons are left out."""
    read = (_read(run, name) for name in _reasons(run))
    return {found.key: found.reason for found in read if isinstance(found, _Reason)}


def unreadable_reasons(run: ObjectStore) -> dict[str, str]:
    """Return key of each reason that cannot be read → why."""
    read = {name: _read(run, name) for name in _reasons(run)}
    return {name: why for name, why in read.items() if isinstance(why, str)}


def _reasons(run: ObjectStore) -> list[str]:
    """List the keys of the reasons. The copy of a JSON object is no reason."""
    return [key for key in run.list(layout.QUARANTINE) if key.endswith(_REASON_ENDINGS)]


def _read(run: ObjectStore, name: str) -> _Reason | str | None:
    """Return the reason, or why it cannot be read; None where it was deleted meanwhile."""
    try:
        found = unseal(_Reason, run.get(name), name)
    except NotFoundError:
        return None
    except UNREADABLE as error:
        return str(error)
    if name != layout.quarantine(found.key) + _REASON_SUFFIX:
        return f"{name} is the reason of {plain_names.quoted(found.key)}"
    return found
