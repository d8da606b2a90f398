"""Traffic of a service: a `Backend` that counts the bytes of weights it reads and of shards it
writes.

Each store is counted separately, home and a mirror: bytes from home cross an ocean, those from a
mirror do not.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field, replace

from storage import layout
from storage.store.backend import Backend, Keys
from storage.store.object_store import ObjectStore

FROM_HOME, FROM_MIRROR = "weights_bytes_home_", "weights_bytes_mirror_"
"""Prefixes of a worker's counters, before a policy's name: bytes read of the policy's weights."""
SHARD_BYTES = "shard_bytes"
"""A worker's counter: bytes written."""


@dataclass(kw_only=True)
class Counting:
    """A `Backend` around `inner`, for the run whose keys begin with `prefix`. Thread-safe."""

    inner: Backend
    prefix: str
    _weights: Counter[str] = field(default_factory=Counter)
    _shards: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def weights(self) -> dict[str, int]:
        """Return policy → bytes read of its weights, manifests included."""
        with self._lock:
            return dict(self._weights)

    def shards(self) -> int:
        """Return the bytes of the shards that were created."""
        with self._lock:
            return self._shards

    def read(self, key: str) -> bytes:
        return self._counted(key, self.inner.read(key))

    def read_part(self, key: str, start: int, end: int) -> bytes:
        return self._counted(key, self.inner.read_part(key, start, end))

    def create(self, key: str, body: bytes) -> bool:
        created = self.inner.create(key, body)
        if created and layout.is_shard(key.removeprefix(self.prefix)):
            with self._lock:
                self._shards += len(body)
        return created

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
    """Return the run's store with a counting backend, and this backend."""
    backend = Counting(inner=run.backend, prefix=run.prefix)
    return replace(run, backend=backend), backend


def progress(home: Counting, mirror: Counting | None) -> dict[str, float]:
    """Return the counters for a heartbeat. Example:
    `{"weights_bytes_home_solver": 1024, "shard_bytes": 512}`.
    """
    from_mirror = mirror.weights() if mirror else {}
    return {
        **{f"{FROM_HOME}{policy}": num_bytes for policy, num_bytes in home.weights().items()},
        **{f"{FROM_MIRROR}{policy}": num_bytes for policy, num_bytes in from_mirror.items()},
        SHARD_BYTES: home.shards(),
    }
