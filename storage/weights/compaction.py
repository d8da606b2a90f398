"""Merged changes, for workers that are several versions behind: one object in place of eight, at
two thirds of their bytes.

    delta 9, 10, … 16  ──steps add up──▶  weights/{policy}/00000016/since-00000008.json + files

They are made from the stored deltas alone, without any weights, where the versions stand anyway: by
the trainer at home, by a mirror in its region. They are a shorter way and nothing more: who finds
none, or a wrong one, goes version by version.
"""

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from storage import layout
from storage.errors import AstraFlowError, ConflictError, CorruptError
from storage.formats.json_objects import seal
from storage.plain_names import new_write_id
from storage.records.weights import HostTensor, MergedDelta, StoredDelta, TensorInfo
from storage.store.object_store import ObjectStore
from storage.weights import delta_store, manifests, update_path
from storage.weights.codec import deltas
from storage.weights.codec.deltas import Change
from storage.weights.manifests import MEMORY_BYTES, MERGED_SPAN
from storage.weights.update_path import PathStep

log = logging.getLogger(__name__)

BYTES_MIN = 2**20
"""Fewer bytes than this of single deltas are fetched as fast one by one."""
SHARE_MAX = 0.8
"""Of the bytes of the single deltas: what is not smaller does not pay."""


@dataclass(frozen=True)
class _Fetched:
    """One leg with its files' entries, by file and entry."""

    leg: PathStep
    entries: Mapping[tuple[str, str], HostTensor]


def merge(
    run: ObjectStore, policy: str, version: int, base: int, memory_bytes: int = MEMORY_BYTES
) -> bool:
    """Store the changes from `base` to `version` as one; whether that pays and was done. Done
    before is no error. Single deltas of more than `memory_bytes` together are not merged: all of
    them lie in memory.

    NotFoundError and CorruptError when a version in between cannot be read.
    """
    if run.exists(layout.merged_delta(policy, version, base)):
        return False
    legs = _single_legs(run, policy, version, base)
    num_bytes = sum(leg.num_bytes for leg in legs)
    if len(legs) != version - base or not BYTES_MIN <= num_bytes <= memory_bytes:
        return False
    fetched = [_fetch(run, leg) for leg in legs]
    infos, changes, whole = {}, [], {}
    first: dict[tuple[object, ...], str] = {}
    threads = os.cpu_count() or 1
    for name, info in legs[-1].tensors.items():
        source, start, blobs = _trace(fetched, name)
        same = (source, id(start), *map(id, blobs))
        twin = first.setdefault(same, name)
        infos[name] = replace(info, file="", entry="" if twin == name else twin, source=source)
        if twin != name:
            continue
        if start is not None:
            for blob in blobs:
                start = deltas.apply(start, delta_store.blob_of(blob))
            whole[name] = start
            if sum(tensor.bits.nbytes for tensor in whole.values()) > memory_bytes:
                return False
        elif blobs:
            changes.append(_merged(name, info, blobs, threads))
    folder, write_id = run.sub(layout.weights(policy, version)), new_write_id()
    written = delta_store.store(
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
    step = StoredDelta(base, written.contents.tensors, written.contents.files)
    try:
        run.create(
            layout.merged_delta(policy, version, base),
            seal(
                MergedDelta(
                    policy=policy,
                    version=version,
                    step=step,
                    created_s=time.time(),
                    write_id=write_id,
                )
            ),
        )
    except ConflictError:  # another one merged the same
        for file in step.files:
            folder.delete(file.name)
    return True


class Merging:
    """Merges in the background, one span at a time."""

    def __init__(self, run: ObjectStore, memory_bytes: int = MEMORY_BYTES) -> None:
        self._run = run
        self._memory_bytes = memory_bytes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="merge")
        self._under_way: Future[None] | None = None
        self._merged: dict[str, int] = {}

    def after(self, policy: str, version: int) -> None:
        """Merge the newest whole span up to `version`, which stands, unless that was done or
        another is under way.
        """
        end = version - version % MERGED_SPAN
        busy = self._under_way is not None and not self._under_way.done()
        if end >= MERGED_SPAN and end != self._merged.get(policy) and not busy:
            self._merged[policy] = end
            self._under_way = self._pool.submit(self._merge, policy, end)

    def _merge(self, policy: str, end: int) -> None:
        try:
            merge(self._run, policy, end, end - MERGED_SPAN, self._memory_bytes)
        except AstraFlowError as error:
            log.warning(
                "the changes of %s up to version %d are not merged, workers go version by version: "
                "%s",
                policy,
                end,
                error,
            )

    def close(self) -> None:
        """Let the one under way end."""
        self._pool.shutdown(wait=True)


def _single_legs(run: ObjectStore, policy: str, version: int, base: int) -> list[PathStep]:
    """The delta of every version after `base`, as far as there are deltas."""
    with ThreadPoolExecutor(manifests.READ_THREADS) as pool:
        chain = list(
            pool.map(
                lambda number: manifests.read_manifest(run, policy, number),
                range(base + 1, version + 1),
            )
        )
    return [
        leg
        for manifest in chain
        for leg in update_path.legs(manifest)
        if leg.base == manifest.version - 1
    ]


def _fetch(run: ObjectStore, leg: PathStep) -> _Fetched:
    folder = run.sub(leg.folder)
    with ThreadPoolExecutor(delta_store.TRANSFERS_MAX) as pool:
        files = delta_store.needed(folder.url, leg.tensors, leg.files)
        contents = pool.map(lambda file: delta_store.fetch(folder, file), files)
        entries = {
            (file.name, name): tensor
            for file, own in zip(files, contents, strict=True)
            for name, tensor in own.items()
        }
    return _Fetched(leg, entries)


def _trace(
    fetched: Sequence[_Fetched], name: str
) -> tuple[str, HostTensor | None, list[HostTensor]]:
    """Where a tensor comes from: the base's tensor of that name, or one that was stored as a whole
    on the way; and the blobs that are to be applied to it.
    """
    blobs: list[HostTensor] = []
    for one in reversed(fetched):
        info = one.leg.tensors.get(name)
        stored = one.entries.get((info.file, info.entry or name)) if info else None
        if info is None or (info.file and stored is None):
            raise CorruptError(
                f"{one.leg.folder} does not hold the tensor {name}, which a later version needs"
            )
        if not info.source:
            return "", stored, blobs[::-1]
        if stored is not None:
            blobs.append(stored)
        name = info.source
    return name, None, blobs[::-1]


def _merged(name: str, info: TensorInfo, blobs: Sequence[HostTensor], threads: int) -> Change:
    blob, num_changed = deltas.merge(
        [delta_store.blob_of(blob) for blob in blobs],
        info.dtype,
        math.prod(info.shape),
        threads=threads,
    )
    return Change(name, blob, num_changed)
