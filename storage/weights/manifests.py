"""Manifests of versions: which versions exist, and the digests of each. Every read is verified."""

import logging
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats.json_objects import unseal
from storage.formats.safetensors import weights_digest
from storage.formats.tensor_set import Contents
from storage.records.weights import HostTensor, Manifest, MergedDelta
from storage.store.galloping_search import first_absent
from storage.store.object_store import ObjectStore, read_twice

log = logging.getLogger(__name__)

MEMORY_BYTES = 2**30
"""Memory for publishing or reading a version, besides the versions themselves."""
MERGED_SPAN = 8
"""Versions that a merged delta passes over, from one multiple of this number to the next."""
READ_THREADS = 16
"""Manifests that are read at once."""
_probe_pool = ThreadPoolExecutor(12, thread_name_prefix="probe")
"""Workers poll for new versions several times a second: starting threads for each poll would cost
more than the poll.
"""


class LoadedWeights(NamedTuple):
    """A version in host memory, with its manifest."""

    manifest: Manifest
    tensors: Mapping[str, HostTensor]


def read_manifest(run: ObjectStore, policy: str, version: int) -> Manifest:
    """Read and verify the manifest of a version.

    Raises:
        NotFoundError: there is no such version yet.
        CorruptError: the manifest is damaged, or that of another version.
    """
    key = layout.manifest(layout.weights(policy, version))
    return read_twice(lambda: parse_manifest(run.get(key), policy, version))


def parse_manifest(body: bytes, policy: str, version: int) -> Manifest:
    """Verify a manifest that was read as bytes; CorruptError as for `read_manifest`."""
    key = layout.manifest(layout.weights(policy, version))
    manifest = unseal(Manifest, body, key)
    if (manifest.policy, manifest.version) != (policy, version):
        raise CorruptError(f"{key} is the manifest of {manifest.policy} version {manifest.version}")
    if weights_digest(manifest.tensors) != manifest.digest:
        raise CorruptError(f"{key} lists tensors whose digests do not give its own digest")
    return manifest


def exists(run: ObjectStore, policy: str, version: int) -> bool:
    """Return whether the version was published."""
    return run.exists(layout.manifest(layout.weights(policy, version)))


def latest(run: ObjectStore, policy: str, start: int = 0) -> int | None:
    """Find the newest version by probing upwards from `start`, a version that exists.

    Versions have no gaps. A manifest that was lost makes one: a single missing version is passed
    over, for one probe more, and logged when the search ends at it. Several missing ones in a row
    look like the end; `verify` reports them.

    Returns:
        None when `start` does not exist.
    """

    def probe(version: int) -> bool:
        return exists(run, policy, version)

    absent = first_absent(probe, start)
    if absent == start:
        return None
    while probe(absent + 1):
        if not probe(absent):  # else it was published between the probes
            log.warning(
                "version %d of %s is missing, version %d exists: put its manifest back, "
                "`astraflow verify` lists what is missing",
                absent,
                policy,
                absent + 1,
            )
        absent = first_absent(probe, absent + 1)
    return absent - 1


def newer(run: ObjectStore, policy: str, than: int) -> Manifest | None:
    """Read the manifest of the newest version after `than`, which exists; None when there is none.

    What a reader needs that is one version behind is requested at once, in one round trip.
    """
    probes = [_probe_pool.submit(exists, run, policy, than + ahead) for ahead in (1, 2)]
    manifest = _probe_pool.submit(_try_manifest, run, policy, than + 1)
    next_exists, second_exists = (probe.result() for probe in probes)
    if second_exists:  # also when the next one is missing: an anchor may lead over it
        return read_manifest(run, policy, latest(run, policy, than + 2) or than + 2)
    if not next_exists:
        return None
    result = manifest.result()
    return result if isinstance(result, Manifest) else read_manifest(run, policy, than + 1)


def read_merged(run: ObjectStore, policy: str, version: int, base: int) -> MergedDelta:
    """Read the merged delta from `base` to `version`.

    Raises:
        NotFoundError: there is none.
        CorruptError: it is damaged, or leads between other versions.
    """
    key = layout.merged_delta(policy, version, base)
    merged = read_twice(lambda: unseal(MergedDelta, run.get(key), key))
    if (merged.policy, merged.version, merged.step.base) != (policy, version, base):
        raise CorruptError(
            f"{key} leads from version {merged.step.base} to {merged.version} of {merged.policy}"
        )
    return merged


def nearest_anchor(run: ObjectStore, policy: str, version: int) -> Manifest:
    """Read the manifest of the newest anchor up to `version`; raises what `chain_from_anchor`
    raises.
    """
    return chain_from_anchor(run, policy, version, ())[0]


def is_retired(run: ObjectStore, manifest: Manifest) -> bool:
    """Return whether data of the version was deleted on purpose.

    False where an interrupted retirement left all of it.
    """
    folder = layout.weights(manifest.policy, manifest.version)
    if not run.exists(layout.retired(manifest.policy, manifest.version)):
        return False
    files = manifest.files + (manifest.step.files if manifest.step else ())
    return not all(run.exists(f"{folder}/{file.name}") for file in files)


def read_manifests(
    run: ObjectStore, policy: str, versions: Iterable[int]
) -> list[Manifest | NotFoundError | CorruptError]:
    """Read the manifest of each version; in its place the error, where one cannot be read."""
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return list(pool.map(lambda version: _try_manifest(run, policy, version), versions))


def _try_manifest(
    run: ObjectStore, policy: str, version: int
) -> Manifest | NotFoundError | CorruptError:
    try:
        return read_manifest(run, policy, version)
    except (NotFoundError, CorruptError) as error:
        return error


def chain_from_anchor(
    run: ObjectStore, policy: str, version: int, damaged: Collection[int]
) -> list[Manifest]:
    """Read the manifests from the nearest anchor that is not `damaged` up to `version`.

    Raises:
        NotFoundError: there is no such version.
        CorruptError: a manifest in between is missing or damaged, or no delta to the version before.
    """
    chain = [read_manifest(run, policy, version)]
    while chain[0].kind == "delta" or chain[0].version in damaged:
        base = chain[0].base if chain[0].kind == "delta" else chain[0].version - 1
        if base is None or base != chain[0].version - 1 or base < 0:
            raise CorruptError(
                f"version {chain[0].version} of {policy} is a delta to version {base}, which is "
                "not the one before"
            )
        older = read_manifests(run, policy, range(max(0, base - READ_THREADS + 1), base + 1))
        for result in reversed(older):
            if isinstance(result, NotFoundError):
                links = " ← ".join(str(manifest.version) for manifest in reversed(chain))
                missing = chain[0].version - 1
                raise CorruptError(
                    f"version {version} of {policy} cannot be read: the chain {links} starts from "
                    f"version {missing}, which does not exist any more; put "
                    f"{layout.weights(policy, missing)} back"
                ) from result
            if isinstance(result, CorruptError):
                raise result
            chain.insert(0, result)
            if result.kind == "anchor" and result.version not in damaged:
                break
    return chain


def contents(manifest: Manifest) -> Contents:
    """Return what a manifest lists as a set of tensors and files."""
    return Contents(manifest.tensors, manifest.files)
