"""From the weights that one holds to those that one wants: which stored changes lead there, and
going that way.

    held 13 ──14──▶ ──15──▶ ──16──▶ 16        one leg a version
            16 ◀──since 8── 8                 or a merged one, which passes over those in between
                 anchor 20 ──21──▶ …          or from an anchor, which leads from nowhere

The cheapest way is the one with the fewest bytes. Files are fetched ahead, many at once; each is
applied and let go. This module reads no manifests: which legs there are it is told.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from storage import layout
from storage.errors import CorruptError
from storage.formats.safetensors import digest
from storage.records.weights import (
    FileInfo,
    HostTensor,
    Manifest,
    MergedDelta,
    StoredDelta,
    TensorInfo,
)
from storage.store.object_store import ObjectStore
from storage.store.ordered_map import ordered_map
from storage.weights import delta_store
from storage.weights.delta_store import TRANSFERS_MAX

NOTHING: Mapping[str, HostTensor] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """One stored change: it leads to `version` from `base`, or from nowhere."""

    policy: str
    version: int
    base: int | None
    tensors: Mapping[str, TensorInfo]
    files: tuple[FileInfo, ...]

    @property
    def num_bytes(self) -> int:
        used = {info.file for info in self.tensors.values()}
        return sum(file.num_bytes for file in self.files if file.name in used)

    @property
    def folder(self) -> str:
        return layout.weights(self.policy, self.version)


class DamagedPathError(CorruptError):
    """The stored change `leg` cannot be applied."""

    def __init__(self, leg: PathStep, message: str) -> None:
        super().__init__(message)
        self.leg = leg


def legs(manifest: Manifest) -> list[PathStep]:
    """The ways to a version that its manifest tells of."""
    found = [
        PathStep(
            policy=manifest.policy,
            version=manifest.version,
            base=manifest.base,
            tensors=manifest.tensors,
            files=manifest.files,
        )
    ]
    return found + (
        [_leg(manifest.policy, manifest.version, manifest.step)] if manifest.step else []
    )


def merged_leg(merged: MergedDelta) -> PathStep:
    return _leg(merged.policy, merged.version, merged.step)


def _leg(policy: str, version: int, step: StoredDelta) -> PathStep:
    return PathStep(
        policy=policy, version=version, base=step.base, tensors=step.tensors, files=step.files
    )


def cheapest(given: Iterable[PathStep], start: int | None, version: int) -> list[PathStep] | None:
    """The legs with the fewest bytes from `start` (None: nothing is held), or from an anchor, to
    `version`; None when none lead there.
    """
    ways: dict[int | None, tuple[float, list[PathStep]]] = {None: (0.0, [])} | (
        {} if start is None else {start: (0.0, [])}
    )
    for leg in sorted(given, key=lambda leg: leg.version):
        num_bytes, way = ways.get(leg.base, (math.inf, []))
        num_bytes += leg.num_bytes
        if num_bytes < ways.get(leg.version, (math.inf, []))[0]:
            ways[leg.version] = num_bytes, [*way, leg]
    return ways[version][1] if version in ways else None


def follow(
    run: ObjectStore,
    way: Sequence[PathStep],
    held: Mapping[str, HostTensor],
    memory_bytes: int,
    spare: Mapping[str, HostTensor] = NOTHING,
) -> tuple[dict[str, HostTensor], dict[str, str]]:
    """The tensors at the end of the way, and the digests, by name, of those that its last leg
    changed; `held` stay as they are, and what does not change is shared with them.

    The memory of `spare` is written over, but for what is held. About `memory_bytes` of files lie
    in memory at once. DamagedLegError for a file that is not what is listed, twice. Whether the
    right tensors come out, `check` tells.
    """
    listed = [
        [
            (leg, file)
            for file in delta_store.needed(f"{run.url}/{leg.folder}", leg.tensors, leg.files)
        ]
        for leg in way
    ]
    fetched = ordered_map(
        lambda one: (one[1], delta_store.fetch(run.sub(one[0].folder), one[1])),
        [one for of_leg in listed for one in of_leg],
        threads=TRANSFERS_MAX,
        budget=memory_bytes,
        cost=lambda one: one[1].num_bytes,
    )
    tensors = dict(held)
    digested: dict[str, str] = {}
    foreign = {id(tensor) for tensor in held.values()}
    held_bits = {id(tensor.bits) for tensor in held.values()}
    room = delta_store.room(tensor for tensor in spare.values() if id(tensor.bits) not in held_bits)
    for leg, of_leg in zip(way, listed, strict=True):
        own = {id(tensor) for tensor in tensors.values()} - foreign
        stored = islice(fetched, len(of_leg))
        base = tensors if leg.base is not None else {}
        try:
            last = digested if leg is way[-1] else None
            tensors = delta_store.apply(
                f"{run.url}/{leg.folder}", leg.tensors, stored, base, own, room, last
            )
        except CorruptError as error:
            raise DamagedPathError(leg, str(error)) from error
    return tensors, digested


def check(
    manifest: Manifest,
    tensors: Mapping[str, HostTensor],
    digested: Mapping[str, str],
    known: Mapping[int, str],
) -> None:
    """CorruptError unless every tensor is the one that the manifest lists. `digested` are digests
    by name that were made with the tensors, `known` those by `id` of tensors that were checked
    before.
    """

    def own(one: tuple[str, HostTensor]) -> tuple[str, tuple[str, tuple[int, ...], str]]:
        name, tensor = one
        return name, (
            tensor.dtype,
            tensor.shape,
            digested.get(name) or known.get(id(tensor)) or digest(tensor),
        )

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = dict(pool.map(own, tensors.items()))
    where = layout.weights(manifest.policy, manifest.version)
    for name, info in manifest.tensors.items():
        if found.get(name) != (info.dtype, info.shape, info.digest):
            raise CorruptError(
                f"{where}: what is stored does not give the tensor {name} that its manifest lists"
            )
    if extra := found.keys() - manifest.tensors.keys():
        raise CorruptError(
            f"{where}: what is stored gives {', '.join(sorted(extra)[:3])}, which its manifest "
            "does not list"
        )
