"""Checkpoints, from which a trainer resumes: tensors (fp32 masters, optimizer) and a JSON state.

Steps with a checkpoint are not contiguous, so the newest is found by listing. A stale listing costs
repeated work, never correctness: an older checkpoint leads through the same batches.
"""

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from storage import layout
from storage.errors import (
    UNREADABLE,
    ConflictError,
    CorruptError,
    NotFoundError,
    TransientError,
)
from storage.formats import tensor_set
from storage.formats.json_objects import seal, unseal
from storage.formats.tensor_set import MANIFEST, Contents
from storage.plain_names import PartName, RunIdOrNone, new_write_id, quoted
from storage.records.numbers import Number, Quantity
from storage.records.types import Json
from storage.records.weights import FileInfos, HostTensor, TensorInfo
from storage.run.runs import run_id
from storage.store.object_store import ObjectStore, read_twice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointState:
    """What a trainer stores beside its tensors.

    Example: `CheckpointState({"format": 1}, 120.0)`.
    """

    engine: Json
    """The train engine's part, which only the engine checks."""
    tokens_trained: Quantity
    """Sampled tokens trained on since version 0."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The content of `checkpoints/{policy}/{step}/manifest.json`, which is written last."""

    policy: PartName
    step: int
    state: CheckpointState
    tensors: Mapping[str, TensorInfo]
    files: FileInfos
    run: RunIdOrNone = ""
    """Run of which it is; empty in checkpoints of earlier releases."""
    created_s: Number = 0.0
    write_id: str = ""


def save(
    run: ObjectStore,
    policy: str,
    step: int,
    tensors: Mapping[str, HostTensor],
    state: CheckpointState,
) -> None:
    """Store a checkpoint, the manifest last; ConflictError when another trainer saved this step."""
    folder = run.sub(layout.checkpoint(policy, step))
    write_id = new_write_id()
    contents = tensor_set.write(folder, tensors, {}, write_id)
    manifest = CheckpointManifest(
        policy=policy,
        step=step,
        state=state,
        tensors=contents.tensors,
        files=contents.files,
        run=run_id(run),
        created_s=time.time(),
        write_id=write_id,
    )
    tensor_set.commit(folder, contents, manifest)


def copy_as_first(
    source: ObjectStore, source_policy: str, step: int, run: ObjectStore, policy: str
) -> None:
    """Store the checkpoint of a step of another run as that of step 0, from which a trainer starts.

    Nothing was trained in the new run yet, so its tokens are not counted. Files keep their names: a
    repeated or a concurrent copy writes the same bytes. A checkpoint of step 0 that exists is kept.

    Raises:
        NotFoundError: there is no such checkpoint.
        CorruptError: it is damaged.
    """
    manifest = read_manifest(source, source_policy, step)
    there = source.sub(layout.checkpoint(source_policy, step))
    here = run.sub(layout.checkpoint(policy, 0))
    for file in manifest.files:
        here.put(file.name, read_twice(partial(tensor_set.read_file, there, file)))
    copied = replace(
        manifest,
        policy=policy,
        step=0,
        run=run_id(run),
        state=replace(manifest.state, tokens_trained=0.0),
        created_s=time.time(),
    )
    with suppress(ConflictError):
        here.create(MANIFEST, seal(copied))


class Checkpoint(NamedTuple):
    """The checkpoint of one step."""

    step: int
    tensors: dict[str, HostTensor]
    state: CheckpointState
    damaged: frozenset[int] = frozenset()
    """Later steps, whose checkpoints are damaged."""


def newest(run: ObjectStore, policy: str) -> Checkpoint | None:
    """Read the newest complete and undamaged checkpoint; None without any.

    Raises:
        CorruptError: there are checkpoints, and all of them are damaged.
        TransientError: one was deleted meanwhile, by a trainer that saved newer ones.
    """
    first_error: CorruptError | None = None
    damaged: set[int] = set()
    for step in reversed(steps(run, policy)):
        try:
            return Checkpoint(step, *load(run, policy, step), frozenset(damaged))
        except (CorruptError, NotFoundError) as error:
            if isinstance(error, NotFoundError) or not exists(run, policy, step):
                raise TransientError(
                    f"the checkpoint of step {step} of {policy} was deleted while it was read: "
                    "another trainer has saved newer ones"
                ) from error
            log.warning(
                "the checkpoint of step %d of %s is damaged, an older one is tried: %s",
                step,
                policy,
                error,
            )
            damaged.add(step)
            first_error = first_error or error
    if first_error:
        raise CorruptError(
            f"no checkpoint of {policy} can be read: {first_error}; put the file back, or delete "
            f"{run.url}/{layout.CHECKPOINTS}/{policy}: the trainer then repeats every step from "
            "version 0"
        ) from first_error
    return None


