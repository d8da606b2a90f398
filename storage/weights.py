"""Versions of a policy's weights: published once each, verified on every read. Knows nothing of training or engines."""

import time
from collections.abc import Mapping
from types import MappingProxyType

from storage import layout, tensor_folders
from storage.errors import ConfigError, ConflictError, CorruptError
from storage.json_objects import new_write_id, unseal
from storage.objects import ObjectStore
from storage.probing import first_absent
from storage.records import HostTensor, Manifest
from storage.second_reads import read_twice
from storage.tensor_folders import Contents
from storage.tensors import weights_digest

_NOTHING: Mapping[str, float] = MappingProxyType({})
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})


def publish(
    run: ObjectStore,
    policy: str,
    version: int,
    tensors: Mapping[str, HostTensor],
    *,
    metrics: Mapping[str, float] = _NOTHING,
    extra_files: Mapping[str, bytes] = _NO_FILES,
) -> Manifest:
    """Make `version` real, as an anchor: data files first, the manifest last. ConflictError when the version exists.

    `extra_files` (version 0 only by convention) are the model's other files: `config.json`, tokenizer, … A publication
    that is cut off leaves files nobody lists; publishing again is safe. ConfigError for no tensors at all.
    """
    if not tensors:
        raise ConfigError(f"version {version} of {policy} would have no tensors; publish those of its model")
    if exists(run, policy, version):
        raise ConflictError(f"version {version} of {policy} is published already")
    folder = run.sub(layout.weights(policy, version))
    write_id = new_write_id()
    contents = tensor_folders.write(folder, tensors, extra_files, write_id)
    manifest = Manifest(
        policy=policy,
        version=version,
        parent=version - 1 if version else None,
        batch=version or None,
        kind="anchor",
        base=None,
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
    manifest = read_manifest(run, policy, version)
    if manifest.kind != "anchor":
        raise CorruptError(f"version {version} of {policy} is a {manifest.kind}, which this release cannot apply")
    return tensor_folders.read_tensors(run.sub(layout.weights(policy, version)), _contents(manifest))


def fetch_files(run: ObjectStore, policy: str, version: int = 0) -> dict[str, bytes]:
    """The model's other files by their own names, verified: `config.json`, `tokenizer.json`, …"""
    manifest = read_manifest(run, policy, version)
    return tensor_folders.read_files(run.sub(layout.weights(policy, version)), _contents(manifest))


def _contents(manifest: Manifest) -> Contents:
    return Contents(manifest.tensors, manifest.files)
