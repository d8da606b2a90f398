"""Reading of a version of the weights, by the update path with the fewest bytes, verified bit for
bit.

    anchor 0 ──delta 1──▶ 1 ──delta 2──▶ 2 …  anchor 20 ──delta 21──▶ …

An anchor holds every tensor, and also the delta from the version before; a delta holds only that. A
reader that has a version loaded needs only the deltas since; every other reader starts from the
nearest anchor.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats import tensor_set
from storage.formats.model_config import MODEL_CONFIG, check_sizes
from storage.records.weights import HostTensor, Manifest, Origin
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.weights import update_path
from storage.weights.manifests import (
    MEMORY_BYTES,
    MERGED_SPAN,
    READ_THREADS,
    RUNS_MAX,
    LoadedWeights,
    chain_from_anchor,
    contents,
    is_retired,
    read_manifest,
    read_manifests,
    read_merged,
)
from storage.weights.update_path import DamagedPathError, PathDelta

log = logging.getLogger(__name__)
LAG_VERSIONS_MAX = 64
"""A reader that is further behind starts from an anchor."""
DAMAGED_ANCHORS_MAX = 8
"""Damaged anchors of one chain that a reader goes back over. There may be thousands."""


def fetch(run: ObjectStore, policy: str, version: int) -> dict[str, HostTensor]:
    """Read all tensors of a version from its nearest anchor; raises what `read` raises."""
    return dict(read(run, policy, version).tensors)


def read(
    run: ObjectStore,
    policy: str,
    version: int,
    loaded: LoadedWeights | None = None,
    *,
    manifest: Manifest | None = None,
    spare: LoadedWeights | None = None,
    memory_bytes: int = MEMORY_BYTES,
    runs_max: int = RUNS_MAX,
) -> LoadedWeights:
    """Read a version by the cheapest path from `loaded`, else from the nearest anchor.

    Every file and every resulting tensor is verified. Where the path from `loaded` gives wrong
    bits, the version is read again from an anchor.

    Args:
        loaded: a version in memory. Unchanged tensors are shared with it.
        manifest: that of the version, where the caller has read it already.
        spare: a version that is no longer used. Its memory is written to, because fresh memory
            costs more than everything else here.
        memory_bytes: of files that are in memory at once, besides the versions.
        runs_max: runs that the version may be read from.

    Raises:
        CorruptError: the version cannot be read; the message names the versions of the path.
        NotFoundError: the version does not exist, or data that it needs was retired.
    """
    if (
        loaded is not None
        and loaded.manifest.version <= version <= loaded.manifest.version + LAG_VERSIONS_MAX
    ):
        try:
            return _read_from_loaded(run, policy, version, loaded, manifest, spare, memory_bytes)
        except (CorruptError, NotFoundError) as error:
            log.warning("%s; version %d of %s is read from an anchor", error, version, policy)
    return _read_from_anchor(run, policy, version, memory_bytes, runs_max)


def fetch_files(run: ObjectStore, policy: str, version: int = 0) -> dict[str, bytes]:
    """The model's other files by their own names, verified: `config.json`, `tokenizer.json`, …

    CorruptError where `config.json` names sizes beyond those of the version's tensors.
    """
    manifest = read_manifest(run, policy, version)
    files = tensor_set.read_extra_files(
        run.sub(layout.weights(policy, version)), contents(manifest)
    )
    if MODEL_CONFIG in files:
        shapes = (info.shape for info in manifest.tensors.values())
        check_sizes(files[MODEL_CONFIG], shapes, f"{MODEL_CONFIG} of {policy}")
    return files


def _read_from_loaded(
    run: ObjectStore,
    policy: str,
    version: int,
    loaded: LoadedWeights,
    manifest: Manifest | None,
    spare: LoadedWeights | None,
    memory_bytes: int,
) -> LoadedWeights:
    """Read by the cheapest path; where that fails, by the cheapest without merged deltas."""
    start = loaded.manifest.version
    if version == start:
        return loaded
    between = read_manifests(run, policy, range(start + 1, version))
    target = manifest or read_manifest(run, policy, version)
    chain = [*(each for each in between if isinstance(each, Manifest)), target]
    single = [delta for each in chain for delta in update_path.path_deltas(each)]
    merged = _merged_deltas(run, policy, start, version)
    path = update_path.cheapest(single + merged, start, version)
    path_without_merged = update_path.cheapest(single, start, version)
    if path is None:
        raise CorruptError(
            f"no unbroken chain leads from version {start} to version {version} of {policy}"
        )
    try:
        return update_path.apply_path(run, target, path, loaded, memory_bytes, spare)
    except CorruptError as error:
        if path_without_merged is None or path_without_merged == path:
            raise
        log.warning("%s; version %d of %s is read without merged deltas", error, version, policy)
        return update_path.apply_path(run, target, path_without_merged, loaded, memory_bytes)


def _read_origin(
    run: ObjectStore, first: Manifest, origin: Origin, memory_bytes: int, runs_max: int
) -> LoadedWeights:
    """Read the version of another run that version 0 is; CorruptError where that is impossible."""
    where = (
        f"version 0 of {first.policy} in {run.url} is {origin.policy}@{origin.version} of run "
        f"{origin.run}"
    )
    if runs_max <= 1:
        raise CorruptError(f"{where}: more than {RUNS_MAX} runs refer to one another in this way")
    try:
        return read(
            runs.sibling(run, origin.run),
            origin.policy,
            origin.version,
            memory_bytes=memory_bytes,
            runs_max=runs_max - 1,
        )
    except (NotFoundError, CorruptError) as error:
        raise CorruptError(
            f"{where}, which cannot be read: {error}; put that run back as it was"
        ) from error


def _read_from_anchor(
    run: ObjectStore, policy: str, version: int, memory_bytes: int, runs_max: int
) -> LoadedWeights:
    """Read from the nearest anchor; where that is damaged and carries its delta, from the one
    before, over DAMAGED_ANCHORS_MAX of them. A version 0 that is shared is read from its origin.
    """
    damaged: set[int] = set()
    first_error: Callable[[], CorruptError | NotFoundError] | None = None
    chain: list[Manifest] = []
    while True:
        try:
            chain = chain_from_anchor(run, policy, version, damaged, chain)
            usable = [
                delta
                for each in chain
                for delta in update_path.path_deltas(each)
                if delta.base is not None or delta.version not in damaged
            ]
            origin = chain[0].shared
            path = update_path.cheapest(usable, None if origin is None else 0, version)
            if path is None:
                raise CorruptError(
                    f"no unbroken chain leads from an anchor to version {version} of {policy}"
                )
        except CorruptError as error:
            raise (first_error() if first_error else error) from error
        loaded = None
        if origin is not None:
            loaded = _read_origin(run, chain[0], origin, memory_bytes, runs_max)
        try:
            return update_path.apply_path(run, chain[-1], path, loaded, memory_bytes)
        except DamagedPathError as error:
            # Made when it is raised: a retirement that goes on meanwhile deletes further files.
            first_error = first_error or partial(_explained, run, chain, path, error)
            if error.delta.base is not None or chain[0].step is None:
                raise first_error() from error
            damaged.add(error.delta.version)
            if len(damaged) > DAMAGED_ANCHORS_MAX:
                raise first_error() from error


def _explained(
    run: ObjectStore, chain: Sequence[Manifest], path: Sequence[PathDelta], error: CorruptError
) -> CorruptError | NotFoundError:
    """The error to raise when a path from an anchor fails: it names a retired version, or the path
    and what to do.
    """
    policy, version = chain[-1].policy, chain[-1].version
    on_path = {delta.version for delta in path}
    for manifest in chain:
        if manifest.version in on_path and is_retired(run, manifest):
            needed = "" if manifest.version == version else f", which version {version} needs,"
            return NotFoundError(
                f"the data of version {manifest.version} of {policy}{needed} was retired on purpose"
            )
    links = " ← ".join(str(delta.version) for delta in reversed(path))
    return CorruptError(
        f"version {version} of {policy} cannot be read, whose chain is {links}: {error}; "
        "put the object back as it was, or go on from the next anchor"
    )


def _merged_deltas(run: ObjectStore, policy: str, start: int, version: int) -> list[PathDelta]:
    """Read the merged deltas between two versions; those that cannot be read are left out."""
    spans = pairwise(range(-(-start // MERGED_SPAN) * MERGED_SPAN, version + 1, MERGED_SPAN))

    def read_span(span: tuple[int, int]) -> list[PathDelta]:
        base, end = span
        try:
            return [update_path.merged_path_delta(read_merged(run, policy, end, base))]
        except (NotFoundError, CorruptError):
            return []  # single deltas lead there too

    with ThreadPoolExecutor(READ_THREADS) as pool:
        return [delta for deltas in pool.map(read_span, spans) for delta in deltas]
