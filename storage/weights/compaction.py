"""Merged deltas, for workers that are several versions behind: one object in place of eight, with
two thirds of their bytes.

    delta 9, 10, … 16  ──changes add up──▶  weights/{policy}/00000016/since-00000008.json + files

A merged delta is made from the stored deltas alone, without any weights, where they are stored: by
the trainer at home, by a mirror in its region. It only shortens the path: a reader that finds none,
or a damaged one, reads version by version.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from storage import layout
from storage.errors import AstraFlowError, ConflictError, CorruptError
from storage.formats.json_objects import seal
from storage.formats.safetensors import num_bytes as bytes_of
from storage.machine.cpus import num_cpus
from storage.plain_names import new_write_id
from storage.records.weights import HostTensor, MergedDelta, StoredDelta, TensorInfo
from storage.store.object_store import ObjectStore
from storage.weights import delta_store, manifests, update_path
from storage.weights.codec import deltas
from storage.weights.codec.deltas import Change
from storage.weights.manifests import MEMORY_BYTES, MERGED_SPAN
from storage.weights.update_path import PathDelta

log = logging.getLogger(__name__)

BYTES_MIN = 2**20
"""Single deltas with fewer bytes than this together are fetched as fast one by one."""
SHARE_MAX = 0.8
"""A merged delta with more than this share of the single deltas' bytes is not stored."""
READS_MAX = 4
"""Changes that are read more often than this in the mean are not merged: names of a short manifest
could share one of megabytes, and each would get a merged change for itself.
"""
GROWTH_MAX = 2**10
"""Changed tensors with more bytes than this for each byte of the single deltas are not merged: the
time grows with the bytes that a manifest claims. These deltas are small beside their model: less
than one change in 5,000 elements of bf16 at each step.
"""


@dataclass(frozen=True)
class _FetchedDelta:
    """A delta with the entries of its files, by file and entry."""

    delta: PathDelta
    entries: Mapping[tuple[str, str], HostTensor]


def merge(
    run: ObjectStore, policy: str, version: int, base: int, memory_bytes: int = MEMORY_BYTES
) -> bool:
    """Store one delta from `base` to `version`; return whether it is worth it and stored now.

    Args:
        memory_bytes: single deltas that are larger together are not merged, because all of them are
            in memory at once.

    Raises:
        NotFoundError, CorruptError: a version in between cannot be read.
    """
    if run.exists(layout.merged_delta(policy, version, base)):
        return False
    single = _single_deltas(run, policy, version, base)
    num_bytes = sum(delta.num_bytes for delta in single)
    if len(single) != version - base or not BYTES_MIN <= num_bytes <= memory_bytes:
        return False
    fetched = [_fetch(run, delta) for delta in single]
    origins = {name: _origin(fetched, name) for name in single[-1].tensors}
    if _is_multiplied(single[-1].tensors, origins, num_bytes):
        return False
    infos, changes, whole, whole_bytes = {}, [], {}, 0
    first: dict[_Origin, str] = {}
    threads = num_cpus()
    for name, info in single[-1].tensors.items():
        origin = origins[name]
        twin = first.setdefault(origin, name)
        infos[name] = replace(
            info, file="", entry="" if twin == name else twin, source=origin.source
        )
        if twin != name:
            continue
        if origin.whole is not None:
            whole[name] = _with_changes(origin.whole, origin.changes)
            whole_bytes += whole[name].bits.nbytes
            if whole_bytes > memory_bytes:
                return False
        elif origin.changes:
            changes.append(_merged_change(name, info, origin.changes, threads))
    folder, write_id = run.sub(layout.weights(policy, version)), new_write_id()
    written = delta_store.write_changes(
        folder,
        infos,
        changes,
        whole,
        write_id,
        bytes_max=SHARE_MAX * num_bytes,
        memory_bytes=memory_bytes,
    )
    if written is None:
        return False
    merged = MergedDelta(
        policy=policy,
        version=version,
        step=StoredDelta(base, written.contents.tensors, written.contents.files),
        created_s=time.time(),
        write_id=write_id,
    )
    try:
        run.create(layout.merged_delta(policy, version, base), seal(merged))
    except ConflictError:  # another service merged the same
        for file in merged.step.files:
            folder.delete(file.name)
    return True


