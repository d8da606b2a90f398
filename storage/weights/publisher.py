"""Publication of a version: its data files first, its manifest last, created once."""

import time
from collections.abc import Mapping
from types import MappingProxyType

from storage import layout
from storage.errors import ConfigError, ConflictError
from storage.formats import adapters, tensor_set
from storage.formats.safetensors import weights_digest
from storage.formats.tensor_set import Contents
from storage.plain_names import new_write_id
from storage.records.weights import HostTensor, Manifest, Origin, StoredAdapter, StoredDelta
from storage.store.object_store import ObjectStore
from storage.weights import delta_store
from storage.weights.delta_store import WrittenDelta
from storage.weights.manifests import MEMORY_BYTES, LoadedWeights, exists

DELTA_SHARE_MAX = 0.5
"""A delta with more than this share of the tensors' bytes is stored as an anchor instead."""
_NO_METRICS: Mapping[str, float] = MappingProxyType({})
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})


def publish(
    run: ObjectStore,
    policy: str,
    version: int,
    tensors: Mapping[str, HostTensor],
    *,
    base: LoadedWeights | None = None,
    anchor: bool = False,
    memory_bytes: int = MEMORY_BYTES,
    metrics: Mapping[str, float] = _NO_METRICS,
    extra_files: Mapping[str, bytes] = _NO_FILES,
    adapter: StoredAdapter | None = None,
    origin: Origin | None = None,
) -> Manifest:
    """Store a version and return its manifest: data files first, the manifest last.

    Stored is a delta to `base`, or an anchor: without `base`, with `anchor` or `extra_files`, and
    where the delta would have more than DELTA_SHARE_MAX of the tensors' bytes. An anchor carries
    the delta, too, unless it is that large. An interrupted publication leaves files that no
    manifest lists; publishing again is safe.

    Args:
        base: the version before.
        metrics: for the manifest, which gets `weights/…` of the publication besides.
        extra_files: the model's other files, such as `config.json` and the tokenizer; by convention
            of version 0 only.
        adapter: what those of `tensors` are that belong to an adapter.
        origin: the version of another run that version 0 was made from.

    Raises:
        ConflictError: the version exists.
        ConfigError: there are no tensors, or those of `adapter` do not fit it.
    """
    if not tensors:
        raise ConfigError(
            f"version {version} of {policy} would have no tensors; publish those of its model"
        )
    if adapter and (reason := adapters.fault(adapter, tensors)):
        raise ConfigError(
            f"version {version} of {policy} would name an adapter of rank {adapter.rank}, but "
            f"{reason}; correct the train engine, or set train.adapter.publish: merged"
        )
    if exists(run, policy, version):
        raise ConflictError(f"version {version} of {policy} is published already")
    if base is not None and (base.manifest.policy, base.manifest.version) != (policy, version - 1):
        raise ValueError(
            f"version {version} of {policy} is no step from {base.manifest.policy} "
            f"{base.manifest.version}"
        )
    folder = run.sub(layout.weights(policy, version))
    write_id = new_write_id()
    start_s = time.monotonic()
    delta = _write_delta(folder, base, tensors, write_id, memory_bytes) if base else None
    is_anchor = delta is None or anchor or bool(extra_files)
    whole = Contents({}, ())
    if is_anchor:
        whole = tensor_set.write(folder, tensors, extra_files, write_id, memory_bytes=memory_bytes)
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
        step=StoredDelta(version - 1, delta.contents.tensors, delta.contents.files)
        if delta and is_anchor
        else None,
        adapter=adapter,
        origin=origin,
        metrics={**metrics, **_metrics(tensors, delta, time.monotonic() - start_s)},
        created_s=time.time(),
        write_id=write_id,
    )
    stored = whole.files + (delta.contents.files if delta else ())
    tensor_set.commit(folder, Contents(listed.tensors, stored), manifest)
    return manifest


def _write_delta(
    folder: ObjectStore,
    base: LoadedWeights,
    tensors: Mapping[str, HostTensor],
    write_id: str,
    memory_bytes: int,
) -> WrittenDelta | None:
    """Store the delta to `base`; None where an anchor is better."""
    return delta_store.write(
        folder,
        base.tensors,
        base.manifest.tensors,
        tensors,
        write_id,
        bytes_max=DELTA_SHARE_MAX * sum(tensor.bits.nbytes for tensor in tensors.values()),
        memory_bytes=memory_bytes,
    )


def _metrics(
    tensors: Mapping[str, HostTensor], delta: WrittenDelta | None, seconds: float
) -> dict[str, float]:
    """Metrics of the publication, which took `seconds`."""
    if delta is None:
        return {"weights/encode_s": 0.0, "weights/upload_s": seconds}
    size = sum(tensor.bits.size for tensor in tensors.values())
    return {
        "weights/encode_s": delta.encode_s,
        "weights/upload_s": seconds - delta.encode_s,
        "weights/changed": delta.num_changed / size if size else 0.0,
    }
