"""Base models, which runs share. Their key is a digest of the settings of the build."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from storage import layout, plain_names
from storage.errors import ConflictError, CorruptError
from storage.formats import tensor_set
from storage.formats.json_objects import unseal
from storage.formats.tensor_set import Contents
from storage.plain_names import new_write_id
from storage.records.numbers import Number
from storage.records.weights import FileInfos, HostTensor, TensorInfo
from storage.store.object_store import ObjectStore, read_twice


@dataclass(frozen=True, kw_only=True)
class ModelManifest:
    """The content of `models/{build digest}/manifest.json`."""

    build_digest: str
    tensors: Mapping[str, TensorInfo]
    files: FileInfos
    metrics: Mapping[str, Number] = field(default_factory=dict)
    """Measurements of the build, such as its accuracy."""
    created_s: Number = 0.0
    write_id: str = ""


def save_model(
    store: ObjectStore,
    build_digest: str,
    tensors: Mapping[str, HostTensor],
    files: Mapping[str, bytes],
    metrics: Mapping[str, float],
) -> None:
    """Store a model. If another builder has stored one of this digest, that model is kept."""
    folder = store.sub(layout.model_prefix(build_digest))
    write_id = new_write_id()
    contents = tensor_set.write(folder, tensors, files, write_id)
    manifest = ModelManifest(
        build_digest=build_digest,
        tensors=contents.tensors,
        files=contents.files,
        metrics=dict(metrics),
        created_s=time.time(),
        write_id=write_id,
    )
    with suppress(ConflictError):
        tensor_set.commit(folder, contents, manifest)


def has_model(store: ObjectStore, build_digest: str) -> bool:
    """Return whether a model of this digest is stored."""
    return store.exists(layout.manifest(layout.model_prefix(build_digest)))


def discard_model(store: ObjectStore, build_digest: str) -> None:
    """Delete the manifest of a damaged model, so that the model can be saved again.

    Its data files remain: they have the write id of their writer, and another run may read them.
    """
    store.delete(layout.manifest(layout.model_prefix(build_digest)))


def load_model(
    store: ObjectStore, build_digest: str
) -> tuple[dict[str, HostTensor], dict[str, bytes]]:
    """Read and verify the tensors and the extra files of a model; NotFoundError for none."""
    manifest = read_model_manifest(store, build_digest)
    folder = store.sub(layout.model_prefix(build_digest))
    contents = Contents(manifest.tensors, manifest.files)
    return tensor_set.read_tensors(folder, contents), tensor_set.read_extra_files(folder, contents)


def read_model_manifest(store: ObjectStore, build_digest: str) -> ModelManifest:
    """Read the manifest of a model; NotFoundError for none, CorruptError for that of another."""
    key = layout.manifest(layout.model_prefix(build_digest))
    manifest = read_twice(lambda: unseal(ModelManifest, store.get(key), key))
    if manifest.build_digest != build_digest:
        raise CorruptError(f"{key} is the manifest of {plain_names.quoted(manifest.build_digest)}")
    return manifest
