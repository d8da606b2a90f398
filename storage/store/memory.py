"""Objects in this process's memory, on fsspec's memory file system: for tests. All is gone when the
process ends.
"""

import threading

import fsspec

from storage.errors import NotFoundError
from storage.store.backend import Keys, check_size

# fsspec's memory files share one read position, and its directory of files is one dict of the
# process: every access is taken in turn, over all stores.
_lock = threading.Lock()


class MemoryObjects:
    """A `Backend` below `root` (`/name/prefix`), shared by all stores of this process with the same
    root.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._fs = fsspec.filesystem("memory")

    def read(self, key: str) -> bytes:
        body = self._read(key, None, None)
        check_size(key, len(body), f"memory:/{self._path(key)}")
        return body

    def read_part(self, key: str, start: int, end: int) -> bytes:
        return self._read(key, start, end)

    def _read(self, key: str, start: int | None, end: int | None) -> bytes:
        with _lock:
            try:
                return bytes(self._fs.cat_file(self._path(key), start=start, end=end))
            except (FileNotFoundError, IsADirectoryError):
                raise NotFoundError(f"there is no object memory:/{self._path(key)}") from None

    def create(self, key: str, body: bytes) -> bool:
        with _lock:
            if self._path(key) in self._fs.store:
                return False
            self._fs.pipe_file(self._path(key), bytes(body))
            return True

    def write(self, key: str, body: bytes) -> None:
        with _lock:
            self._fs.pipe_file(self._path(key), bytes(body))

    def exists(self, key: str) -> bool:
        with _lock:
            return self._path(key) in self._fs.store

    def list(self, prefix: str, start_after: str) -> Keys:
        cut = len(self.root) + 1
        with _lock:
            keys = [path[cut:] for path in self._fs.store if path.startswith(self._path(prefix))]
        return sorted(key for key in keys if key > start_after)

    def folders(self, prefix: str) -> Keys:
        below = [key[len(prefix) :] for key in self.list(prefix, "")]
        return sorted({key.split("/", 1)[0] for key in below if "/" in key})

    def delete(self, key: str) -> None:
        with _lock:
            self._fs.store.pop(self._path(key), None)

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"