def load(run: ObjectStore, policy: str, step: int) -> tuple[dict[str, HostTensor], CheckpointState]:
    """Read and verify the checkpoint of a step; NotFoundError for none."""
    manifest = read_manifest(run, policy, step)
    folder = run.sub(layout.checkpoint(policy, step))
    contents = Contents(manifest.tensors, manifest.files)
    return tensor_set.read_tensors(folder, contents), manifest.state


def read_manifest(run: ObjectStore, policy: str, step: int) -> CheckpointManifest:
    """Read the manifest of a step.

    Raises NotFoundError when it has no checkpoint, CorruptError when the manifest is damaged, lists
    no tensors, or belongs to another step or run.
    """
    key = layout.manifest(layout.checkpoint(policy, step))
    manifest = read_twice(lambda: unseal(CheckpointManifest, run.get(key), key))
    if (manifest.policy, manifest.step) != (policy, step):
        raise CorruptError(f"{key} is the checkpoint of {manifest.policy} step {manifest.step}")
    if manifest.run and manifest.run != run_id(run):
        raise CorruptError(f"{key} is a checkpoint of run {quoted(manifest.run)}")
    if not manifest.tensors:
        raise CorruptError(f"{key} lists no tensors")
    return manifest


def exists(run: ObjectStore, policy: str, step: int) -> bool:
    """Return whether a step has a checkpoint, which may be damaged."""
    return run.exists(layout.manifest(layout.checkpoint(policy, step)))


def delete(run: ObjectStore, policy: str, step: int) -> None:
    """Delete the checkpoint of a step, the manifest first."""
    _delete_keys(run, run.list(layout.checkpoint(policy, step)))


def prune(
    run: ObjectStore, policy: str, keep: int, newest_step: int, damaged: Collection[int] = ()
) -> None:
    """Delete all checkpoints that are older than the newest `keep` complete ones.

    Those after `newest_step`, which the trainer has just saved, are not counted: it has not written
    them. Nor are steps that are known to be `damaged`: nothing else reads the files again.

    Files that killed writers left in older folders are deleted too. Manifests are deleted first.
    Nothing is deleted while fewer than `keep` checkpoints are complete.
    """
    complete = (
        step
        for step in reversed(steps(run, policy))
        if step <= newest_step and step not in damaged and _is_complete(run, policy, step)
    )
    kept = list(islice(complete, keep))
    if len(kept) < keep:
        return
    folder_of = {key: key.rpartition("/")[0] for key in _keys(run, policy)}
    folder_of_step = partial(layout.checkpoint, policy)
    old_folders = {
        folder_of_step(step)
        for step in layout.numbers(set(folder_of.values()), folder_of_step)
        if step < kept[-1]
    }
    _delete_keys(run, [key for key, folder in folder_of.items() if folder in old_folders])


def _delete_keys(run: ObjectStore, keys: Iterable[str]) -> None:
    for key in sorted(keys, key=lambda key: not key.endswith(f"/{MANIFEST}")):
        run.delete(key)


def check_complete(run: ObjectStore, policy: str, step: int) -> None:
    """Check that the manifest can be read and that every file in it exists. Files are not read.

    Raises NotFoundError when the step has no checkpoint, CorruptError when it is incomplete.
    """
    folder = layout.checkpoint(policy, step)
    for file in read_manifest(run, policy, step).files:
        if not run.exists(f"{folder}/{file.name}"):
            read_manifest(run, policy, step)  # NotFoundError where it was deleted meanwhile
            raise CorruptError(
                f"{run.url}/{folder}/{file.name} is missing, though its manifest lists it"
            )


def check_undamaged(run: ObjectStore, policy: str, step: int) -> None:
    """Read every file of the checkpoint of a step, a few at a time, and compare what it contains
    with the digests.

    Raises NotFoundError when the step has no checkpoint, CorruptError for a damaged one.
    """
    manifest = read_manifest(run, policy, step)
    try:
        contents = Contents(manifest.tensors, manifest.files)
        tensor_set.check(run.sub(layout.checkpoint(policy, step)), contents)
    except CorruptError:
        if read_manifest(run, policy, step) == manifest:
            raise
        check_undamaged(run, policy, step)  # a trainer replaced it meanwhile


def _is_complete(run: ObjectStore, policy: str, step: int) -> bool:
    try:
        check_complete(run, policy, step)
    except (*UNREADABLE, NotFoundError):
        return False
    return True


def steps(run: ObjectStore, policy: str) -> list[int]:
    """List the steps that have a checkpoint, ascending."""
    return layout.numbers(
        _keys(run, policy), lambda step: layout.manifest(layout.checkpoint(policy, step))
    )


def _keys(run: ObjectStore, policy: str) -> list[str]:
    return run.list(f"{layout.CHECKPOINTS}/{policy}")
