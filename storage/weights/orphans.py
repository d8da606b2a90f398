"""Orphans: files of a run that killed writers left, which no reader reads and nothing else deletes.

    unfinished   temporary files of a local folder, by their age
    orphans      data files of weights and checkpoints that no object in their folder names

Backends do not report the age of an object, so an orphan's age is inferred from the objects in its
folder.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from storage import layout
from storage.errors import CorruptError, NotFoundError
from storage.formats import json_values
from storage.formats.json_objects import parse, unseal
from storage.formats.tensor_set import MANIFEST
from storage.records.numbers import Number
from storage.run import runs
from storage.store.local import LocalFiles
from storage.store.object_store import ObjectStore
from storage.weights.manifests import MERGED_SPAN

READ_THREADS = 16
AGE_S = 86400.0
"""No writer writes to one folder for so long."""
NEWEST = 2 * MERGED_SPAN
"""How many of the newest versions may still get merged deltas."""
_DATA = re.compile(r"([0-9a-f]{32})\..+")
"""Names of data files: the write id of their writer, then a name."""


def unfinished(run: ObjectStore, now_s: float) -> dict[str, int]:
    """Return temporary files of the run that are older than `AGE_S` at Unix time `now_s`: the
    store's path → bytes.
    """
    backend = run.backend
    return backend.unfinished(run.prefix, now_s - AGE_S) if isinstance(backend, LocalFiles) else {}


def remove_unfinished(run: ObjectStore, paths: Iterable[str]) -> None:
    """Delete the files that `unfinished` returned."""
    for path in paths:
        run.backend.delete(path)


def orphans(run: ObjectStore, policy: str, now_s: float) -> list[str]:
    """Return keys of data files of the policy's weights and checkpoints that no object in their
    folder names, nor ever will.

    A manifest is created once: a folder that has one gets no other, and a writer that was second
    deletes its own files. Only merged deltas are added to a version afterwards, while it is among
    the newest. So no process writes to a folder whose manifest is older than `AGE_S` and has
    `NEWEST` versions after it. In the newest folders, and where there is no manifest, a writer may
    be active while the run goes on; its files are orphans when the run has been over for `AGE_S`.
    """
    keys = [
        key for kind in (layout.WEIGHTS, layout.CHECKPOINTS) for key in run.list(f"{kind}/{policy}")
    ]
    # The stop is read after the listing: a run that is resumed deletes it first and writes then.
    stop = runs.read_stop(run)
    is_over = stop is not None and now_s - stop.at_s > AGE_S
    versions = layout.numbers(
        keys, lambda version: layout.manifest(layout.weights(policy, version))
    )
    busy = set() if is_over else {layout.weights(policy, version) for version in versions[-NEWEST:]}
    folders: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        folder, _, name = key.rpartition("/")
        if folder not in busy and layout.is_data_folder(folder, policy):
            folders[folder].append(name)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        unnamed = pool.map(partial(_unnamed, run, now_s, is_over), folders.keys(), folders.values())
        return [
            key
            for of_folder in unnamed
            for key in of_folder
            if not _has_lost_manifest(key, policy, versions)
        ]


def _has_lost_manifest(key: str, policy: str, versions: Sequence[int]) -> bool:
    """Whether the file belongs to a version that was published, since later ones exist, and whose
    manifest is missing: a person may put it back.
    """
    version = layout.version_of(key.rpartition("/")[0], policy)
    return version is not None and version < max(versions, default=0) and version not in versions


@dataclass(frozen=True)
class _Dated:
    """The field that every manifest has."""

    created_s: Number = 0.0


def _unnamed(
    run: ObjectStore, now_s: float, is_over: bool, folder: str, names: Sequence[str]
) -> list[str]:
    """Keys of the data files of a folder that no object in it names."""
    writers = {name: match[1] for name in names if (match := _DATA.fullmatch(name))}
    if MANIFEST not in names:
        return [f"{folder}/{name}" for name in writers if is_over]
    if len(set(writers.values())) < 2:
        return []  # all are of the manifest's writer
    manifest_key = layout.manifest(folder)
    try:
        if now_s - unseal(_Dated, run.get(manifest_key), manifest_key).created_s < AGE_S:
            return []
        bodies = {name: run.get(f"{folder}/{name}") for name in names if name not in writers}
        named: set[str] = set()
        for name in [name for name in bodies if name.endswith(".json")]:
            key, body = f"{folder}/{name}", bodies.pop(name)
            unseal(_Dated, body, key)
            strings = set(json_values.strings(parse(body, key)))  # JSON may escape any character
            named |= strings
            if name == MANIFEST and strings.isdisjoint(writers):
                return []  # it may be another than the one published, whose files these are
    except (NotFoundError, CorruptError):
        return []  # it is being deleted, or the files it lists are not known
    return [
        f"{folder}/{name}"
        for name in writers
        if name not in named and not any(name.encode() in body for body in bodies.values())
    ]
