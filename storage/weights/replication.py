"""Regional mirrors: a region's own copy of every version's weights, so that each crosses the ocean
once, however many workers there are.

    home ──1. what changed, the manifest──▶ mirror ──▶ workers of the region; what it lacks or has wrong ──▶ home
         ──2. whole tensors of anchors ───▶

A mirror holds the same keys as home. It shows an anchor as soon as it has what those need who hold
the version before; the anchor's whole tensors, which cross for a minute where the model is large,
follow file by file while nothing newer is there. How one reads from it is `near_first.py`'s
knowledge. Knows nothing of services.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import closing
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
from storage.records.weights import FileInfo, Manifest
from storage.run.runs import read_stop
from storage.store.object_store import ObjectStore, open_store
from storage.store.ordered_map import ordered_map
from storage.weights import manifests
from storage.weights.compaction import Merging
from storage.weights.delta_store import TRANSFERS_MAX

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
"""Pause between two looks for a next version."""
MIRROR_PATIENCE_S = 5.0
"""A call on a failing mirror gives up after this time; the service pauses then, and can be stopped.
"""


def of_run(home: ObjectStore, url: str) -> ObjectStore:
    """The place of the run `home` in the mirror at `url`."""
    return open_store(url).sub(home.prefix.rstrip("/"))


def early_stop_reason(home: ObjectStore) -> str:
    """Why the run ended without being completed; empty otherwise.

    The mirror of a completed run still copies the last versions.
    """
    stop = read_stop(home)
    return f"the run is {stop.state}: {stop.reason}" if stop and stop.state != "completed" else ""


class Copied(NamedTuple):
    """A version that a mirror shows now."""

    num_bytes: int
    """That crossed."""
    left: tuple[FileInfo, ...]
    """An anchor's whole tensors, which are still to cross."""


def replicate(
    lifetime: Lifetime, mirror: ObjectStore, policies: Iterable[str], last: int | None = None
) -> None:
    """Copy every version as it appears, until the service must stop or the mirror is complete.

    A store that is away is waited for; damage at home is reported and tried again. Changes are
    merged in the mirror.

    Args:
        lifetime: its store is home; it is over for `early_stop_reason`.
        last: the mirror is complete when version `last` of every policy is there, with all before
        it.

    Raises:
        ConfigError: the mirror cannot be used from the start. One that was used, and whose bucket
            or keys were lost then, is waited for.
    """
    home, heartbeat = lifetime.run, lifetime.heartbeat
    mirror = replace(mirror, patience_s=min(mirror.patience_s, MIRROR_PATIENCE_S))
    copies = [_Copy(home, mirror, policy) for policy in policies]
    crossed: Counter[str] = Counter()
    pause_s, failures, answered = 0.0, 0, False
    with closing(Merging(mirror)) as merging:
        while not lifetime.wait(pause_s):
            failed = copied = False
            for copy in copies:
                try:
                    with heartbeat.span("mirror"):
                        num_bytes = copy.go_on()
                    answered = True
                except (TransientError, CorruptError, NotFoundError, ConfigError) as error:
                    if isinstance(error, ConfigError) and not answered:
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
                crossed[copy.policy] += num_bytes
                heartbeat.update(
                    state=ServiceState.WORKING,
                    note="",
                    progress=MirrorProgress(mirrored_bytes=dict(crossed)),
                    versions={copy.policy: copy.newest},
                )
                merging.after(copy.policy, copy.newest)
            missing = [copy.policy for copy in copies if copy.newest < 0]
            if missing and not failed:
                note = f"waits for the base model of {', '.join(missing)}"
                reason = WaitReason.BASE_MODEL
                heartbeat.update(state=ServiceState.WAITING, wait_reason=reason, note=note)
            if last is not None and all(copy.newest >= last and not copy.left for copy in copies):
                return
            failures = failures + 1 if failed else 0
            pause_s = 0.0 if copied else max(POLL_INTERVAL_S, backoff_s(failures))


def _wait_reason(error: AstraFlowError) -> WaitReason:
    damaged = isinstance(error, (CorruptError, NotFoundError))
    return WaitReason.DAMAGED_OBJECT if damaged else WaitReason.STORE


