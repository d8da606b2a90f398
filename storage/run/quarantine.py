"""The quarantine: a copy of each unreadable object, with the reason.

The unreadable object itself stays, because created-once objects never change. The dataflow does not
ingest a quarantined shard again. A quarantined order is closed without sequences: its shard, if a
worker creates one later, is not ingested.
"""

from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass

from storage import layout
from storage.errors import UNREADABLE, ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal, unseal
from storage.store.object_store import ObjectStore

_REASON_SUFFIX = ".json"


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
    """Return key → reason of every quarantined object."""
    reasons: dict[str, str] = {}
    for name in run.list(layout.QUARANTINE):
        if not name.endswith(_REASON_SUFFIX):
            continue
        try:
            record = unseal(_Reason, run.get(name), name)
        except (*UNREADABLE, NotFoundError):
            continue  # the copy of an unreadable JSON object; its reason is another object
        if name == layout.quarantine(record.key) + _REASON_SUFFIX:
            reasons[record.key] = record.reason
    return reasons
