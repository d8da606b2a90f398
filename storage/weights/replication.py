"""Replication: regional mirrors, so that each version's weights cross the ocean once, however many
workers a region has.

    home ──1. deltas, the manifest────▶ mirror ──▶ workers of the region
         ──2. whole tensors of anchors ▶        what the mirror lacks or has wrong is read from home

A mirror holds the same keys as home. It shows an anchor as soon as it has the anchor's delta, which
is all that readers of the version before need. The anchor's whole tensors, which take a minute
for a large model, follow file by file while there is no newer version. `read_through` reads from a
mirror.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import NamedTuple

from storage import layout
from storage.coordination.lifetime import Lifetime, backoff_s
from storage.errors import (
    AstraFlowError,
    ConfigError,
    ConflictError,
    CorruptError,
    NotFoundError,
    TransientError,
)
from storage.records.control import ServiceState, WaitReason
from storage.records.progress import MirrorProgress
from storage.records.weights import FileInfo, Manifest, Origin
from storage.run import runs
from storage.run.runs import read_stop
from storage.store.object_store import ObjectStore, open_store, read_twice
from storage.store.ordered_map import ordered_map
from storage.weights import manifests
from storage.weights.compaction import BackgroundMerger
from storage.weights.delta_store import TRANSFERS_MAX

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
"""Pause between two polls for a next version."""
MIRROR_PATIENCE_S = 5.0
"""A call on a failing mirror gives up after this time, so that the service can be stopped."""


def of_run(home: ObjectStore, url: str) -> ObjectStore:
    """Return the store of the run `home` in the mirror at `url`."""
    return open_store(url).sub(home.prefix.rstrip("/"))


def refuse_home(home: ObjectStore, mirror: ObjectStore) -> None:
    """Raise ConfigError for another run's home, into which no mirror may write.

    A copy of the whole run may become its mirror: it has the same `run.json`.
    """
    if _is_home_of_another(mirror, home):
        raise ConfigError(
            f"{mirror.address} has a {layout.RUN}: it is the home of a run and no mirror; name "
            "another place in rollout.regions.REGION.mirror"
        )


def _is_home_of_another(there: ObjectStore, run: ObjectStore) -> bool:
    return there.exists(layout.RUN) and there.get(layout.RUN) != run.get(layout.RUN)


def early_stop_reason(home: ObjectStore) -> str:
    """Return why the run ended without being completed; empty otherwise.

    A completed run is none of these: its mirror still copies the last versions.
    """
    stop = read_stop(home)
    return f"the run is {stop.state}: {stop.reason}" if stop and stop.state != "completed" else ""


class CopiedVersion(NamedTuple):
    """A version that a mirror shows now."""

    num_bytes: int
    """Bytes that were copied."""
    pending: tuple[FileInfo, ...]
    """Files with an anchor's whole tensors, which are still to be copied."""


def replicate(
    lifetime: Lifetime, mirror: ObjectStore, policies: Iterable[str], last: int | None = None
) -> None:
    """Copy every version as it appears, until the service must stop or the mirror is complete.

    Calls on a store that does not answer are retried; so is the copy of a newest version that is
    damaged at home, which is reported. Merged deltas are made in the mirror.

    Args:
        lifetime: its store is home; it is over for `early_stop_reason`.
        last: the mirror is complete with version `last` of every policy and all before it.

    Raises:
        ConfigError: the mirror cannot be used from the start. Later, such an error is retried.
    """
    home, heartbeat = lifetime.run, lifetime.heartbeat
    mirror = replace(mirror, patience_s=min(mirror.patience_s, MIRROR_PATIENCE_S))
    copies = [_PolicyCopy(home, mirror, policy) for policy in policies]
    copied_bytes: Counter[str] = Counter()
    pause_s, failures, was_usable = 0.0, 0, False
    with closing(BackgroundMerger(mirror)) as merger:
        while not lifetime.wait(pause_s):
            failed = copied = False
            for copy in copies:
                try:
                    with heartbeat.span("mirror"):
                        if not was_usable:
                            refuse_home(home, mirror)
                        num_bytes = copy.copy_next()
                    was_usable = True
                except (TransientError, CorruptError, NotFoundError, ConfigError) as error:
                    if isinstance(error, ConfigError) and not was_usable:
                        raise
                    failed = True
                    note = f"{copy.policy} is not mirrored: {error}"
                    reason = _wait_reason(error)
                    heartbeat.update(state=ServiceState.WAITING, wait_reason=reason, note=note)
                    log.warning("%s", note)
                    continue
                if num_bytes is None:
                    continue
                copied = True
                copied_bytes[copy.policy] += num_bytes
                heartbeat.update(
                    state=ServiceState.WORKING,
                    note=copy.note,
                    progress=MirrorProgress(mirrored_bytes=dict(copied_bytes)),
                    versions={copy.policy: copy.newest},
                )
                merger.merge_up_to(copy.policy, copy.newest)
            missing = [copy.policy for copy in copies if copy.newest < 0]
            if missing and not failed:
                note = f"waits for the base model of {', '.join(missing)}"
                reason = WaitReason.BASE_MODEL
                heartbeat.update(state=ServiceState.WAITING, wait_reason=reason, note=note)
            if last is not None and all(
                copy.newest >= last and not copy.pending for copy in copies
            ):
                return
            # A copy ends the backoff, so that a policy that fails delays the others for less time.
            failures = failures + 1 if failed and not copied else 0
            pause_s = 0.0 if copied else max(POLL_INTERVAL_S, backoff_s(failures))


