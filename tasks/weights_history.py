"""The versions of a run's policies, as `astraflow weights` shows them: their size, their making, and who serves them."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

from pydantic import BaseModel

from storage import heartbeats, layout, tensors, weights
from storage.objects import ObjectStore
from storage.records import Heartbeat, Manifest

READ_THREADS = 16


class Version(BaseModel):
    """One version of one policy. A documented, stable form: docs/schemas.md."""

    policy: str
    version: int
    kind: Literal["anchor", "delta"]
    num_bytes: int
    """Of its files."""
    ratio: float
    """Bytes of an anchor of the same tensors over `num_bytes`."""
    changed_tensors: int
    """Tensors that do not simply stand in the base."""
    publish_s: float | None
    """From the start of its encoding to its manifest, beside the next step. The version after it tells: the newest has none."""
    publish_wait_s: float | None
    """How long the trainer waited for that after its next step."""
    created_s: float
    held_by: list[str]
    """Workers that serve it."""
    retired: bool


def history(run: ObjectStore, policy: str) -> list[Version]:
    """Every version of the policy, oldest first. CorruptError for a manifest that is damaged."""
    newest = weights.latest(run, policy)
    numbers = range(0 if newest is None else newest + 1)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        manifests = list(pool.map(partial(weights.read_manifest, run, policy), numbers))
        retired = list(pool.map(lambda number: run.exists(layout.retired(policy, number)), numbers))
    beats = [beat for beat in heartbeats.read_all(run) if beat.kind == "rollout"]
    following = [*manifests[1:], None][: len(manifests)]
    return [_version(*each, beats) for each in zip(manifests, following, retired, strict=True)]


def _version(manifest: Manifest, following: Manifest | None, retired: bool, beats: list[Heartbeat]) -> Version:
    num_bytes = sum(file.num_bytes for file in manifest.files)
    whole = sum(tensors.num_bytes(info) for info in manifest.tensors.values())
    told = following.metrics if following else {}
    return Version(
        policy=manifest.policy,
        version=manifest.version,
        kind=manifest.kind,
        num_bytes=num_bytes,
        ratio=whole / max(1, num_bytes),
        changed_tensors=sum(bool(info.file) for info in manifest.tensors.values()),
        publish_s=told.get("trainer/publish_s"),
        publish_wait_s=told.get("trainer/publish_wait_s"),
        created_s=manifest.created_s,
        held_by=[beat.id for beat in beats if beat.versions.get(manifest.policy) == manifest.version],
        retired=retired,
    )
