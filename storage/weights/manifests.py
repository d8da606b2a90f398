"""Manifests of versions: which versions exist, the digests of each, and the chains of their bases.

Every read is verified.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats import adapters, tensor_set
from storage.formats.json_objects import unseal
from storage.formats.safetensors import METADATA, digest, num_bytes, weights_digest
from storage.formats.tensor_set import Contents
from storage.plain_names import quoted
from storage.records.weights import FileInfo, HostTensor, Manifest, MergedDelta, TensorInfo
from storage.run import runs
from storage.store.galloping_search import first_absent
from storage.store.object_store import ObjectStore, read_twice
from storage.store.s3 import S3Objects
from storage.weights import delta_store
from storage.weights.delta_applier import check_growth

log = logging.getLogger(__name__)

MEMORY_BYTES = 2**30
"""Memory for publishing or reading a version, besides the versions themselves."""
TENSOR_BYTES_MAX = 2**63
"""Of one tensor, which may have 64 dimensions: a product of them may be too large for a float."""
MERGED_SPAN = 8
"""Versions that a merged delta passes over, from one multiple of this number to the next."""
RUNS_MAX = 8
"""Runs that one version is read from: a run whose version 0 has an origin, the origin's run, …"""
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
    whole_bytes: int = 0
    """Bytes of the tensors that were stored whole and that these go back to; 0: those of `tensors`.
    """


def read_manifest(run: ObjectStore, policy: str, version: int) -> Manifest:
    """Read and verify the manifest of a version.

    Raises:
        NotFoundError: there is no such version yet.
        CorruptError: the manifest is damaged, that of another version, or names another base than
            the version before; the message says what to do.
    """
    key = layout.manifest(layout.weights(policy, version))
    try:
        return read_twice(lambda: parse_manifest(run.get(key), policy, version))
    except CorruptError as error:
        raise CorruptError(f"{error}; put a good copy of it back") from error


def parse_manifest(body: bytes, policy: str, version: int) -> Manifest:
    """Verify a manifest that was read as bytes; CorruptError as for `read_manifest`."""
    key = layout.manifest(layout.weights(policy, version))
    manifest = unseal(Manifest, body, key)
    if (manifest.policy, manifest.version) != (policy, version):
        raise CorruptError(f"{key} is the manifest of {manifest.policy} version {manifest.version}")
    if weights_digest(manifest.tensors) != manifest.digest:
        raise CorruptError(f"{key} lists tensors whose digests do not give its own digest")
    if METADATA in manifest.tensors:
        raise CorruptError(f"{key} lists a tensor {METADATA}, which safetensors files cannot have")
    for name, info in manifest.tensors.items():
        if num_bytes(info) > TENSOR_BYTES_MAX:
            raise CorruptError(f"{key} lists the tensor {quoted(name)} with more than 2^63 bytes")
    _check_bases(manifest, key)
    _check_origin(manifest, key)
    if manifest.kind == "anchor" and not manifest.shared:
        _check_whole_tensors(manifest, key)
    if manifest.adapter and (reason := adapters.fault(manifest.adapter, manifest.tensors)):
        raise CorruptError(f"{key} names an adapter of rank {manifest.adapter.rank}, but {reason}")
    return manifest


def _check_bases(manifest: Manifest, key: str) -> None:
    """Raise CorruptError unless a delta, an anchor's too, is one to the version before."""
    before = manifest.version - 1 if manifest.version > 0 else None
    if manifest.kind == "delta" and (before is None or manifest.base != before):
        raise CorruptError(
            f"{key}: version {manifest.version} of {manifest.policy} is a delta to version "
            f"{manifest.base}, which is not the one before"
        )
    if manifest.kind == "anchor" and manifest.base is not None:
        raise CorruptError(f"{key} is an anchor and names the base {manifest.base}; it has none")
    step = manifest.step
    if step is not None and (manifest.kind == "delta" or before is None or step.base != before):
        raise CorruptError(
            f"{key} has a step from version {step.base}; only an anchor has one, from the version "
            "before"
        )