class _Copy:
    """One policy's, as far as it has come."""

    def __init__(self, home: ObjectStore, mirror: ObjectStore, policy: str) -> None:
        self._home, self._mirror, self.policy = home, mirror, policy
        self.newest = -1
        self.left: deque[tuple[int, FileInfo]] = deque()
        """Whole tensors of anchors that the mirror shows, and their versions."""

    def go_on(self) -> int | None:
        """Copy the next version, else one more file that is left; the bytes that crossed, None when
        there is nothing to do.
        """
        if self.newest < 0:
            self._begin()
        if (
            copied := copy_version(self._home, self._mirror, self.policy, self.newest + 1)
        ) is not None:
            self.newest += 1
            self.left += ((self.newest, file) for file in copied.left)
            return copied.num_bytes
        if not self.left:
            return None
        version, file = self.left[0]
        try:
            num_bytes = copy_files(self._home, self._mirror, self.policy, version, [file])
        except (
            NotFoundError
        ) as error:  # nor does home have it: whoever needs it hears of that there
            log.warning("an anchor of %s is not mirrored as a whole: %s", self.policy, error)
            num_bytes = 0
        self.left.popleft()
        return num_bytes

    def _begin(self) -> None:
        """From what stands in the mirror, of whose newest anchor files may be missing. Home tells
        which that is: a mirror may be damaged.
        """
        _refuse_another_run(self._home, self._mirror, self.policy)
        version = manifests.latest(self._mirror, self.policy)
        if version is None:
            return
        try:
            anchor = manifests.nearest_anchor(self._home, self.policy, version)
            self.left += ((anchor.version, file) for file in _left(anchor))
        except (CorruptError, NotFoundError) as error:
            log.warning("no anchor of %s is completed in the mirror: %s", self.policy, error)
        self.newest = version


def copy_version(
    home: ObjectStore, mirror: ObjectStore, policy: str, version: int
) -> Copied | None:
    """Copy what the mirror lacks of a version, or None while there is no such version.

    What comes from the version before first, or an anchor that does not tell that; then the
    manifest, so that a mirror never shows a version without a way to it. Bytes go as they are:
    whoever reads them checks them.
    """
    key = layout.manifest(layout.weights(policy, version))
    try:
        body = home.get(key)
    except NotFoundError:
        return None
    manifest = manifests.parse_manifest(body, policy, version)
    num_bytes = copy_files(
        home, mirror, policy, version, manifest.step.files if manifest.step else manifest.files
    )
    try:
        mirror.create(key, body)
    except ConflictError:
        log.info("another mirror of %s was faster with version %d", policy, version)
    return Copied(num_bytes + len(body), _left(manifest))


def copy_files(
    home: ObjectStore, mirror: ObjectStore, policy: str, version: int, files: Sequence[FileInfo]
) -> int:
    """Copy files of a version, many at once, those that the mirror has and those that were retired
    left out; the bytes that crossed.
    """

    def copy(file: FileInfo) -> int:
        key = f"{layout.weights(policy, version)}/{file.name}"
        if mirror.exists(key):  # from a copy that was cut off; the name holds its writer's id
            return 0
        try:
            mirror.put(key, home.get(key, file.num_bytes))
        except NotFoundError:
            if home.exists(layout.retired(policy, version)):
                return 0
            raise
        return file.num_bytes

    budget = manifests.MEMORY_BYTES
    return sum(
        ordered_map(
            copy, files, threads=TRANSFERS_MAX, budget=budget, cost=lambda file: file.num_bytes
        )
    )


def _left(manifest: Manifest) -> tuple[FileInfo, ...]:
    return manifest.files if manifest.step else ()


def _refuse_another_run(home: ObjectStore, mirror: ObjectStore, policy: str) -> None:
    """ConfigError when the mirror's version 0 is not home's: a run of this name was mirrored there
    before.
    """
    key = layout.manifest(layout.weights(policy, 0))
    if mirror.exists(key) and home.exists(key) and mirror.get(key) != home.get(key):
        raise ConfigError(
            f"{mirror.url} mirrors another run of this name; empty it, or name another mirror"
        )
