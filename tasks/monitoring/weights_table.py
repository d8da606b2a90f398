"""The versions of a run's policies, as `astraflow weights` shows them: their size, their making,
and who serves them.

A manifest is let go as soon as its row is made: ten thousand of a large model would not fit into
memory.
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
    """What a worker fetches that holds the version before; null where it fetches an anchor."""
    ratio: float | None
    """Bytes of all tensors over `delta_bytes`; null where there is nothing to fetch, too."""
    changed: float | None
    """Share of the elements that differ from the version before; null where nobody looked."""
    encode_s: float | None
    """Until the last change was encoded; what had been encoded was on its way by then."""
    upload_s: float | None
    """From then until every file was stored."""
    publish_s: float | None
    """From the start of its encoding to its manifest, beside the next step. The version after it
    tells: the newest has none.
    """
    publish_wait_s: float | None
    """How long the trainer waited for that after its next step."""
    created_s: float
    held_by: dict[str, float | None]
    """Workers that serve it, and how long each took from seeing it to serving it: fetched, applied,
    verified, swapped. Null for one that began with it.
    """
    retired: bool
    tags: list[str]
    """Its names."""


class _Read(NamedTuple):
    """What one manifest tells."""

    version: Version
    publish_s: float | None
    """Of the version before, and so is the next."""
    publish_wait_s: float | None


@dataclass(frozen=True)
class Versions:
    """What `history` found."""

    found: tuple[Version, ...]
    """Oldest first."""
    unreadable: Mapping[str, str]
    """Key of a manifest, a tag or a heartbeat → why it cannot be read."""


def history(run: ObjectStore, policy: str) -> Versions:
    """Every version of the policy whose manifest can be read. They are listed, not searched: one
    may be missing.
    """
    numbers = layout.numbers(run.list(f"{layout.WEIGHTS}/{policy}"), partial(_key, policy))
    missing = gaps(numbers, 0, max(numbers, default=-1) + 1)
    seen = heartbeats.look(run)
    tagged = tags.read_all(run)
    own = [tag for tag in tagged.found if tag.policy == policy]
    with ThreadPoolExecutor(READ_THREADS) as pool:
        read = list(pool.map(partial(_try, run, policy, seen.beats, own), numbers))
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
        _key(policy, number): one
        for number, one in zip(numbers, read, strict=True)
        if isinstance(one, str)
    }
    damaged |= {
        _key(policy, number): f"{_key(policy, number)} is missing" for number in missing.first
    }
    if missing.more:
        damaged[f"{layout.WEIGHTS}/{policy}"] = (
            f"and {missing.more:,} more versions of {policy} are missing"
        )
    return Versions(
        tuple(one.version for one in read if isinstance(one, _Read)),
        {**damaged, **tagged.unreadable, **seen.unreadable},
    )


def _key(policy: str, version: int) -> str:
    return layout.manifest(layout.weights(policy, version))


def _try(
    run: ObjectStore, policy: str, beats: list[Heartbeat], tagged: list[Tag], number: int
) -> _Read | str:
    """The version, or why its manifest cannot be read."""
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
    told = {name: value for name, value in manifest.metrics.items() if math.isfinite(value)}
    version = Version(
        policy=policy,
        version=number,
        kind=manifest.kind,
        num_bytes=sum(delta.num_bytes for delta in deltas),
        delta_bytes=delta_bytes,
        ratio=whole / delta_bytes if delta_bytes else None,
        changed=told.get("weights/changed"),
        encode_s=told.get("weights/encode_s"),
        upload_s=told.get("weights/upload_s"),
        publish_s=None,
        publish_wait_s=None,
        created_s=manifest.created_s,
        held_by={
            beat.id: beat.progress.refresh_s.get(policy)
            for beat in beats
            if isinstance(beat.progress, RolloutProgress) and beat.versions.get(policy) == number
        },
        retired=run.exists(layout.retired(policy, number)),
        tags=[tag.name for tag in tagged if tag.version == number],
    )
    return _Read(version, told.get("trainer/publish_s"), told.get("trainer/publish_wait_s"))
