"""A store whose process is killed at a chosen change: no later call has an effect."""

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from storage.store.backend import Backend
from storage.store.object_store import ObjectStore


class Killed(BaseException):
    """The simulated process was killed here."""


@dataclass(kw_only=True)
class KilledBackend:
    """Forward every call, until the `dies_at`-th create, write or delete (from 1), at which it is
    killed before or `after` the effect.
    """

    inner: Backend
    dies_at: int
    after: bool = False
    changes: list[str] = field(default_factory=list)
    """Verb and key of each change that was asked for. Example: `delete weights/solver/00000001/a`.
    """
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def create(self, key: str, body: bytes) -> bool:
        self._change("create", key, body)
        return True

    def write(self, key: str, body: bytes) -> None:
        self._change("write", key, body)

    def delete(self, key: str) -> None:
        self._change("delete", key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _change(self, verb: str, key: str, *body: bytes) -> None:
        with self._lock:
            self.changes.append(f"{verb} {key}")
            number = len(self.changes)
            if number < self.dies_at or (number == self.dies_at and self.after):
                getattr(self.inner, verb)(key, *body)
            if number >= self.dies_at:
                raise Killed


def killed_at(
    store: ObjectStore, number: int, after: bool = False
) -> tuple[ObjectStore, KilledBackend]:
    """The same store for a process that is killed at its `number`-th change."""
    backend = KilledBackend(inner=store.backend, dies_at=number, after=after)
    return replace(store, backend=backend), backend
