"""Versions of a policy's weights: published once each, verified on every read. Knows nothing of training or engines.

    anchor 0 ──delta 1──▶ 1 ──delta 2──▶ 2 …  anchor 20 ──delta 21──▶ …

An anchor holds every tensor, and also how it comes from the version before; a delta only that. Who holds a version already
needs only the changes since; everybody else starts from the nearest anchor. The digests of the result prove every way, bit
for bit.
"""

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from storage import delta_files, layout, tensor_folders, ways
from storage.delta_files import Written
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.json_objects import new_write_id, unseal
from storage.objects import ObjectStore
from storage.probing import first_absent
from storage.records import HostTensor, Manifest, Merged, Step
from storage.second_reads import read_twice
from storage.tensor_folders import Contents
from storage.tensors import weights_digest
from storage.ways import Leg

log = logging.getLogger(__name__)

DELTA_SHARE_MAX = 0.5
"""A delta larger than this share of the tensors' bytes is not worth its chain."""
MEMORY_BYTES = 2**30
"""What publishing or reading a version takes of memory beside the versions themselves."""
MERGED_SPAN = 8
"""Merged changes lead over so many versions, from one multiple of it to the next."""
LOOK_BACK_MAX = 64
"""Who is further behind starts from an anchor."""
READ_THREADS = 16
"""Manifests that are read at once."""
_looking = ThreadPoolExecutor(12, thread_name_prefix="look")
"""Workers look for new versions several times a second: starting threads for each look would cost more than the look."""
_NOTHING: Mapping[str, float] = MappingProxyType({})
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})


class Held(NamedTuple):
    """A version in host memory, with what its manifest says of it."""

    manifest: Manifest
    tensors: Mapping[str, HostTensor]


def publish(
    run: ObjectStore,
    policy: str,
    version: int,
    tensors: Mapping[str, HostTensor],
    *,
    base: Held | None = None,
    anchor: bool = False,
    memory_bytes: int = MEMORY_BYTES,
    metrics: Mapping[str, float] = _NOTHING,
    extra_files: Mapping[str, bytes] = _NO_FILES,
) -> Manifest:
    """Make `version` real: data files first, the manifest last. ConflictError when the version exists.

    A delta to `base`, which must be the version before. An anchor without one, where one is asked for, and where the delta
    would not be smaller than DELTA_SHARE_MAX of the tensors; where there is a `base`, the anchor carries the delta as well.
    `extra_files` (version 0 only by convention) are the model's other files: `config.json`, tokenizer, … The manifest's
    `metrics` get `weights/…` of the publication itself. A publication that is cut off leaves files nobody lists; publishing
    again is safe. ConfigError for no tensors at all.
    """
    if not tensors:
        raise ConfigError(f"version {version} of {policy} would have no tensors; publish those of its model")
    if exists(run, policy, version):
        raise ConflictError(f"version {version} of {policy} is published already")
    if base is not None and (base.manifest.policy, base.manifest.version) != (policy, version - 1):
        raise ValueError(f"version {version} of {policy} is no step from {base.manifest.policy} {base.manifest.version}")
    folder = run.sub(layout.weights(policy, version))
    write_id = new_write_id()
    start_s = time.monotonic()
    delta = _delta(folder, base, tensors, write_id, memory_bytes) if base else None
    is_anchor = delta is None or anchor or bool(extra_files)
    whole = Contents({}, ())
    if is_anchor:
        whole = tensor_folders.write(folder, tensors, extra_files, write_id, memory_bytes=memory_bytes)
    listed = whole if delta is None or is_anchor else delta.contents
    manifest = Manifest(
        policy=policy,
        version=version,
        parent=version - 1 if version else None,
        batch=version or None,
        kind="anchor" if is_anchor else "delta",
        base=None if is_anchor else version - 1,
        digest=weights_digest(listed.tensors),
        tensors=listed.tensors,
        files=listed.files,
        step=Step(version - 1, delta.contents.tensors, delta.contents.files) if delta and is_anchor else None,
        metrics={**metrics, **_told(tensors, delta, time.monotonic() - start_s)},
        created_s=time.time(),
        write_id=write_id,
    )
    stored = whole.files + (delta.contents.files if delta else ())
    tensor_folders.finish(folder, Contents(listed.tensors, stored), manifest)
    return manifest


def read_manifest(run: ObjectStore, policy: str, version: int) -> Manifest:
    """NotFoundError while there is no such version; CorruptError when its manifest contradicts its place or itself."""
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
    """The newest version, searched upwards from `start`, a version known to exist; None when `start` does not."""
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


def fetch(run: ObjectStore, policy: str, version: int) -> dict[str, HostTensor]:
    """All tensors of a version. Every file and tensor is verified; CorruptError when a second fetch fails too."""
    return dict(read(run, policy, version).tensors)


