"""Version 0 of a run that continues another: it is a version of that run, and shares its objects.

    run A   weights/solver/00000040/…            ◀── read ──┐
            tags/run-{digest}.json {run: B}  keeps it       │ origin
    run B   weights/solver/00000000/manifest.json ──────────┘   config.json, tokenizer: copied

No tensor is copied, so a run that continues another costs its deltas alone. A tensor is stored
again only where it has no stored form: an adapter that is merged first; and where the version would
be read from more than `RUNS_MAX` runs.
"""

import time
from dataclasses import replace

from storage import layout
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.formats import adapters, tensor_set
from storage.formats.safetensors import is_finite
from storage.formats.tensor_set import Contents
from storage.plain_names import new_write_id, quoted
from storage.records.weights import Manifest, Origin, StoredAdapter
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.weights import manifests, publisher, reader, tags
from storage.weights.manifests import RUNS_MAX, LoadedWeights

LATEST = "latest"
"""The word for the newest version when the run is created."""


def find(store: ObjectStore, run_id: str, policy: str, word: str) -> Origin:
    """Return the version of a run that a number, a tag or `latest` names.

    Its manifests are read, and whether its files exist is checked; they are not read.

    Raises:
        ConfigError: there is no such run, policy, tag or version, or its data cannot be read.
    """
    run = runs.open_run(store, run_id)
    newest = manifests.latest(run, policy)
    if newest is None:
        policies = ", ".join(run.folders(layout.WEIGHTS)) or "none"
        raise ConfigError(
            f"run {run_id} has no weights of a policy {policy!r}; its policies with weights: "
            f"{policies}"
        )
    version = newest if word == LATEST else tags.resolve(run, policy, word)
    where = f"version {version} of {policy} of run {run_id}"
    try:
        _check_readable(run, policy, version)
        manifest = manifests.read_manifest(run, policy, version)
    except NotFoundError as error:
        if not manifests.exists(run, policy, version):
            raise ConfigError(f"there is no {where}; its newest is {newest}") from error
        raise ConfigError(
            f"{where} cannot be used: {error}; name a version that has its data, "
            f"`astraflow weights {run_id} {policy}` lists the versions"
        ) from error
    except CorruptError as error:
        raise ConfigError(
            f"{where} cannot be used: {error}; put the object back, or name another version"
        ) from error
    return Origin(run=run_id, policy=policy, version=version, digest=manifest.digest)


def share(
    run: ObjectStore, policy: str, origin: Origin, adapter: StoredAdapter | None = None
) -> Manifest:
    """Publish version 0 of a policy as the version `origin`, and keep that for this run.

    Everything that the version is read from is read, and verified, before.

    Args:
        adapter: the form of the adapters that the new run publishes. An adapter of the origin that
            has it remains an adapter; any other is merged.

    Raises:
        ConflictError: the policy has a version 0.
        ConfigError: the origin's data cannot be read or was retired, is not what it was when this
            run was created, or has values that are not finite.
    """
    source = runs.sibling(run, origin.run)
    where = f"{origin.policy}@{origin.version} of run {origin.run}, with which {policy} begins,"
    try:
        loaded = reader.read(source, origin.policy, origin.version)
        files = reader.fetch_files(source, origin.policy, 0)
    except (CorruptError, NotFoundError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if loaded.manifest.digest != origin.digest:
        raise ConfigError(
            f"{where} has the digest {loaded.manifest.digest}, and had {origin.digest} when this "
            "run was created; start a new run"
        )
    merges = loaded.manifest.adapter not in (None, adapter)
    if bad := [name for name, tensor in loaded.tensors.items() if not is_finite(tensor)]:
        raise ConfigError(
            f"{where} has values that are not finite in {quoted(bad[0])}; begin with an earlier one"
        )
    num_runs = len(list(manifests.chains(source, origin.policy, origin.version)))
    if merges or num_runs >= RUNS_MAX:
        tensors = loaded.tensors
        if merges:
            tensors = adapters.merged(loaded.manifest.adapter, tensors).tensors
        kept = None if merges else loaded.manifest.adapter
        return publisher.publish(
            run, policy, 0, tensors, extra_files=files, adapter=kept, origin=origin
        )
    tags.keep_for(source, origin.policy, origin.version, runs.run_id(run))
    return _publish(run, policy, origin, loaded, files)


def _publish(
    run: ObjectStore,
    policy: str,
    origin: Origin,
    loaded: LoadedWeights,
    files: dict[str, bytes],
) -> Manifest:
    folder, write_id = run.sub(layout.weights(policy, 0)), new_write_id()
    stored = tensor_set.write_extra_files(folder, files, write_id)
    tensors = {
        name: replace(info, file="", entry="", source="")
        for name, info in loaded.manifest.tensors.items()
    }
    manifest = Manifest(
        policy=policy,
        version=0,
        parent=None,
        batch=None,
        kind="anchor",
        base=None,
        digest=origin.digest,
        tensors=tensors,
        files=stored,
        adapter=loaded.manifest.adapter,
        origin=origin,
        created_s=time.time(),
        write_id=write_id,
    )
    tensor_set.commit(folder, Contents(tensors, stored), manifest)
    return manifest


def _check_readable(run: ObjectStore, policy: str, version: int) -> None:
    """Raise NotFoundError where the version does not exist or was retired, CorruptError where a
    file that it is read from is missing.
    """
    for source, chain in manifests.chains(run, policy, version):
        manifest = chain[-1]
        while (start := manifests.read_from(manifest, source.exists)) != manifest.version:
            if start is None:
                raise _missing(source, manifest)
            manifest = manifests.read_manifest(source, manifest.policy, start)


def _missing(source: ObjectStore, manifest: Manifest) -> NotFoundError | CorruptError:
    """Return the error of a version that has lost a file."""
    if manifests.is_retired(source, manifest):
        return NotFoundError(f"the data of version {manifest.version} was deleted by gc")
    folder = layout.weights(manifest.policy, manifest.version)
    lost = next(file.name for file in manifest.files if not source.exists(f"{folder}/{file.name}"))
    return CorruptError(f"{source.url}/{folder}/{lost} is missing")
