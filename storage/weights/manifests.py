"""Manifests of versions: which versions exist, and what each must be. Every read is verified."""

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

MEMORY_BYTES = 2**30
"""What publishing or reading a version takes of memory beside the versions themselves."""
MERGED_SPAN = 8
"""Merged changes lead over so many versions, from one multiple of it to the next."""
READ_THREADS = 16
"""Manifests that are read at once."""
_looking = ThreadPoolExecutor(12, thread_name_prefix="look")
"""Workers look for new versions several times a second: starting threads for each look would cost
more than the look.
"""


class LoadedWeights(NamedTuple):
    """A version in host memory, with what its manifest says of it."""

    manifest: Manifest
    tensors: Mapping[str, HostTensor]


def read_manifest(run: ObjectStore, policy: str, version: int) -> Manifest:
    """NotFoundError while there is no such version; CorruptError when its manifest contradicts its
    place or itself.
    """
    key = layout.manifest(layout.weights(policy, version))
    return read_twice(lambda: parse_manifest(run.get(key), policy, version))


def parse_manifest(body: bytes, policy: str, version: int) -> Manifest:
    """The manifest of that version; CorruptError when it contradicts its place or itself."""
    key = layout.manifest(layout.weights(policy, version))
    manifest = unseal(Manifest, body, key)
    if (manifest.policy, manifest.version) != (policy, version):
        raise CorruptError(f"{key} is the manifest of {manifest.policy} version {manifest.version}")
    if weights_digest(manifest.tensors) != manifest.digest:
        raise CorruptError(f"{key} lists tensors whose digests do not give its own digest")
    return manifest


def exists(run: ObjectStore, policy: str, version: int) -> bool:
    return run.exists(layout.manifest(layout.weights(policy, version)))


def latest(run: ObjectStore, policy: str, start: int = 0) -> int | None:
    """The newest version, searched upwards from `start`, a version known to exist; None when
    `start` does not.
    """
    absent = first_absent(lambda version: exists(run, policy, version), start)
    return absent - 1 if absent > start else None


def newer(run: ObjectStore, policy: str, than: int) -> Manifest | None:
    """The manifest of the newest version after `than`, which stands; None when there is none.

    All that a reader wants who is one version behind is asked for at once: one round trip.
    """
    asked = [_looking.submit(exists, run, policy, than + ahead) for ahead in (1, 2)]
    manifest = _looking.submit(_manifest, run, policy, than + 1)
    first, second = (answer.result() for answer in asked)
    if second:  # also when the one between is missing: an anchor may come
        return read_manifest(run, policy, latest(run, policy, than + 2) or than + 2)
    if not first:
        return None
    found = manifest.result()
    return found if isinstance(found, Manifest) else read_manifest(run, policy, than + 1)


def read_merged(run: ObjectStore, policy: str, version: int, base: int) -> MergedDelta:
    """The merged changes from `base` to `version`. NotFoundError where there are none; CorruptError
    when damaged.
    """
    key = layout.merged_delta(policy, version, base)
    merged = read_twice(lambda: unseal(MergedDelta, run.get(key), key))
    if (merged.policy, merged.version, merged.step.base) != (policy, version, base):
        raise CorruptError(
            f"{key} leads from version {merged.step.base} to {merged.version} of {merged.policy}"
        )
    return merged


def nearest_anchor(run: ObjectStore, policy: str, version: int) -> Manifest:
    """The manifest of the newest anchor up to `version`, which exists. CorruptError where the chain
    to it is broken.
    """
    return chain_from_anchor(run, policy, version, ())[0]


def is_gone(run: ObjectStore, manifest: Manifest) -> bool:
    """Whether data of the version was let go on purpose. A retirement that was cut off may have
    left all of it.
    """
    folder = layout.weights(manifest.policy, manifest.version)
    if not run.exists(layout.retired(manifest.policy, manifest.version)):
        return False
    files = manifest.files + (manifest.step.files if manifest.step else ())
    return not all(run.exists(f"{folder}/{file.name}") for file in files)


def read_manifests(
    run: ObjectStore, policy: str, versions: Iterable[int]
) -> list[Manifest | NotFoundError | CorruptError]:
    """Of each version its manifest, or why it cannot be read."""
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return list(pool.map(lambda version: _manifest(run, policy, version), versions))


def _manifest(
    run: ObjectStore, policy: str, version: int
) -> Manifest | NotFoundError | CorruptError:
    try:
        return read_manifest(run, policy, version)
    except (NotFoundError, CorruptError) as error:
        return error


def chain_from_anchor(
    run: ObjectStore, policy: str, version: int, damaged: Collection[int]
) -> list[Manifest]:
    """The manifests from the nearest anchor that is not `damaged` up to `version`."""
    chain = [read_manifest(run, policy, version)]
    while chain[0].kind == "delta" or chain[0].version in damaged:
        base = chain[0].base if chain[0].kind == "delta" else chain[0].version - 1
        if base is None or base != chain[0].version - 1 or base < 0:
            raise CorruptError(
                f"version {chain[0].version} of {policy} is a delta to version {base}, which is "
                "not the one before"
            )
        for found in reversed(
            read_manifests(run, policy, range(max(0, base - READ_THREADS + 1), base + 1))
        ):
            if isinstance(found, NotFoundError):
                links = " ← ".join(str(manifest.version) for manifest in reversed(chain))
                gone = chain[0].version - 1
                raise CorruptError(
                    f"version {version} of {policy} cannot be read: the chain {links} starts from "
                    f"version {gone}, which does "
                    f"not exist any more; put {layout.weights(policy, gone)} back"
                ) from found
            if isinstance(found, CorruptError):
                raise found
            chain.insert(0, found)
            if found.kind == "anchor" and found.version not in damaged:
                break
    return chain


def contents(manifest: Manifest) -> Contents:
    return Contents(manifest.tensors, manifest.files)