def _check_origin(manifest: Manifest, key: str) -> None:
    """Raise CorruptError for an origin of another version than 0, or of other tensors."""
    if manifest.origin is None:
        return
    if manifest.version or manifest.kind != "anchor":
        raise CorruptError(f"{key} has an origin; only version 0, which is an anchor, has one")
    if manifest.shared and manifest.digest != manifest.origin.digest:
        raise CorruptError(f"{key} shares the tensors of an origin whose digest is not its own")
    if not manifest.shared and not all(info.file for info in manifest.tensors.values()):
        raise CorruptError(f"{key} shares some tensors of its origin; it has to share all or none")


def _check_whole_tensors(manifest: Manifest, key: str) -> None:
    """Raise CorruptError unless an anchor's files can contain all its tensors, each as a whole."""
    if not manifest.tensors:
        raise CorruptError(f"{key} is an anchor without tensors")
    free_bytes = {file.name: file.num_bytes for file in manifest.files}
    stored: dict[tuple[str, str], tuple[object, ...]] = {}
    for name, info in manifest.tensors.items():
        if info.source or info.file not in free_bytes:
            raise CorruptError(
                f"{key} is an anchor, but lists the tensor {quoted(name)} as a change, or in none "
                "of its files"
            )
        entry, form = (info.file, info.entry or name), (info.dtype, info.shape, info.digest)
        if entry not in stored:
            free_bytes[info.file] -= num_bytes(info)
        if free_bytes[info.file] < 0 or stored.setdefault(entry, form) != form:
            raise CorruptError(
                f"{key} is an anchor, but lists the tensor {quoted(name)} in a file that is too "
                "small, or as the same entry as another tensor"
            )


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


def all_files(manifest: Manifest) -> tuple[FileInfo, ...]:
    """Return the files of a version, with those of an anchor's delta."""
    return manifest.files + (manifest.step.files if manifest.step else ())


def read_from(manifest: Manifest, has: Callable[[str], bool]) -> int | None:
    """Return the version that a reader of this one starts from, by the files that exist: this one,
    by its own tensors, or the one before, by a delta. None where the files of both ways are lost.

    Args:
        has: whether the file of a key exists.
    """

    def has_all(files: Iterable[FileInfo]) -> bool:
        return all(has(f"{_folder(manifest)}/{file.name}") for file in files)

    if has_all(manifest.files):
        return manifest.version if manifest.base is None else manifest.base
    step = manifest.step
    return step.base if step is not None and has_all(step.files) else None


def is_retired(run: ObjectStore, manifest: Manifest) -> bool:
    """Return whether the version cannot be read, because data of it, or of one on its chain, was
    deleted on purpose.

    False where an interrupted retirement left a way to read it.
    """
    while run.exists(layout.retired(manifest.policy, manifest.version)):
        start = read_from(manifest, run.exists)
        if start is None or start == manifest.version:
            return start is None
        manifest = read_manifest(run, manifest.policy, start)
    return False


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
    run: ObjectStore,
    policy: str,
    version: int,
    damaged: Collection[int],
    known: Iterable[Manifest] = (),
) -> list[Manifest]:
    """Read the manifests from the nearest anchor that is not `damaged` up to `version`.

    Args:
        known: the end of the chain, if it was read before.

    Raises:
        NotFoundError: there is no such version.
        CorruptError: a manifest in between is missing or damaged.
    """
    chain = list(known) or [read_manifest(run, policy, version)]
    while chain[0].kind == "delta" or chain[0].version in damaged:
        base = chain[0].version - 1  # a damaged anchor carries its delta
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


def chains(
    run: ObjectStore, policy: str, version: int
) -> Iterator[tuple[ObjectStore, list[Manifest]]]:
    """Yield the manifests that the version is read from, as `chain_from_anchor`, with their run:
    those of its own run, then those of its origin's run, and so on.

    Raises CorruptError and NotFoundError, also where the origins lead through too many runs.
    """
    for _ in range(RUNS_MAX):
        chain = chain_from_anchor(run, policy, version, ())
        yield run, chain
        origin = chain[0].shared
        if origin is None:
            return
        run, policy, version = runs.sibling(run, origin.run), origin.policy, origin.version
    raise CorruptError(f"{run.url}: more than {RUNS_MAX} runs refer to one another")


