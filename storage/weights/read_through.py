"""Reads a run's weights from a region's mirror where it can, and everything else, as all that a
mirror lacks or has wrong, from home.

A mirror is a cache that nobody has to trust: what versions there are and what they must be is read
at home, a mirror that falls behind is passed over, and an object that is read a second time,
because its digest was wrong, is read from home.
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

ASKED_MAX = 10_000
"""Reads that are remembered."""
AWAY_S = 30.0
"""So long a mirror that failed is not asked again."""
LAG_MAX_S = 10.0
"""How long a mirror may be behind before a worker goes home for what it lacks."""


@dataclass(kw_only=True)
class ReadThrough:
    """A `Backend` that reads from a mirror where it can. Everything else is home's."""

    near: Backend
    home: Backend
    near_path: Callable[[str], str]
    lag_max_s: float = LAG_MAX_S
    clock: Callable[[], float] = time.monotonic
    away_s: float = AWAY_S
    _behind: dict[str, tuple[str, float]] = field(default_factory=dict)
    """policy → the first version's manifest that home had and the mirror had not, and since when
    the mirror is behind.
    """
    _away_until_s: float = -math.inf
    _asked: set[tuple[str, int]] = field(default_factory=set)
    """What was read from the mirror before, and from which byte on: who reads it again found it
    wrong.
    """
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, key: str) -> bytes:
        return self._read(key, 0, lambda backend, path: backend.read(path))

    def read_part(self, key: str, start: int, end: int) -> bytes:
        return self._read(key, start, lambda backend, path: backend.read_part(path, start, end))

    def _read(self, key: str, start: int, read: Callable[[Backend, str], bytes]) -> bytes:
        """Manifests come from home: they say what the rest must be."""
        with self._lock:
            near_may_have_it = not key.endswith(f"/{MANIFEST}") and (key, start) not in self._asked
            if len(self._asked) >= ASKED_MAX:
                self._asked.clear()  # what is asked for again soon was asked for just now
            self._asked.add((key, start))
        if near_may_have_it and not self._is_away():
            try:
                return read(self.near, self.near_path(key))
            except NotFoundError:
                pass
            except AstraFlowError as error:
                self._pass_over(key, error)
        return read(self.home, key)

    def exists(self, key: str) -> bool:
        """Whether home has it. A version must stand in the mirror too, unless that is away, or has
        been behind for `lag_max_s`.
        """
        if not key.endswith(f"/{MANIFEST}"):
            return self.home.exists(key)
        policy = key.split("/")[-3]
        at_home = self.home.exists(key)
        if self._is_away():
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
            self._pass_over(key, error)
            return at_home

    def _behind_s(self, policy: str, key: str) -> float:
        """Since when the mirror is behind, which lacks `key`. One that only ever lacks the newest
        version is not.
        """
        with self._lock:
            behind = self._behind.get(policy)
        if behind is None or self.near.exists(self.near_path(behind[0])):
            goes_on = behind is not None and self.home.exists(_following(key))
            behind = key, behind[1] if behind and goes_on else self.clock()
            with self._lock:
                self._behind[policy] = behind
        return self.clock() - behind[1]

    def _forget_if_caught_up(self, policy: str) -> None:
        with self._lock:
            behind = self._behind.get(policy)
        if behind and self.near.exists(self.near_path(behind[0])):
            with self._lock:
                self._behind.pop(policy, None)

    def _is_away(self) -> bool:
        with self._lock:
            return self.clock() < self._away_until_s

    def _pass_over(self, key: str, error: AstraFlowError) -> None:
        """Home is asked for everything for a while: each call to a mirror that does not answer
        costs its timeout.
        """
        log.warning(
            "the mirror fails, home is asked for %s and what follows for %.0f s: %s",
            key,
            self.away_s,
            error,
        )
        with self._lock:
            self._away_until_s = self.clock() + self.away_s

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


def _following(key: str) -> str:
    """The key of the next version's manifest."""
    policy, version = key.split("/")[-3:-1]
    run = key.removesuffix(layout.manifest(layout.weights(policy, int(version))))
    return run + layout.manifest(layout.weights(policy, int(version) + 1))


def read_through_mirror(home: ObjectStore, mirror: ObjectStore) -> ObjectStore:
    """`home`, read from `mirror` where that has it. Both are the prefix of one run."""
    backend = ReadThrough(
        near=mirror.backend,
        home=home.backend,
        near_path=lambda key: mirror.prefix + key.removeprefix(home.prefix),
    )
    return replace(home, backend=backend)
