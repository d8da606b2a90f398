"""What killed writers left of a run: files that no reader ever sees and that nothing else removes.

    unfinished   temporary files of a local folder, by their age
    orphans      data files of weights and checkpoints that nothing beside them names

Backends tell no object's age, so that of an orphan is judged by what it lies beside.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats.json_objects import unseal
from storage.formats.tensor_set import MANIFEST
from storage.records.numbers import Number
from storage.run import runs
from storage.store.local import LocalFiles
from storage.store.object_store import ObjectStore
from storage.weights.manifests import MERGED_SPAN

READ_THREADS = 16
AGE_S = 86400.0
"""No writer is at work on one folder for so long."""
NEWEST = 2 * MERGED_SPAN
"""Versions to which something may still be added."""
_DATA = re.compile(r"([0-9a-f]{32})\..+")
"""Names of data files: the write id of their writer, then what they are."""


def unfinished(run: ObjectStore, now_s: float) -> dict[str, int]:
    """The store's path → bytes of temporary files below the run that are older than `AGE_S` at Unix
    time `now_s`.
    """
    backend = run.backend
    return backend.unfinished(run.prefix, now_s - AGE_S) if isinstance(backend, LocalFiles) else {}


def remove_unfinished(run: ObjectStore, paths: Iterable[str]) -> None:
    """Delete what `unfinished` found."""
    for path in paths:
        run.backend.delete(path)


def orphans(run: ObjectStore, policy: str, now_s: float) -> list[str]:
    """Keys of data files of the policy's weights and checkpoints that no object beside them names,
    nor ever will.

    A manifest is created once: beside one that stands, no rival's ever will, and a rival in flight
    deletes its own files. What is added to a version afterwards, merged changes, follows while it
    is among the newest: so nothing is under way beside a manifest that is older than `AGE_S` and
    has `NEWEST` versions after it. Beside the newest ones, and where no manifest stands, a writer
    may be at work while the run goes on; what it left are orphans when the run has been over for
    `AGE_S`.
    """
    keys = [
        key
        for place in (layout.WEIGHTS, layout.CHECKPOINTS)
        for key in run.list(f"{place}/{policy}")
    ]
    # The end is looked at after the listing: whoever takes the run up again lifts it first, and
    # writes after that.
    stop = runs.read_stop(run)
    is_over = stop is not None and now_s - stop.at_s > AGE_S
    versions = layout.numbers(
        keys, lambda version: layout.manifest(layout.weights(policy, version))
    )
    busy = set() if is_over else {layout.weights(policy, version) for version in versions[-NEWEST:]}
    folders: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        folder, _, name = key.rpartition("/")
        if folder not in busy:
            folders[folder].append(name)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        found = pool.map(partial(_unnamed, run, now_s, is_over), folders.keys(), folders.values())
        return [
            key
            for keys in found
            for key in keys
            if not _has_lost_its_manifest(key, policy, versions)
        ]


def _has_lost_its_manifest(key: str, policy: str, versions: Sequence[int]) -> bool:
    """Whether the file belongs to a version that others came after, which therefore was published,
    and whose manifest is missing: somebody may put it back.
    """
    version = layout.version_of(key.rpartition("/")[0], policy)
    return version is not None and version < max(versions, default=0) and version not in versions


@dataclass(frozen=True)
class _Dated:
    """What every manifest says."""

    created_s: Number = 0.0


def _unnamed(
    run: ObjectStore, now_s: float, is_over: bool, folder: str, names: Sequence[str]
) -> list[str]:
    writers = {name: found[1] for name in names if (found := _DATA.fullmatch(name))}
    if MANIFEST not in names:
        return [f"{folder}/{name}" for name in writers if is_over]
    if len(set(writers.values())) < 2:
        return []  # all are of the one who wrote the manifest
    manifest_key = layout.manifest(folder)
    try:
        if now_s - unseal(_Dated, run.get(manifest_key), manifest_key).created_s < AGE_S:
            return []
        bodies = {name: run.get(f"{folder}/{name}") for name in names if name not in writers}
        for name, body in bodies.items():
            if name.endswith(".json"):
                unseal(_Dated, body, f"{folder}/{name}")
    except (NotFoundError, CorruptError):
        return []  # it is being pruned, or does not tell what it lists
    return [
        f"{folder}/{name}"
        for name in writers
        if not any(name.encode() in body for body in bodies.values())
    ]
