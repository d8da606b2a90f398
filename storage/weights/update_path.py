"""The update path: the stored deltas that lead from the version a reader has to the one it needs.

    loaded 13 ──14──▶ ──15──▶ ──16──▶ 16      one delta a version
             8 ──────────────────────▶ 16     a merged delta, which passes over those in between
                    anchor 20 ──21──▶ …       an anchor, which needs no base

The cheapest path has the fewest bytes. Files are fetched ahead, many at once; each is applied and
dropped. This module reads no manifests: the caller passes the deltas to choose from.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from storage import layout
from storage.errors import CorruptError
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
from storage.weights.delta_applier import DeltaApplier
from storage.weights.delta_store import TRANSFERS_MAX
from storage.weights.manifests import MEMORY_BYTES, LoadedWeights


@dataclass(frozen=True, kw_only=True)
class PathDelta:
    """One part of an update path: a stored delta from `base` to `version`, or an anchor."""

    policy: str
    version: int
    base: int | None
    """None for an anchor."""
    tensors: Mapping[str, TensorInfo]
    files: tuple[FileInfo, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that hold tensors."""
        used = {info.file for info in self.tensors.values()}
        return sum(file.num_bytes for file in self.files if file.name in used)

    @property
    def folder(self) -> str:
        """Key of the folder of its files."""
        return layout.weights(self.policy, self.version)


class DamagedPathError(CorruptError):
    """The stored delta `delta` cannot be applied."""

    def __init__(self, delta: PathDelta, message: str) -> None:
        super().__init__(message)
        self.delta = delta


def path_deltas(manifest: Manifest) -> list[PathDelta]:
    """Return what a manifest lists: an anchor, a delta, or both; nothing where it is shared."""
    if manifest.shared:
        return []
    listed = PathDelta(
        policy=manifest.policy,
        version=manifest.version,
        base=manifest.base,
        tensors=manifest.tensors,
        files=manifest.files,
    )
    if manifest.step is None:
        return [listed]
    return [listed, _path_delta(manifest.policy, manifest.version, manifest.step)]


def merged_path_delta(merged: MergedDelta) -> PathDelta:
    """Return a merged delta as part of an update path."""
    return _path_delta(merged.policy, merged.version, merged.step)


def cheapest(
    deltas: Iterable[PathDelta], start: int | None, version: int
) -> list[PathDelta] | None:
    """Return the path with the fewest bytes to `version`, from version `start` or from an anchor.

    None when no path leads there. A `start` of None allows only paths from an anchor.
    """
    num_bytes: dict[int | None, float] = {None: 0.0}
    if start is not None:
        num_bytes[start] = 0.0
    last: dict[int | None, PathDelta] = {}
    for delta in sorted(deltas, key=lambda delta: delta.version):
        found = num_bytes.get(delta.base, math.inf) + delta.num_bytes
        if found < num_bytes.get(delta.version, math.inf):
            num_bytes[delta.version], last[delta.version] = found, delta
    if version not in num_bytes:
        return None
    path: list[PathDelta] = []
    at: int | None = version
    while at in last:
        path.append(last[at])
        at = last[at].base
    return path[::-1]


def apply_path(
    run: ObjectStore,
    manifest: Manifest,
    path: Sequence[PathDelta],
    loaded: LoadedWeights | None,
    memory_bytes: int = MEMORY_BYTES,
    spare: LoadedWeights | None = None,
) -> LoadedWeights:
    """Return the version of `manifest`, read by exactly this path and verified.

    Args:
        loaded: the version that the path starts from. Its tensors stay as they are; those that do
            not change are shared with it.
        memory_bytes: of files that are in memory at once.
        spare: a version that is no longer used, whose memory is written to.

    Raises:
        DamagedPathError: a file is damaged, or does not fit what is listed.
        CorruptError: the resulting tensors are not those that the manifest lists.
    """
    files = [
        delta_store.tensor_files(f"{run.url}/{delta.folder}", delta.tensors, delta.files)
        for delta in path
    ]
    applier = DeltaApplier(
        loaded.tensors if loaded else {},
        {name: info.digest for name, info in loaded.manifest.tensors.items()} if loaded else {},
        spare.tensors.values() if spare else (),
        loaded.whole_bytes if loaded else 0,
    )
    with ordered_map(
        lambda each: (each[1], delta_store.fetch(run.sub(each[0].folder), each[1])),
        [(delta, file) for delta, of_delta in zip(path, files, strict=True) for file in of_delta],
        threads=TRANSFERS_MAX,
        budget=memory_bytes,
        cost=lambda each: each[1].num_bytes,
    ) as fetched:
        for delta, of_delta in zip(path, files, strict=True):
            if delta.base is None:
                applier.clear()
            try:
                applier.apply(
                    f"{run.url}/{delta.folder}",
                    delta.tensors,
                    islice(fetched, len(of_delta)),
                    with_digests=delta is path[-1],
                )
            except CorruptError as error:
                raise DamagedPathError(delta, str(error)) from error
    check(manifest, applier.tensors, applier.digests())
    return LoadedWeights(manifest, applier.tensors, applier.whole_bytes)


def check(
    manifest: Manifest, tensors: Mapping[str, HostTensor], digests: Mapping[str, str]
) -> None:
    """Raise CorruptError unless the tensors and their digests are those that `manifest` lists."""
    where = layout.weights(manifest.policy, manifest.version)
    for name, info in manifest.tensors.items():
        tensor = tensors.get(name)
        if tensor is None or (tensor.dtype, tensor.shape, digests[name]) != (
            info.dtype,
            info.shape,
            info.digest,
        ):
            raise CorruptError(
                f"{where}: what is stored does not give the tensor {name} that its manifest lists"
            )
    if extra := tensors.keys() - manifest.tensors.keys():
        raise CorruptError(
            f"{where}: what is stored gives {', '.join(sorted(extra)[:3])}, which its manifest "
            "does not list"
        )


def _path_delta(policy: str, version: int, delta: StoredDelta) -> PathDelta:
    return PathDelta(
        policy=policy, version=version, base=delta.base, tensors=delta.tensors, files=delta.files
    )
