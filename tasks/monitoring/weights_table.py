"""Table of a run's versions for `astraflow weights`: size, publication, and the workers that serve
each.

A manifest is dropped as soon as its row is complete: ten thousand of a large model would not fit
into memory.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

from pydantic import BaseModel

from storage import layout
from storage.coordination import heartbeats
from storage.errors import UNREADABLE, NotFoundError
from storage.formats import safetensors
from storage.records.control import Heartbeat
from storage.records.progress import RolloutProgress
from storage.store.object_store import ObjectStore
from storage.verify.missing_numbers import gaps
from storage.weights import manifests, tags, update_path
from storage.weights.tags import Tag

READ_THREADS = 16


class Version(BaseModel):
    """One version of one policy. A documented, stable form: docs/schemas.md."""

    policy: str
    version: int
    kind: Literal["anchor", "delta"]
    num_bytes: int
    """Of its files, those of an anchor's delta included."""
    delta_bytes: int | None
    """Bytes that a worker with the version before fetches; null where it fetches an anchor."""
    ratio: float | None
    """Bytes of all tensors over `delta_bytes`; null where that is null or 0."""
    changed: float | None
    """Share of the elements that differ from the version before; null where it was not measured."""
    encode_s: float | None
    """Until the last change was encoded; what had been encoded was on its way by then."""
    upload_s: float | None
    """From then until every file was stored."""
    publish_s: float | None
    """From the start of its encoding to its manifest, beside the next step. Stored with the version
    after it, so the newest has none.
    """
    publish_wait_s: float | None
    """How long the trainer waited for that after its next step."""
    created_s: float
    held_by: dict[str, float | None]
    """Worker that serves it → seconds of the change to it: fetched, applied, verified, swapped.
    Null for a worker that started with it.
    """
    retired: bool
    tags: list[str]
    """Names given by `astraflow tag`."""


class _Read(NamedTuple):
    """The contents of one manifest."""

    version: Version
    publish_s: float | None
    """Of the version before, as is the next field."""
    publish_wait_s: float | None


@dataclass(frozen=True)
class Versions:
    """Result of `history`."""

    readable: tuple[Version, ...]
    """Oldest first."""
    unreadable: Mapping[str, str]
    """Key of a manifest, a tag or a heartbeat → why it cannot be read."""


def history(run: ObjectStore, policy: str) -> Versions:
    """Read every version of the policy whose manifest can be read. Keys are listed instead of
    searched, since one may be missing.
    """
    numbers = layout.numbers(run.list(f"{layout.WEIGHTS}/{policy}"), partial(_key, policy))
    missing = gaps(numbers, 0, max(numbers, default=-1) + 1)
    seen = heartbeats.read_all(run)
    tagged = tags.read_all(run)
    tags_of_policy = [tag for tag in tagged.readable if tag.policy == policy]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        read = list(pool.map(partial(_try, run, policy, seen.beats, tags_of_policy), numbers))
    for before, after in pairwise(read):
        if (
            isinstance(before, _Read)
            and isinstance(after, _Read)
            and before.version.version + 1 == after.version.version
        ):
            before.version.publish_s, before.version.publish_wait_s = (
                after.publish_s,
                after.publish_wait_s,
            )
    damaged = {
        _key(policy, number): result
        for number, result in zip(numbers, read, strict=True)
        if isinstance(result, str)
    }
    damaged |= {
        _key(policy, number): f"{_key(policy, number)} is missing" for number in missing.first
    }
    if missing.more:
        damaged[f"{layout.WEIGHTS}/{policy}"] = (
            f"and {missing.more:,} more versions of {policy} are missing"
        )
    return Versions(
        tuple(result.version for result in read if isinstance(result, _Read)),
        {**damaged, **tagged.unreadable, **seen.unreadable},
    )


def _key(policy: str, version: int) -> str:
    return layout.manifest(layout.weights(policy, version))


def _try(
    run: ObjectStore, policy: str, beats: list[Heartbeat], tagged: list[Tag], number: int
) -> _Read | str:
    """Return the version, or why its manifest cannot be read."""
    try:
        return _read(run, policy, beats, tagged, number)
    except (*UNREADABLE, NotFoundError) as error:
        return str(error)


def _read(
    run: ObjectStore, policy: str, beats: list[Heartbeat], tagged: list[Tag], number: int
) -> _Read:
    manifest = manifests.read_manifest(run, policy, number)
    deltas = update_path.path_deltas(manifest)
    delta_bytes = next((delta.num_bytes for delta in deltas if delta.base is not None), None)
    whole = sum(safetensors.num_bytes(info) for info in manifest.tensors.values())
    metrics = {name: value for name, value in manifest.metrics.items() if math.isfinite(value)}
    version = Version(
        policy=policy,
        version=number,
        kind=manifest.kind,
        num_bytes=sum(delta.num_bytes for delta in deltas),
        delta_bytes=delta_bytes,
        ratio=whole / delta_bytes if delta_bytes else None,
        changed=metrics.get("weights/changed"),
        encode_s=metrics.get("weights/encode_s"),
        upload_s=metrics.get("weights/upload_s"),
        publish_s=None,
        publish_wait_s=None,
        created_s=manifest.created_s,
        held_by={
            beat.id: beat.progress.refresh_s.get(policy)
            for beat in beats
            if isinstance(beat.progress, RolloutProgress) and beat.versions.get(policy) == number
        },
        retired=run.exists(layout.retired(policy, number)),
        tags=[tag.label for tag in tagged if tag.version == number],
    )
    return _Read(version, metrics.get("trainer/publish_s"), metrics.get("trainer/publish_wait_s"))
