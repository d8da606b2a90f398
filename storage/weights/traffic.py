"""How many bytes of weights a service reads and of shards it writes: a `Backend` that passes
everything on and counts.

It goes around each store apart, home's and a mirror's: the bytes of the one cross an ocean, those
of the other do not.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field, replace

from storage import layout
from storage.store.backend import Backend, Keys
from storage.store.object_store import ObjectStore


@dataclass(kw_only=True)
class Counting:
    """A `Backend` around `inner`, for the run whose keys begin with `prefix`. Safe in many
    threads.
    """

    inner: Backend
    prefix: str
    _weights: Counter[str] = field(default_factory=Counter)
    _shards: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def weights(self) -> dict[str, int]:
        """policy → bytes that were read of its weights, manifests included."""
        with self._lock:
            return dict(self._weights)

    def shards(self) -> int:
        """Bytes of the shards that were made here."""
        with self._lock:
            return self._shards

    def read(self, key: str) -> bytes:
        return self._counted(key, self.inner.read(key))

    def read_part(self, key: str, start: int, end: int) -> bytes:
        return self._counted(key, self.inner.read_part(key, start, end))

    def create(self, key: str, body: bytes) -> bool:
        made = self.inner.create(key, body)
        if made and layout.is_shard(key.removeprefix(self.prefix)):
            with self._lock:
                self._shards += len(body)
        return made

    def write(self, key: str, body: bytes) -> None:
        self.inner.write(key, body)

    def exists(self, key: str) -> bool:
        return self.inner.exists(key)

    def list(self, prefix: str, start_after: str) -> Keys:
        return self.inner.list(prefix, start_after)

    def folders(self, prefix: str) -> Keys:
        return self.inner.folders(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def _counted(self, key: str, body: bytes) -> bytes:
        if policy := layout.policy_of_weights(key.removeprefix(self.prefix)):
            with self._lock:
                self._weights[policy] += len(body)
        return body


def counted(run: ObjectStore) -> tuple[ObjectStore, Counting]:
    """The run's store, counting from now on, and what counts."""
    backend = Counting(inner=run.backend, prefix=run.prefix)
    return replace(run, backend=backend), backend
