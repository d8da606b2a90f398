"""Versions of a policy's weights: published once each, verified on every read. Knows nothing of training or engines.

    anchor 0 ──delta 1──▶ 1 ──delta 2──▶ 2 …  anchor 20 ──delta 21──▶ …

An anchor holds every tensor; a delta what turns its base, the version before, into it. Who holds a version already needs only
the deltas since; everybody else starts from the nearest anchor. The digests of the result prove every chain, bit for bit.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from storage import delta_files, layout, tensor_folders
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.json_objects import new_write_id, unseal
from storage.objects import ObjectStore
from storage.probing import first_absent
from storage.records import HostTensor, Manifest
from storage.second_reads import read_twice
from storage.tensor_folders import Contents
from storage.tensors import digest, weights_digest

log = logging.getLogger(__name__)

DELTA_SHARE_MAX = 0.5
"""A delta larger than this share of the tensors' bytes is not worth its chain."""
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
    compact: bool = False,
    metrics: Mapping[str, float] = _NOTHING,
    extra_files: Mapping[str, bytes] = _NO_FILES,
) -> Manifest:
    """Make `version` real: data files first, the manifest last. ConflictError when the version exists.

    A delta to `base`, which must be the version before; an anchor without one, and where the delta would not be smaller than
    DELTA_SHARE_MAX of the tensors. `compact` spends CPU time on fewer bytes. `extra_files` (version 0 only by convention) are
    the model's other files: `config.json`, tokenizer, … A publication that is cut off leaves files nobody lists; publishing
    again is safe. ConfigError for no tensors at all.
    """
    if not tensors:
        raise ConfigError(f"version {version} of {policy} would have no tensors; publish those of its model")
    if exists(run, policy, version):
        raise ConflictError(f"version {version} of {policy} is published already")
    folder = run.sub(layout.weights(policy, version))
    write_id = new_write_id()
    contents = None
    if base is not None and not extra_files:
        if (base.manifest.policy, base.manifest.version) != (policy, version - 1):
            raise ValueError(f"version {version} of {policy} is no step from {base.manifest.policy} {base.manifest.version}")
        contents = _delta(folder, base, tensors, write_id, compact)
    kind: Literal["anchor", "delta"] = "anchor" if contents is None else "delta"
    contents = contents or tensor_folders.write(folder, tensors, extra_files, write_id)
    manifest = Manifest(
        policy=policy,
        version=version,
        parent=version - 1 if version else None,
        batch=version or None,
        kind=kind,
        base=version - 1 if kind == "delta" else None,
        digest=weights_digest(contents.tensors),
        tensors=contents.tensors,
        files=contents.files,
        metrics=dict(metrics),
        created_s=time.time(),
        write_id=write_id,
    )
    tensor_folders.finish(folder, contents, manifest)
    return manifest


def read_manifest(run: ObjectStore, policy: str, version: int) -> Manifest:
    """NotFoundError while there is no such version; CorruptError when its manifest contradicts its place or itself."""
    key = layout.manifest(layout.weights(policy, version))
    manifest = read_twice(lambda: unseal(Manifest, run.get(key), key))
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


def fetch(run: ObjectStore, policy: str, version: int) -> dict[str, HostTensor]:
    """All tensors of a version. Every file and tensor is verified; CorruptError when a second fetch fails too."""
    return dict(read(run, policy, version).tensors)


def read(run: ObjectStore, policy: str, version: int, held: Held | None = None) -> Held:
    """A version, by the deltas since `held` or from the nearest anchor; unchanged tensors are shared with `held`.

    Every file and every resulting tensor is verified. What does not come out right from `held` is read once more, from an
    anchor. CorruptError names the version that cannot be read, and the chain it lies on; NotFoundError when data of the chain
    was retired.
    """
    if held is not None and held.manifest.version < version:
        try:
            return _follow(run, _chain(run, policy, version, held), held)
        except (CorruptError, NotFoundError) as error:
            log.warning("%s; version %d of %s is read from an anchor", error, version, policy)
    chain = _chain(run, policy, version, None)
    try:
        return read_twice(lambda: _follow(run, chain, None))
    except CorruptError as error:
        for link in chain:
            if is_gone(run, link):
                needed = "" if link.version == version else f", which version {version} needs,"
                raise NotFoundError(f"the data of version {link.version} of {policy}{needed} was retired on purpose") from error
        raise


