"""Invariants 1 and 3 over one policy's versions: contiguous, each from its parent and its batch, every digest true."""

from collections.abc import Callable, Mapping

from storage import layout, weights
from storage.errors import AstraFlowError, CorruptError, NotFoundError, TransientError
from storage.objects import ObjectStore
from storage.records import Manifest
from storage.weights import Held

Broken = Callable[[int, str, str], None]
Progress = Callable[[str, float], None]


def audit_weights(run: ObjectStore, policy: str, due: int, broken: Broken, progress: Progress) -> Mapping[int, Manifest]:
    """Check every published version of the policy, and that those up to `due` (−1: none) are; returns the manifests that can
    be read, by version."""
    keys = run.list(f"{layout.WEIGHTS}/{policy}/")
    versions = layout.numbers(keys, lambda version: layout.manifest(layout.weights(policy, version)))
    last = max([-1, *versions])
    for version in sorted({*range(max(last, due) + 1)} - {*versions}):
        why = f"version {last} exists" if version < last else "and the run is completed"
        broken(1, layout.weights(policy, version), f"version {version} is missing, {why}")
    manifests: dict[int, Manifest] = {}
    held: Held | None = None
    for at, version in enumerate(versions):
        progress(f"weights of {policy}", (at + 1) / len(versions))
        manifest = _read(run, policy, version, broken)
        if manifest is None:
            continue
        manifests[version] = manifest
        _check_ancestry(run, manifest, broken)
        held = _check_bytes(run, manifest, held, broken)
    return manifests


def _read(run: ObjectStore, policy: str, version: int, broken: Broken) -> Manifest | None:
    where = layout.manifest(layout.weights(policy, version))
    try:
        manifest = weights.read_manifest(run, policy, version)
    except TransientError:
        raise
    except AstraFlowError as error:
        broken(3, where, str(error))
        return None
    if (manifest.policy, manifest.version) != (policy, version):
        broken(3, where, f"says it is version {manifest.version} of {manifest.policy}")
    return manifest


def _check_ancestry(run: ObjectStore, manifest: Manifest, broken: Broken) -> None:
    where = layout.manifest(layout.weights(manifest.policy, manifest.version))
    parent = manifest.version - 1 if manifest.version else None
    batch = manifest.version or None
    if manifest.parent != parent:
        broken(3, where, f"names parent {manifest.parent}; the parent of version {manifest.version} is {parent}")
    if manifest.batch != batch:
        broken(3, where, f"names batch {manifest.batch}; version {manifest.version} is made of batch {batch}")
    if batch is not None and not run.exists(layout.batch(manifest.policy, batch)):
        broken(3, where, f"was made of batch {batch}, which does not exist")


def _check_bytes(run: ObjectStore, manifest: Manifest, held: Held | None, broken: Broken) -> Held | None:
    """Reads the version as a worker would that holds the version before, and returns it."""
    where = layout.weights(manifest.policy, manifest.version)
    if weights.is_gone(run, manifest):
        return None  # what its manifest says was checked above
    try:
        if manifest.version == 0:
            weights.fetch_files(run, manifest.policy, 0)
        return weights.read(run, manifest.policy, manifest.version, held)
    except NotFoundError as error:
        if not run.exists(layout.retired(manifest.policy, manifest.version)):
            broken(3, where, str(error))
        return None  # a retirement that was cut off left its data, but not all that leads to it
    except CorruptError as error:
        broken(3, where, str(error))
        return None
