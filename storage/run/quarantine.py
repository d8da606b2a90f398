"""What could not be read: a copy and the reason, never silently dropped.

The unreadable object itself stays, because created-once objects never change; whoever takes objects
in skips those that are quarantined here.
"""

from contextlib import suppress
from dataclasses import dataclass

from storage import layout
from storage.errors import UNREADABLE, ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.store.object_store import ObjectStore

_REASON = ".json"


@dataclass(frozen=True)
class _Reason:
    key: str
    reason: str


def quarantine(run: ObjectStore, key: str, reason: str) -> None:
    """Copy the object `key` into the quarantine and write down why; the first reason stands."""
    copy = layout.quarantine(key)
    # Nothing to copy, too much of it, or an earlier copy stands: either way the reason below is
    # what counts.
    with suppress(NotFoundError, ConflictError, CorruptError):
        run.create(copy, run.get(key))
    try:
        run.create(copy + _REASON, seal(_Reason(key, reason)))
    except ConflictError:
        return


def quarantined(run: ObjectStore) -> dict[str, str]:
    """Key → reason of every quarantined object."""
    found: dict[str, str] = {}
    for name in run.list(layout.QUARANTINE):
        if not name.endswith(_REASON):
            continue
        try:
            record = unseal(_Reason, run.get(name), name)
        except (*UNREADABLE, NotFoundError):
            continue  # the copy of an unreadable JSON object: its reason stands beside it
        if name == layout.quarantine(record.key) + _REASON:
            found[record.key] = record.reason
    return found
