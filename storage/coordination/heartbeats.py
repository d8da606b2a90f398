"""Stored form of heartbeats: the state of each member, overwritten every few seconds.

    heartbeat_writer ──encode──▶ heartbeats/{kind}/{id}.json ──parse──▶ Heartbeat ──▶ supervisor,
                                                                         status, gc, benchmarks

A heartbeat is a hint: no decision about correctness depends on it. Every view of a run reads all of
its heartbeats, so each one is small and bounded: its numbers are finite, its texts are short, and
its key is that of its member. `parse` raises for any other heartbeat, and the writer writes no
other. States, wait reasons and progress fields of a newer release that this release does not have
are texts, or are ignored.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, get_args

from storage import layout
from storage.errors import UNREADABLE, ConfigError, CorruptError, NotFoundError
from storage.formats import json_objects
from storage.formats.json_objects import build, decode, dump
from storage.records.control import (
    ClosingStep,
    Heartbeat,
    HeartbeatHeader,
    ServiceState,
    WaitReason,
)
from storage.records.numbers import Quantity, SignedQuantity
from storage.records.progress import PROGRESS_OF, ServiceKind
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)

_KEY = re.compile(rf"{layout.HEARTBEATS}/{layout.NAME.pattern}/{layout.NAME.pattern}\.json")
"""Objects with other keys do not belong to the run."""
_FOLDERS = {f"{layout.HEARTBEATS}/{kind}" for kind in get_args(ServiceKind)}
"""An object or a link under such a key hides the heartbeats of a kind."""

BYTES_MAX = 1_000_000
ATTEMPTS_AHEAD_MAX = 1_000
"""A heartbeat whose attempt is further ahead of the newest one that is known is not its member's.
Attempts follow each other, and so would that of its replacement: the one after the largest number
could write no heartbeat that is read.
"""
TEXT_MAX = 2_000
"""Maximum characters of a note or another text; longer ones are cut when written and when read."""


@dataclass(frozen=True, kw_only=True)
class _StoredHeartbeat(HeartbeatHeader):
    """A heartbeat as it is stored: the progress record split into numbers and numbers by policy."""

    progress: Mapping[str, SignedQuantity] = field(default_factory=dict)
    by_policy: Mapping[str, Mapping[str, Quantity]] = field(default_factory=dict)
    """Field of the progress record → policy → number."""
    rates: Mapping[str, Quantity] = field(default_factory=dict)
    """More numbers of the progress record, in the heartbeat of an earlier release."""


@dataclass(frozen=True)
class Heartbeats:
    """The newest heartbeats of a run's members, sorted by key."""

    beats: list[Heartbeat]
    unreadable: Mapping[str, str]
    """Key → why it cannot be read. The member's next heartbeat replaces it. The key `heartbeats`:
    the heartbeats cannot be listed.
    """


def read_all(run: ObjectStore) -> Heartbeats:
    """Read the newest heartbeat of every member; list unreadable ones with the reason."""
    beats: list[Heartbeat] = []
    unreadable: dict[str, str] = {}
    try:
        keys = run.list(layout.HEARTBEATS)
    except ConfigError as error:
        return Heartbeats(beats, {layout.HEARTBEATS: str(error)})
    for key in keys:
        if key in _FOLDERS:
            unreadable[key] = (
                f"{run.url}/{key} is not a folder, but heartbeats are stored in a folder of this "
                "name; remove it"
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


def readable(run: ObjectStore) -> list[Heartbeat]:
    """Read the newest heartbeat of every member, sorted by key, without the unreadable ones.

    Raises:
        ConfigError: the heartbeats cannot be listed.
    """
    heartbeats = read_all(run)
    if layout.HEARTBEATS in heartbeats.unreadable:
        raise ConfigError(heartbeats.unreadable[layout.HEARTBEATS])
    return heartbeats.beats


def parse(body: bytes, key: str) -> Heartbeat:
    """Parse the heartbeat in the object `key`.

    Raises:
        CorruptError: it is too large, contains a number out of bounds, or is another member's.
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


def is_too_far_ahead(beat: Heartbeat, attempt: int) -> bool:
    """Return whether no launches can have led from `attempt` (−1: none) to the heartbeat's."""
    return beat.attempt > attempt + ATTEMPTS_AHEAD_MAX


def launchable(seen: Heartbeats, newest: Mapping[str, int]) -> Heartbeats:
    """Return the heartbeats; those that are too far ahead are listed as unreadable.

    Args:
        newest: member → its newest attempt; without those of which none is known.
    """
    beats, unreadable = [], dict(seen.unreadable)
    for beat in seen.beats:
        if is_too_far_ahead(beat, newest.get(beat.id, -1)):
            key = layout.heartbeat(beat.kind, beat.id)
            unreadable[key] = f"{key} is of attempt {beat.attempt}, which was not launched"
        else:
            beats.append(beat)
    return Heartbeats(beats, unreadable)


def encode(beat: Heartbeat) -> bytes:
    """Return the stored form of a heartbeat."""
    header = {name: getattr(beat, name) for name in _HEADER}
    values = {name: value for name, value in vars(beat.progress).items() if value is not None}
    by_policy = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    numbers = {name: value for name, value in values.items() if name not in by_policy}
    return json_objects.encode({**header, "progress": numbers, "by_policy": by_policy})


_HEADER = tuple(each.name for each in fields(HeartbeatHeader))


def _member_of(text: str, *enums: type[StrEnum]) -> str:
    """Return the enum member with this value; `text` if no enum has it."""
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