def _wait_reason(error: AstraFlowError) -> WaitReason:
    damaged = isinstance(error, (CorruptError, NotFoundError))
    return WaitReason.DAMAGED_OBJECT if damaged else WaitReason.STORE


class _PolicyCopy:
    """The copy of one policy's weights, as far as it has come."""

    def __init__(self, home: ObjectStore, mirror: ObjectStore, policy: str) -> None:
        self._home, self._mirror, self.policy = home, mirror, policy
        self.newest = -1
        """The newest version that the mirror shows; −1 before it was read."""
        self.note = ""
        """Why the data of version `newest` was not copied; empty where it was."""
        self.pending: deque[tuple[int, FileInfo]] = deque()
        """Versions, and files with whole tensors of anchors that the mirror shows."""

    def copy_next(self) -> int | None:
        """Copy the next version, else one pending file.

        Returns:
            The bytes that were copied; None when there is nothing to copy.
        """
        if self.newest < 0:
            self._resume()
        if (num_bytes := self._copy_version(self.newest + 1)) is not None:
            return num_bytes
        if not self.pending:
            return self._copy_after_missing()
        version, file = self.pending[0]
        try:
            num_bytes = copy_files(self._home, self._mirror, self.policy, version, [file])
        except NotFoundError as error:  # home lacks it too, where readers get the same error
            log.warning("an anchor of %s is not mirrored as a whole: %s", self.policy, error)
            num_bytes = 0
        self.pending.popleft()
        return num_bytes

    def _copy_version(self, version: int) -> int | None:
        """Copy a version; of one that is damaged at home, only its manifest, once there is a later
        version: readers, which read manifests from home, get the same error with and without a
        mirror.
        """
        note = ""
        try:
            copied = copy_version(self._home, self._mirror, self.policy, version)
        except (CorruptError, NotFoundError) as error:
            later = (version + 1, version + 2)  # one of them may be lost
            if not version or not any(manifests.exists(self._home, self.policy, v) for v in later):
                raise
            note = f"version {version} of {self.policy} is mirrored without its data: {error}"
            log.warning("%s", note)
            body = b""
            with suppress(CorruptError):  # raised for a link or a folder in its place
                body = self._home.get(layout.manifest(layout.weights(self.policy, version)))
            _show(self._mirror, self.policy, version, body)
            copied = CopiedVersion(len(body), ())
        if copied is None:
            return None
        self.newest, self.note = version, note
        self.pending += ((version, file) for file in copied.pending)
        return copied.num_bytes

    def _copy_after_missing(self) -> int | None:
        """Copy the version after the next one, where home has lost the manifest of that."""
        missing = self.newest + 1
        if self.newest < 0 or not manifests.exists(self._home, self.policy, missing + 1):
            return None
        if (num_bytes := self._copy_version(missing)) is not None:  # published meanwhile
            return num_bytes
        log.warning("version %d of %s is missing and is not mirrored", missing, self.policy)
        return self._copy_version(missing + 1)

    def _resume(self) -> None:
        """Go on from the versions in the mirror, whose newest anchor may lack files.

        Manifests are read from home, because a mirror may be damaged.
        """
        _check_same_run(self._home, self._mirror, self.policy)
        version = manifests.latest(self._mirror, self.policy)
        if version is None:
            return
        try:
            anchor = manifests.nearest_anchor(self._home, self.policy, version)
            self.pending += ((anchor.version, file) for file in _whole_tensor_files(anchor))
        except (CorruptError, NotFoundError) as error:
            log.warning("no anchor of %s is completed in the mirror: %s", self.policy, error)
        self.newest = version