class BackgroundMerger:
    """Merges deltas in a background thread, one span of versions at a time."""

    def __init__(self, run: ObjectStore, memory_bytes: int = MEMORY_BYTES) -> None:
        self._run = run
        self._memory_bytes = memory_bytes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="merge")
        self._running: Future[None] | None = None
        self._merged_to: dict[str, int] = {}
        """policy → last version of the span that was merged, or tried, last."""

    def merge_up_to(self, policy: str, version: int) -> None:
        """Start to merge the newest whole span up to `version`, which exists.

        Does nothing when that span was merged before, or another merge is running.
        """
        end = version - version % MERGED_SPAN
        busy = self._running is not None and not self._running.done()
        if end >= MERGED_SPAN and end != self._merged_to.get(policy) and not busy:
            self._merged_to[policy] = end
            self._running = self._pool.submit(self._merge, policy, end)

    def _merge(self, policy: str, end: int) -> None:
        try:
            merge(self._run, policy, end, end - MERGED_SPAN, self._memory_bytes)
        except AstraFlowError as error:
            log.warning(
                "the deltas of %s up to version %d are not merged, workers read version by "
                "version: %s",
                policy,
                end,
                error,
            )

    def close(self) -> None:
        """Wait for the merge that is running."""
        self._pool.shutdown(wait=True)


def _single_deltas(run: ObjectStore, policy: str, version: int, base: int) -> list[PathDelta]:
    """Read the manifests after `base`; return the delta of every version that has one."""
    with ThreadPoolExecutor(manifests.READ_THREADS) as pool:
        chain = list(
            pool.map(
                lambda number: manifests.read_manifest(run, policy, number),
                range(base + 1, version + 1),
            )
        )
    return [
        delta
        for manifest in chain
        for delta in update_path.path_deltas(manifest)
        if delta.base == manifest.version - 1
    ]


def _fetch(run: ObjectStore, delta: PathDelta) -> _FetchedDelta:
    folder = run.sub(delta.folder)
    with ThreadPoolExecutor(delta_store.TRANSFERS_MAX) as pool:
        files = delta_store.tensor_files(folder.url, delta.tensors, delta.files)
        contents = pool.map(lambda file: delta_store.fetch(folder, file), files)
        entries = {
            (file.name, name): tensor
            for file, tensors in zip(files, contents, strict=True)
            for name, tensor in tensors.items()
        }
    return _FetchedDelta(delta, entries)


@dataclass(frozen=True)
class _Origin:
    """How a tensor is made over several versions; equal for tied tensors."""

    source: str
    """The base's tensor that it comes from; empty when it was stored as a whole on the way."""
    whole: HostTensor | None
    changes: tuple[HostTensor, ...]
    """Entries of delta files, in the order in which they are applied."""


def _origin(fetched: Sequence[_FetchedDelta], name: str) -> _Origin:
    """Trace a tensor of the last version back to the base."""
    changes: list[HostTensor] = []
    for each in reversed(fetched):
        info = each.delta.tensors.get(name)
        stored = each.entries.get((info.file, info.entry or name)) if info else None
        if info is None or (info.file and stored is None):
            raise CorruptError(
                f"{each.delta.folder} does not hold the tensor {name}, which a later version needs"
            )
        if not info.source:
            return _Origin("", stored, tuple(reversed(changes)))
        if stored is not None:
            changes.append(stored)
        name = info.source
    return _Origin(name, None, tuple(reversed(changes)))


def _is_multiplied(
    infos: Mapping[str, TensorInfo], origins: Mapping[str, _Origin], num_bytes: int
) -> bool:
    """Return whether a merge would take much more than what the `num_bytes` of single deltas need:
    a mirror copies these without applying them.
    """
    changed: dict[_Origin, TensorInfo] = {}
    for name, origin in origins.items():
        if origin.changes:
            changed.setdefault(origin, infos[name])  # as `merge`: the first of several names
    read_bytes = sum(change.bits.nbytes for origin in changed for change in origin.changes)
    claimed_bytes = sum(map(bytes_of, changed.values()))
    return read_bytes > READS_MAX * num_bytes or claimed_bytes > GROWTH_MAX * num_bytes


def _with_changes(tensor: HostTensor, changes: Sequence[HostTensor]) -> HostTensor:
    for change in changes:
        tensor = deltas.apply(tensor, delta_store.blob_of(change))
    return tensor


def _merged_change(
    name: str, info: TensorInfo, changes: Sequence[HostTensor], threads: int
) -> Change:
    blob, num_changed = deltas.merge(
        [delta_store.blob_of(change) for change in changes],
        info.dtype,
        math.prod(info.shape),
        threads=threads,
    )
    return Change(name, blob, num_changed)
