"""What a trainer needs to go on where it was: tensors (fp32 masters, optimizer) and a JSON state
(RNGs, step).

Steps with a checkpoint are not contiguous, so the newest is found by listing. A listing that lags
costs repeated work, never correctness: an older checkpoint leads through the same batches.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from storage import layout
from storage.errors import UNREADABLE, CorruptError, NotFoundError
from storage.formats import tensor_set
from storage.formats.json_objects import unseal
from storage.formats.tensor_set import MANIFEST, Contents
from storage.plain_names import PartName, new_write_id
from storage.records.numbers import Number
from storage.records.types import Json
from storage.records.weights import FileInfo, HostTensor, TensorInfo
from storage.store.object_store import ObjectStore, read_twice

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """What `checkpoints/{policy}/{step}/manifest.json` says; the last object written of a
    checkpoint.
    """

    policy: PartName
    step: int
    state: Json
    tensors: Mapping[str, TensorInfo]
    files: tuple[FileInfo, ...]
    created_s: Number = 0.0
    write_id: str = ""


def save(
    run: ObjectStore, policy: str, step: int, tensors: Mapping[str, HostTensor], state: Json
) -> None:
    """Store the checkpoint of `step`, data before manifest; ConflictError when another trainer
    saved that step.
    """
    folder = run.sub(layout.checkpoint(policy, step))
    write_id = new_write_id()
    contents = tensor_set.write(folder, tensors, {}, write_id)
    manifest = CheckpointManifest(
        policy=policy,
        step=step,
        state=state,
        tensors=contents.tensors,
        files=contents.files,
        created_s=time.time(),
        write_id=write_id,
    )
    tensor_set.finish(folder, contents, manifest)


class Checkpoint(NamedTuple):
    """Everything of one step."""

    step: int
    tensors: dict[str, HostTensor]
    state: Json


def newest(run: ObjectStore, policy: str) -> Checkpoint | None:
    """The newest checkpoint that can be read; None when there is none. CorruptError when there are
    some, all damaged.
    """
    damage: CorruptError | None = None
    for step in reversed(steps(run, policy)):
        try:
            return Checkpoint(step, *load(run, policy, step))
        except CorruptError as error:
            log.warning(
                "the checkpoint of step %d of %s is damaged, an older one is looked for: %s",
                step,
                policy,
                error,
            )
            damage = damage or error
    if damage:
        raise damage
    return None


def load(run: ObjectStore, policy: str, step: int) -> tuple[dict[str, HostTensor], Json]:
    """Tensors (every digest verified) and state; NotFoundError when the step has no checkpoint."""
    manifest = read_manifest(run, policy, step)
    folder = run.sub(layout.checkpoint(policy, step))
    return tensor_set.read_tensors(
        folder, Contents(manifest.tensors, manifest.files)
    ), manifest.state


def read_manifest(run: ObjectStore, policy: str, step: int) -> CheckpointManifest:
    """NotFoundError when the step has no checkpoint; CorruptError when its manifest is damaged, or
    another's.
    """
    key = layout.manifest(layout.checkpoint(policy, step))
    manifest = read_twice(lambda: unseal(CheckpointManifest, run.get(key), key))
    if (manifest.policy, manifest.step) != (policy, step):
        raise CorruptError(f"{key} is the checkpoint of {manifest.policy} step {manifest.step}")
    return manifest


def prune(run: ObjectStore, policy: str, keep: int) -> None:
    """Keep the newest `keep` checkpoints that are whole: one whose manifest cannot be read, or
    which lacks a file, counts for none. Older ones, and what killed writers left below them, go,
    manifests first; nothing does while fewer are whole.
    """
    whole = (step for step in reversed(steps(run, policy)) if _is_whole(run, policy, step))
    kept = list(islice(whole, keep))
    if len(kept) < keep:
        return
    keys = [(key, key.rpartition("/")[0]) for key in _keys(run, policy)]
    spell = partial(layout.checkpoint, policy)
    older = {
        spell(step)
        for step in layout.numbers({folder for _, folder in keys}, spell)
        if step < kept[-1]
    }
    for key in sorted(
        (key for key, folder in keys if folder in older),
        key=lambda key: not key.endswith(f"/{MANIFEST}"),
    ):
        run.delete(key)


def _is_whole(run: ObjectStore, policy: str, step: int) -> bool:
    """Whether the manifest can be read and every file that it lists is there. What these hold is
    not read.
    """
    try:
        manifest = read_manifest(run, policy, step)
    except (*UNREADABLE, NotFoundError):
        return False
    return all(
        run.exists(f"{layout.checkpoint(policy, step)}/{file.name}") for file in manifest.files
    )


def steps(run: ObjectStore, policy: str) -> list[int]:
    """Steps with a checkpoint, ascending."""
    return layout.numbers(
        _keys(run, policy), lambda step: layout.manifest(layout.checkpoint(policy, step))
    )


def _keys(run: ObjectStore, policy: str) -> list[str]:
    return run.list(f"{layout.CHECKPOINTS}/{policy}")