def copy_version(
    home: ObjectStore, mirror: ObjectStore, policy: str, version: int
) -> CopiedVersion | None:
    """Copy what the mirror lacks of a version; None while home has no such version.

    First the files of the delta, or of an anchor without one, then the manifest, so that a mirror
    never shows a version that cannot be read. Before a shared version 0, the files that lead
    to its origin are copied, into the mirror's folder of the origin's run. Bytes are copied
    unverified: their readers verify them.
    """
    key = layout.manifest(layout.weights(policy, version))

    def read() -> tuple[bytes, Manifest]:
        body = home.get(key)
        return body, manifests.parse_manifest(body, policy, version)

    try:
        body, manifest = read_twice(read)
    except NotFoundError:
        return None
    num_bytes = copy_files(
        home, mirror, policy, version, manifest.step.files if manifest.step else manifest.files
    )
    if (origin := manifest.shared) is not None:
        num_bytes += _copy_origin(home, mirror, origin)
    _show(mirror, policy, version, body)
    return CopiedVersion(num_bytes + len(body), _whole_tensor_files(manifest))


def _show(mirror: ObjectStore, policy: str, version: int, body: bytes) -> None:
    """Store a version's manifest in the mirror."""
    try:
        mirror.create(layout.manifest(layout.weights(policy, version)), body)
    except ConflictError:
        log.info("another service mirrored version %d of %s first", version, policy)


def _copy_origin(home: ObjectStore, mirror: ObjectStore, origin: Origin) -> int:
    """Copy the files from which the origin is read; return the bytes that were copied.

    Nothing is copied into another run's home, which may have the origin's name in that store.
    """
    source, num_bytes = runs.sibling(home, origin.run), 0
    for run, chain in manifests.chains(source, origin.policy, origin.version):
        there = runs.sibling(mirror, runs.run_id(run))
        if not _is_home_of_another(there, run):
            num_bytes += sum(
                copy_files(run, there, each.policy, each.version, each.files) for each in chain
            )
    return num_bytes


def copy_files(
    home: ObjectStore, mirror: ObjectStore, policy: str, version: int, files: Sequence[FileInfo]
) -> int:
    """Copy files of a version, many at once, and return the bytes that were copied.

    Files that the mirror has, and files of a retired version, are left out.
    """

    def copy(file: FileInfo) -> int:
        key = f"{layout.weights(policy, version)}/{file.name}"
        if mirror.exists(key):  # from an interrupted copy; the name holds its writer's id
            return 0
        try:
            mirror.put(key, home.get(key, file.num_bytes))
        except NotFoundError:
            if home.exists(layout.retired(policy, version)):
                return 0
            raise
        return file.num_bytes

    budget = manifests.MEMORY_BYTES
    with ordered_map(
        copy, files, threads=TRANSFERS_MAX, budget=budget, cost=lambda file: file.num_bytes
    ) as copied:
        return sum(copied)


def _whole_tensor_files(manifest: Manifest) -> tuple[FileInfo, ...]:
    """The files of an anchor that carries its delta: they are copied after the manifest."""
    return manifest.files if manifest.step else ()


def _check_same_run(home: ObjectStore, mirror: ObjectStore, policy: str) -> None:
    """Raise ConfigError when the mirror has another version 0 than home, of another run.

    A damaged manifest tells nothing: that of the mirror is not read by others, and for that of
    home, CorruptError is raised.
    """
    if not (manifests.exists(mirror, policy, 0) and manifests.exists(home, policy, 0)):
        return
    at_home = manifests.read_manifest(home, policy, 0)
    try:
        mirrored = manifests.read_manifest(mirror, policy, 0)
    except CorruptError as error:
        log.warning("version 0 of %s is damaged in the mirror, which goes on: %s", policy, error)
        return
    if (mirrored.write_id, mirrored.digest) != (at_home.write_id, at_home.digest):
        raise ConfigError(
            f"{mirror.url} mirrors another run of this name; empty it, or name another mirror"
        )