def read(
    run: ObjectStore,
    policy: str,
    version: int,
    held: Held | None = None,
    *,
    known: Manifest | None = None,
    spare: Held | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> Held:
    """A version, by the cheapest way from `held`, else from the nearest anchor; unchanged tensors are shared with `held`.

    Every file and every resulting tensor is verified. What does not come out right from `held` is read once more, from an
    anchor. `known` is the version's manifest, where that was read already. The memory of `spare`, a version that nobody uses
    any more, is written over: fresh memory costs more than all else. CorruptError names the version that cannot be read, and
    the chain it lies on; NotFoundError when data of the chain was retired. Beside the versions it takes about `memory_bytes`.
    """
    if held is not None and held.manifest.version <= version <= held.manifest.version + LOOK_BACK_MAX:
        try:
            return _from_held(run, policy, version, held, known, spare, memory_bytes)
        except (CorruptError, NotFoundError) as error:
            log.warning("%s; version %d of %s is read from an anchor", error, version, policy)
    return _from_anchor(run, policy, version, memory_bytes)


def go(
    run: ObjectStore,
    manifest: Manifest,
    way: Sequence[Leg],
    held: Held | None,
    memory_bytes: int = MEMORY_BYTES,
    spare: Held | None = None,
) -> Held:
    """The version of `manifest`, by just this way; CorruptError when it does not lead there."""
    tensors, digested = ways.follow(run, way, held.tensors if held else {}, memory_bytes, spare.tensors if spare else {})
    known = {id(tensor): held.manifest.tensors[name].digest for name, tensor in held.tensors.items()} if held else {}
    ways.check(manifest, tensors, digested, known)
    return Held(manifest, tensors)


def read_merged(run: ObjectStore, policy: str, version: int, base: int) -> Merged:
    """The merged changes from `base` to `version`. NotFoundError where there are none; CorruptError when damaged."""
    key = layout.merged(policy, version, base)
    merged = read_twice(lambda: unseal(Merged, run.get(key), key))
    if (merged.policy, merged.version, merged.step.base) != (policy, version, base):
        raise CorruptError(f"{key} leads from version {merged.step.base} to {merged.version} of {merged.policy}")
    return merged


def nearest_anchor(run: ObjectStore, policy: str, version: int) -> Manifest:
    """The manifest of the newest anchor up to `version`, which exists. CorruptError where the chain to it is broken."""
    return _back_to_anchor(run, policy, version, ())[0]


def is_gone(run: ObjectStore, manifest: Manifest) -> bool:
    """Whether data of the version was let go on purpose. A retirement that was cut off may have left all of it."""
    folder = layout.weights(manifest.policy, manifest.version)
    if not run.exists(layout.retired(manifest.policy, manifest.version)):
        return False
    files = manifest.files + (manifest.step.files if manifest.step else ())
    return not all(run.exists(f"{folder}/{file.name}") for file in files)


def fetch_files(run: ObjectStore, policy: str, version: int = 0) -> dict[str, bytes]:
    """The model's other files by their own names, verified: `config.json`, `tokenizer.json`, …"""
    manifest = read_manifest(run, policy, version)
    return tensor_folders.read_files(run.sub(layout.weights(policy, version)), _contents(manifest))


def _delta(
    folder: ObjectStore, base: Held, tensors: Mapping[str, HostTensor], write_id: str, memory_bytes: int
) -> Written | None:
    """A stored delta; None where an anchor is better."""
    return delta_files.write(
        folder,
        base.tensors,
        base.manifest.tensors,
        tensors,
        write_id,
        bytes_max=DELTA_SHARE_MAX * sum(tensor.bits.nbytes for tensor in tensors.values()),
        memory_bytes=memory_bytes,
    )


def _told(tensors: Mapping[str, HostTensor], delta: Written | None, seconds: float) -> dict[str, float]:
    """What a publication tells of itself."""
    if delta is None:
        return {"weights/encode_s": 0.0, "weights/upload_s": seconds}
    size = sum(tensor.bits.size for tensor in tensors.values())
    return {
        "weights/encode_s": delta.encode_s,
        "weights/upload_s": seconds - delta.encode_s,
        "weights/changed": delta.num_changed / size if size else 0.0,
    }


def _from_held(
    run: ObjectStore, policy: str, version: int, held: Held, known: Manifest | None, spare: Held | None, memory_bytes: int
) -> Held:
    """By the cheapest way, else by the cheapest without merged changes."""
    start = held.manifest.version
    if version == start:
        return held
    between = _manifests(run, policy, range(start + 1, version))
    chain = [found for found in between if isinstance(found, Manifest)] + [known or read_manifest(run, policy, version)]
    single = [leg for manifest in chain for leg in ways.legs(manifest)]
    merged = _merged_legs(run, policy, start, version)
    way, longer = (ways.cheapest(legs, start, version) for legs in (single + merged, single))
    if way is None:
        raise CorruptError(f"no unbroken chain leads from version {start} to version {version} of {policy}")
    try:
        return go(run, chain[-1], way, held, memory_bytes, spare)
    except CorruptError as error:
        if longer is None or longer == way:
            raise
        log.warning("%s; version %d of %s is read without merged changes", error, version, policy)
        return go(run, chain[-1], longer, held, memory_bytes)


def _from_anchor(run: ObjectStore, policy: str, version: int, memory_bytes: int) -> Held:
    """From the nearest anchor; where that one is damaged and carries its delta, from the one before."""
    damaged: set[int] = set()
    told: CorruptError | NotFoundError | None = None
    while True:
        try:
            chain = _back_to_anchor(run, policy, version, damaged)
            legs = [leg for manifest in chain for leg in ways.legs(manifest)]
            way = ways.cheapest([leg for leg in legs if leg.base is not None or leg.version not in damaged], None, version)
            if way is None:
                raise CorruptError(f"no unbroken chain leads from an anchor to version {version} of {policy}")
        except CorruptError as error:
            raise told or error from error
        try:
            return go(run, chain[-1], way, None, memory_bytes)
        except ways.DamagedLegError as error:
            told = told or _explained(run, chain, way, error)
            if error.leg.base is not None or chain[0].step is None:
                raise told from error
            damaged.add(error.leg.version)


def _explained(
    run: ObjectStore, chain: Sequence[Manifest], way: Sequence[Leg], error: CorruptError
) -> CorruptError | NotFoundError:
    """What a person is told of a way that does not lead to the version at its end."""
    policy, version = chain[-1].policy, chain[-1].version
    passed = {leg.version for leg in way}
    for link in chain:
        if link.version in passed and is_gone(run, link):
            needed = "" if link.version == version else f", which version {version} needs,"
            return NotFoundError(f"the data of version {link.version} of {policy}{needed} was retired on purpose")
    links = " ← ".join(str(leg.version) for leg in reversed(way))
    return CorruptError(
        f"version {version} of {policy} cannot be read, whose chain is {links}: {error}; "
        "put the object back as it was, or go on from the next anchor"
    )


def _merged_legs(run: ObjectStore, policy: str, start: int, version: int) -> list[Leg]:
    """The merged changes that stand between two versions."""
    spans = pairwise(range(-(-start // MERGED_SPAN) * MERGED_SPAN, version + 1, MERGED_SPAN))

    def read_leg(span: tuple[int, int]) -> list[Leg]:
        try:
            return [ways.merged_leg(read_merged(run, policy, span[1], span[0]))]
        except (NotFoundError, CorruptError):
            return []  # only a shorter way

    with ThreadPoolExecutor(READ_THREADS) as pool:
        return [leg for found in pool.map(read_leg, spans) for leg in found]


def _manifests(run: ObjectStore, policy: str, versions: Iterable[int]) -> list[Manifest | NotFoundError | CorruptError]:
    """Of each version its manifest, or why it cannot be read."""
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return list(pool.map(lambda version: _manifest(run, policy, version), versions))


def _manifest(run: ObjectStore, policy: str, version: int) -> Manifest | NotFoundError | CorruptError:
    try:
        return read_manifest(run, policy, version)
    except (NotFoundError, CorruptError) as error:
        return error


def _back_to_anchor(run: ObjectStore, policy: str, version: int, damaged: Collection[int]) -> list[Manifest]:
    """The manifests from the nearest anchor that is not `damaged` up to `version`."""
    chain = [read_manifest(run, policy, version)]
    while chain[0].kind == "delta" or chain[0].version in damaged:
        base = chain[0].base if chain[0].kind == "delta" else chain[0].version - 1
        if base is None or base != chain[0].version - 1 or base < 0:
            raise CorruptError(
                f"version {chain[0].version} of {policy} is a delta to version {base}, which is not the one before"
            )
        for found in reversed(_manifests(run, policy, range(max(0, base - READ_THREADS + 1), base + 1))):
            if isinstance(found, NotFoundError):
                links = " ← ".join(str(manifest.version) for manifest in reversed(chain))
                gone = chain[0].version - 1
                raise CorruptError(
                    f"version {version} of {policy} cannot be read: the chain {links} starts from version {gone}, which does "
                    f"not exist any more; put {layout.weights(policy, gone)} back"
                ) from found
            if isinstance(found, CorruptError):
                raise found
            chain.insert(0, found)
            if found.kind == "anchor" and found.version not in damaged:
                break
    return chain


def _contents(manifest: Manifest) -> Contents:
    return Contents(manifest.tensors, manifest.files)
