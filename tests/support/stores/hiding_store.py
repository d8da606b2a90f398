"""A store that lists an object and answers its reads with "not found", as a proxy with a stale answer does."""

from dataclasses import replace

from storage.errors import NotFoundError
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore


def hides(store: ObjectStore, key: str) -> ObjectStore:
    """Wrap `store` so that no read finds `key`."""
    backend: Backend = store.backend
    hidden = store.prefix + key

    class Hides:
        def __getattr__(self, name: str) -> object:
            return getattr(backend, name)

        def read(self, path: str) -> bytes:
            if path == hidden:
                raise NotFoundError(f"there is no object {path}")
            return backend.read(path)

    return replace(store, backend=Hides())  # type: ignore[arg-type]  # the rest is delegated
