"""A store whose responses are damaged in transit, while its stored objects are intact."""

from storage.store.backend import Backend
from storage.store.object_store import ObjectStore


def damages_first_reads(store: ObjectStore) -> ObjectStore:
    """Wrap `store` so that the first read of each object has one bit of its last byte changed."""
    backend: Backend = store.backend
    damaged: set[str] = set()

    class DamagesFirstReads:
        def __getattr__(self, name: str) -> object:
            return getattr(backend, name)

        def read(self, key: str) -> bytes:
            body = backend.read(key)
            if key in damaged:
                return body
            damaged.add(key)
            return body[:-1] + bytes([body[-1] ^ 1])

    return ObjectStore(url=store.url, backend=DamagesFirstReads(), prefix=store.prefix)  # type: ignore[arg-type]  # the rest is delegated