def with_bases(
    run: ObjectStore,
    chain: Sequence[Manifest],
    kept: Mapping[int, str],
    keys: Collection[str],
    retired: Collection[int],
    *,
    verify: bool,
) -> dict[int, str]:
    """Return `kept`, version → why it is kept, with the versions that these are read from.

    These are the versions down to an anchor. One that has lost a file ends no chain: it is read by
    its delta, from the versions down to the anchor before. The same holds for one whose files or
    tensors have wrong digests, with `verify`: each anchor is read whose older versions are not
    kept. Anchors on S3 are not read, because it verifies the bytes that it stores.

    Args:
        chain: manifests of all versions, from 0 on. Their tensors are not used.
        keys: of all files of these versions.
        retired: versions that cannot be read any more; no chain leads over them.
    """
    damaged = {
        anchor.version
        for anchor in chain
        if anchor.kind == "anchor" and read_from(anchor, keys.__contains__) != anchor.version
    }
    verified = set(damaged)
    while True:
        result = _down_to_anchors(chain, kept, damaged, retired)
        last_uses = [
            version
            for version in result
            if version  # nothing is before version 0
            and chain[version].kind == "anchor"
            and version not in verified
            and version - 1 not in result
            and version - 1 not in retired
        ]
        if not verify or not last_uses or isinstance(run.backend, S3Objects):
            return result
        verified |= set(last_uses)
        damaged |= {version for version in last_uses if not _is_undamaged(run, chain[version])}


def _down_to_anchors(
    chain: Sequence[Manifest],
    kept: Mapping[int, str],
    damaged: Collection[int],
    retired: Collection[int],
) -> dict[int, str]:
    """Return `kept` with the bases of its versions, down to an anchor that is not damaged."""
    result = dict(kept)
    for version in sorted(kept, reverse=True):
        why, current = f"leads to version {version}", chain[version]
        while True:
            base, before = current.base, current.version - 1
            if current.version in damaged and before >= 0 and before not in retired:
                base = before
                why = f"leads to version {current.version}, whose own tensors are damaged"
            if base is None or base in result:
                break
            result[base], current = why, chain[base]
    return result


def _is_undamaged(run: ObjectStore, manifest: Manifest) -> bool:
    """Read all files of an anchor as its readers do, one after another, and compare its tensors,
    which `manifest` lacks.
    """
    try:
        anchor = read_manifest(run, manifest.policy, manifest.version)
        check_growth(_folder(anchor), anchor.tensors, 0)
        for file in anchor.files:
            _check_file(run.sub(_folder(anchor)), file, anchor.tensors)
    except CorruptError as error:
        log.warning(
            "%s; version %d of %s needs the versions before it until a good copy is put back",
            error,
            manifest.version,
            manifest.policy,
        )
        return False
    return True


def _check_file(folder: ObjectStore, file: FileInfo, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CorruptError unless a file is undamaged and has those of the tensors that name it."""
    # All names of an entry list it alike (`_check_whole_tensors`): it is digested once.
    listed = {info.entry or name: info for name, info in tensors.items() if info.file == file.name}
    if not listed:
        read_twice(lambda: tensor_set.read_file(folder, file))
        return
    entries = delta_store.fetch(folder, file)
    for entry, info in listed.items():
        found = entries.get(entry)
        expected = (info.dtype, info.shape, info.digest)
        if found is None or (found.dtype, found.shape, digest(found)) != expected:
            raise CorruptError(f"{folder.url}/{file.name} has another tensor {quoted(entry)}")


def _folder(manifest: Manifest) -> str:
    return layout.weights(manifest.policy, manifest.version)


def contents(manifest: Manifest) -> Contents:
    """Return what a manifest lists as a set of tensors and files."""
    return Contents(manifest.tensors, manifest.files)
