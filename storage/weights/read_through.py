"""Reading of a run's weights from a region's mirror, and from home where the mirror lacks them.

A mirror is a cache that need not be trusted: manifests are read from home, a mirror that falls
behind is not used, and an object that is read a second time, because its digest was wrong, is read
from home.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from storage import layout
from storage.errors import AstraFlowError, NotFoundError
from storage.formats.tensor_set import MANIFEST
from storage.store.backend import Backend, Keys
from storage.store.object_store import ObjectStore

log = logging.getLogger(__name__)

READS_KEPT_MAX = 10_000
"""Reads from the mirror that are kept in memory, to detect repeated ones."""
UNREACHABLE_S = 30.0
"""Time for which a mirror that failed is not used."""
LAG_MAX_S = 10.0
"""Time for which a mirror may be behind before its missing versions are read from home."""


@dataclass(kw_only=True)
class ReadThrough:
    """A `Backend` that reads weights from a mirror where it can, and does all else at home."""

    near: Backend
    home: Backend
    near_path: Callable[[str], str]
    lag_max_s: float = LAG_MAX_S
    clock: Callable[[], float] = time.monotonic
    unreachable_s: float = UNREACHABLE_S
    _behind: dict[str, tuple[str, float]] = field(default_factory=dict)
    """policy → key of the first manifest that home has and the mirror lacks, and the time since
    which the mirror is behind.
    """
    _unreachable_until_s: float = -math.inf
    _reads: set[tuple[str, int]] = field(default_factory=set)
    """Keys and first bytes of reads from the mirror. A repeated read means a wrong digest."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, key: str) -> bytes:
        return self._read(key, 0, lambda backend, path: backend.read(path))

    def read_part(self, key: str, start: int, end: int) -> bytes:
        return self._read(key, start, lambda backend, path: backend.read_part(path, start, end))

    def _read(self, key: str, start: int, read: Callable[[Backend, str], bytes]) -> bytes:
        """Read from the mirror; manifests and repeated reads from home."""
        with self._lock:
            use_mirror = not key.endswith(f"/{MANIFEST}") and (key, start) not in self._reads
            if len(self._reads) >= READS_KEPT_MAX:
                self._reads.clear()  # a read is repeated at once
            self._reads.add((key, start))
        if use_mirror and not self._is_unreachable():
            try:
                return read(self.near, self.near_path(key))
            except NotFoundError:
                pass
            except AstraFlowError as error:
                self._set_unreachable(key, error)
        return read(self.home, key)

    def exists(self, key: str) -> bool:
        """Return whether home has the object; of a manifest, whether the mirror has it, too.

        The mirror is left out while it is unreachable, or once it is behind for `lag_max_s`.
        """
        if not key.endswith(f"/{MANIFEST}"):
            return self.home.exists(key)
        policy = key.split("/")[-3]
        at_home = self.home.exists(key)
        if self._is_unreachable():
            return at_home
        try:
            if not at_home:
                self._forget_if_caught_up(policy)
                return False
            return (
                self.near.exists(self.near_path(key))
                or self._behind_s(policy, key) >= self.lag_max_s
            )
        except AstraFlowError as error:
            self._set_unreachable(key, error)
            return at_home

    def _behind_s(self, policy: str, key: str) -> float:
        """Seconds for which the mirror, which lacks `key`, has been behind.

        A mirror that lacks nothing but the newest version at every poll is not behind.
        """
        with self._lock:
            behind = self._behind.get(policy)
        if behind is None or self.near.exists(self.near_path(behind[0])):
            lacks_more = behind is not None and self.home.exists(_next_manifest(key))
            behind = key, behind[1] if behind and lacks_more else self.clock()
            with self._lock:
                self._behind[policy] = behind
        return self.clock() - behind[1]

    def _forget_if_caught_up(self, policy: str) -> None:
        with self._lock:
            behind = self._behind.get(policy)
        if behind and self.near.exists(self.near_path(behind[0])):
            with self._lock:
                self._behind.pop(policy, None)

    def _is_unreachable(self) -> bool:
        with self._lock:
            return self.clock() < self._unreachable_until_s

    def _set_unreachable(self, key: str, error: AstraFlowError) -> None:
        """Use home alone for a while: each call to a failing mirror may cost a timeout."""
        log.warning(
            "the mirror fails, %s and what follows is read from home for %.0f s: %s",
            key,
            self.unreachable_s,
            error,
        )
        with self._lock:
            self._unreachable_until_s = self.clock() + self.unreachable_s

    def create(self, key: str, body: bytes) -> bool:
        return self.home.create(key, body)

    def write(self, key: str, body: bytes) -> None:
        self.home.write(key, body)

    def list(self, prefix: str, start_after: str) -> Keys:
        return self.home.list(prefix, start_after)

    def folders(self, prefix: str) -> Keys:
        return self.home.folders(prefix)

    def delete(self, key: str) -> None:
        self.home.delete(key)


def _next_manifest(key: str) -> str:
    """The key of the manifest of the version after that of `key`."""
    policy, version = key.split("/")[-3:-1]
    run = key.removesuffix(layout.manifest(layout.weights(policy, int(version))))
    return run + layout.manifest(layout.weights(policy, int(version) + 1))


def read_through_mirror(home: ObjectStore, mirror: ObjectStore) -> ObjectStore:
    """Return `home` with a backend that reads weights from `mirror`. Both are of one run.

    The weights of another run, from which this one continues, are read from the mirror's folder of
    that run.
    """
    here, there = layout.store_prefix(home.prefix), layout.store_prefix(mirror.prefix)
    backend = ReadThrough(
        near=mirror.backend,
        home=home.backend,
        near_path=lambda key: there + key.removeprefix(here),
    )
    return replace(home, backend=backend)