def is_gone(run: ObjectStore, manifest: Manifest) -> bool:
    """Whether data of the version was let go on purpose. A retirement that was cut off may have left all of it."""
    folder = layout.weights(manifest.policy, manifest.version)
    if not run.exists(layout.retired(manifest.policy, manifest.version)):
        return False
    return not all(run.exists(f"{folder}/{file.name}") for file in manifest.files)


def fetch_files(run: ObjectStore, policy: str, version: int = 0) -> dict[str, bytes]:
    """The model's other files by their own names, verified: `config.json`, `tokenizer.json`, …"""
    manifest = read_manifest(run, policy, version)
    return tensor_folders.read_files(run.sub(layout.weights(policy, version)), _contents(manifest))


def _delta(folder: ObjectStore, base: Held, tensors: Mapping[str, HostTensor], write_id: str, compact: bool) -> Contents | None:
    """The stored files of a delta; None where an anchor is better."""
    return delta_files.write(
        folder,
        base.tensors,
        base.manifest.tensors,
        tensors,
        write_id,
        bytes_max=DELTA_SHARE_MAX * sum(tensor.bits.nbytes for tensor in tensors.values()),
        compact=compact,
        threads=os.cpu_count() or 1,
    )


def _chain(run: ObjectStore, policy: str, version: int, held: Held | None) -> list[Manifest]:
    """The manifests from the version after `held`, or from an anchor, up to `version`."""
    chain = [read_manifest(run, policy, version)]
    while chain[0].kind == "delta" and not (held and held.manifest.version == chain[0].base):
        base = chain[0].base
        if base is None or base >= chain[0].version:
            raise CorruptError(f"version {chain[0].version} of {policy} is a delta to version {base}, which is not before it")
        try:
            chain.insert(0, read_manifest(run, policy, base))
        except NotFoundError:
            links = " ← ".join(str(manifest.version) for manifest in reversed(chain))
            raise CorruptError(
                f"version {version} of {policy} cannot be read: the chain {links} starts from version {base}, which does not "
                f"exist any more; put {layout.weights(policy, base)} back"
            ) from None
    return chain


def _follow(run: ObjectStore, chain: Sequence[Manifest], held: Held | None) -> Held:
    tensors = dict(held.tensors) if held else {}
    for manifest in chain:
        folder = run.sub(layout.weights(manifest.policy, manifest.version))
        if manifest.kind == "anchor":
            tensors = tensor_folders.read_tensors(folder, _contents(manifest))
        else:
            tensors = delta_files.read(folder, _contents(manifest), tensors, threads=os.cpu_count() or 1)
    _check(chain[-1], tensors, held)
    return Held(chain[-1], tensors)


def _check(manifest: Manifest, tensors: Mapping[str, HostTensor], held: Held | None) -> None:
    """CorruptError unless every tensor has the digest that the manifest lists; those of `held` were checked before."""
    known = {id(tensor): held.manifest.tensors[name].digest for name, tensor in held.tensors.items()} if held else {}
    for name, info in manifest.tensors.items():
        if (known.get(id(tensors[name])) or digest(tensors[name])) != info.digest:
            where = layout.weights(manifest.policy, manifest.version)
            raise CorruptError(f"{where}: the deltas do not give the tensor {name} that its manifest lists")


def _contents(manifest: Manifest) -> Contents:
    return Contents(manifest.tensors, manifest.files)
