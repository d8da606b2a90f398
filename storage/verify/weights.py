"""Invariants 1 and 3 over one policy's versions: contiguous, each from its parent and its batch,
every digest true.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial

from storage import layout
from storage.errors import UNREADABLE, AstraFlowError, NotFoundError, TransientError
from storage.records.weights import Manifest
from storage.run import checkpoints
from storage.store.object_store import ObjectStore
from storage.verify.missing_numbers import gaps
from storage.weights import manifests, reader, update_path
from storage.weights.manifests import LoadedWeights
from storage.weights.update_path import PathStep

Broken = Callable[[int, str, str], None]
Progress = Callable[[str, float], None]


def audit_weights(
    run: ObjectStore, policy: str, due: int, broken: Broken, progress: Progress
) -> Mapping[int, str]:
    """Check every published version of the policy, and that those up to `due` (−1: none) are;
    returns the digests of the versions whose manifest can be read. The manifests themselves are let
    go: there may be ten thousand large ones.
    """
    keys = run.list(f"{layout.WEIGHTS}/{policy}/")
    versions = layout.numbers(
        keys, lambda version: layout.manifest(layout.weights(policy, version))
    )
    last = max([-1, *versions])
    missing = gaps(versions, 0, max(last, due) + 1)
    for version in missing.first:
        why = f"version {last} exists" if version < last else "and the run is completed"
        broken(1, layout.weights(policy, version), f"version {version} is missing, {why}")
    if missing.more:
        broken(1, f"{layout.WEIGHTS}/{policy}", f"and {missing.more:,} more versions are missing")
    merges = layout.merged_deltas(keys, policy)
    last_user = {base: version for version in sorted(merges) for base in merges[version]}
    digests: dict[int, str] = {}
    held: dict[int, LoadedWeights] = {}
    for at, version in enumerate(versions):
        progress(f"weights of {policy}", (at + 1) / len(versions))
        manifest = _read(run, policy, version, broken)
        if manifest is None:
            continue
        _check_ancestry(run, manifest, broken)
        found = _check_bytes(run, manifest, merges.get(version, ()), held, broken)
        held = {base: one for base, one in held.items() if version < last_user.get(base, version)}
        if found:
            held[version] = found
        digests[version] = manifest.digest
    return digests


def audit_checkpoints(run: ObjectStore, policy: str, broken: Broken) -> None:
    """Check that the manifest of every checkpoint can be read. Its data, which is large and which
    only its trainer reads, is left out.
    """
    for step in checkpoints.steps(run, policy):
        try:
            checkpoints.read_manifest(run, policy, step)
        except NotFoundError:
            pass  # its trainer has pruned it meanwhile
        except UNREADABLE as error:
            broken(3, layout.manifest(layout.checkpoint(policy, step)), str(error))


def _read(run: ObjectStore, policy: str, version: int, broken: Broken) -> Manifest | None:
    where = layout.manifest(layout.weights(policy, version))
    try:
        return manifests.read_manifest(run, policy, version)
    except TransientError:
        raise
    except AstraFlowError as error:
        broken(3, where, str(error))
        return None


def _check_ancestry(run: ObjectStore, manifest: Manifest, broken: Broken) -> None:
    where = layout.manifest(layout.weights(manifest.policy, manifest.version))
    parent = manifest.version - 1 if manifest.version else None
    batch = manifest.version or None
    if manifest.parent != parent:
        broken(
            3,
            where,
            f"names parent {manifest.parent}; the parent of version {manifest.version} is {parent}",
        )
    if manifest.batch != batch:
        broken(
            3,
            where,
            f"names batch {manifest.batch}; version {manifest.version} is made of batch {batch}",
        )
    if batch is not None and not run.exists(layout.batch(manifest.policy, batch)):
        broken(3, where, f"was made of batch {batch}, which does not exist")


def _check_bytes(
    run: ObjectStore,
    manifest: Manifest,
    merged: Collection[int],
    held: Mapping[int, LoadedWeights],
    broken: Broken,
) -> LoadedWeights | None:
    """Goes every way that leads to the version: from nowhere, from the version before, and from the
    bases of `merged` changes. Returns the version; None where its data was let go, or no way leads
    to it.
    """
    where = layout.weights(manifest.policy, manifest.version)
    if manifests.is_gone(run, manifest):
        return None  # what its manifest says was checked above

    def checked(read: Callable[[], LoadedWeights | None]) -> LoadedWeights | None:
        try:
            return read()
        except NotFoundError as error:
            if not run.exists(layout.retired(manifest.policy, manifest.version)):
                broken(
                    3, where, str(error)
                )  # a retirement that was cut off left its data, but not all that leads to it
        except UNREADABLE as error:
            if not manifests.is_gone(run, manifest):  # it may be retired while it is read
                broken(3, where, str(error))
        return None

    def go(leg: PathStep) -> LoadedWeights:
        return reader.apply_path(
            run, manifest, [leg], held[leg.base] if leg.base is not None else None
        )

    def go_merged(base: int) -> LoadedWeights | None:
        leg = update_path.merged_leg(
            manifests.read_merged(run, manifest.policy, manifest.version, base)
        )
        return go(leg) if base in held else None

    if manifest.version == 0:
        checked(partial(_check_files, run, manifest.policy))
    ways_there = [leg for leg in update_path.legs(manifest) if leg.base is None or leg.base in held]
    reads: list[Callable[[], LoadedWeights | None]] = [
        *(partial(go, leg) for leg in ways_there),
        *(partial(go_merged, b) for b in merged),
    ]
    if not ways_there:  # what leads there could not be read itself
        reads.append(partial(reader.read, run, manifest.policy, manifest.version))
    found: LoadedWeights | None = None
    for read in reads:
        one = checked(read)
        found = found or one
    return found


def _check_files(run: ObjectStore, policy: str) -> None:
    reader.fetch_files(run, policy, 0)
