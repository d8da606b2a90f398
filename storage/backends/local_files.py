"""Objects as files of a local (or mounted) file system. Knows nothing of runs.

Put-if-absent is `os.link` of a finished, synced temporary file: of many writers one gets the name, and nobody ever sees
half a file. fsspec's local `mode="create"` is not atomic, and `open("xb")` leaves torn files behind a kill -9.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from storage.backends.backend import Keys
from storage.errors import AstraFlowError, ConfigError, NotFoundError, TransientError

TEMPORARY = ".tmp-"
"""Names of unfinished files begin so; no listing shows them."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalFiles:
    """A `Backend` below the folder `root`, which is made when something is first written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, key: str) -> bytes:
        return self._read(key, 0, -1)

    def read_part(self, key: str, start: int, end: int) -> bytes:
        return self._read(key, start, end - start)

    def _read(self, key: str, start: int, num_bytes: int) -> bytes:
        """`num_bytes` from `start` on, as many as there are; −1: all."""
        path = self.root / key
        try:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read(num_bytes)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFoundError(f"there is no object {path}") from None
        except OSError as error:
            raise _sorted(error, path) from error

    def create(self, key: str, body: bytes) -> bool:
        path = self.root / key
        if self.exists(key):
            return False
        temporary = self._temporary(path, body)
        try:
            os.link(temporary, path)
            _sync_folder(path.parent)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise ConfigError(
                    f"the file system of {path.parent} has no hard links ({error.strerror}), which commits need; "
                    "put the store on another one (ASTRAFLOW_STORE)"
                ) from error
            raise _sorted(error, path) from error
        finally:
            _remove(temporary)
        return True

    def write(self, key: str, body: bytes) -> None:
        path = self.root / key
        temporary = self._temporary(path, body)
        try:
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except OSError as error:
            _remove(temporary)
            raise _sorted(error, path) from error

    def exists(self, key: str) -> bool:
        path = self.root / key
        try:
            return not stat.S_ISDIR(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _sorted(error, path) from error

    def list(self, prefix: str, start_after: str) -> Keys:
        keys: Keys = []
        for folder, _, names in os.walk(self.root / prefix, onerror=_raise_unless_missing):
            below = os.path.relpath(folder, self.root).replace(os.sep, "/")
            start = "" if below == "." else f"{below}/"
            keys += [start + name for name in names if not name.startswith(TEMPORARY)]
        return sorted(key for key in keys if key > start_after)

    def folders(self, prefix: str) -> Keys:
        try:
            with os.scandir(self.root / prefix) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _sorted(error, self.root / prefix) from error

    def delete(self, key: str) -> None:
        path = self.root / key
        try:
            path.unlink()
            _sync_folder(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _sorted(error, path) from error

    def unfinished(self, prefix: str, before_s: float) -> dict[str, int]:
        """Key → bytes of unfinished files below `prefix` that nobody has written to since Unix time `before_s`."""
        found: dict[str, int] = {}
        for folder, _, names in os.walk(self.root / prefix, onerror=_raise_unless_missing):
            for path in (Path(folder, name) for name in names if name.startswith(TEMPORARY)):
                with suppress(FileNotFoundError):  # its writer was at work after all
                    status = path.stat()
                    if status.st_mtime < before_s:
                        found[path.relative_to(self.root).as_posix()] = status.st_size
        return found

    def _temporary(self, path: Path, body: bytes) -> Path:
        """A finished, synced file beside `path`; none is left when writing fails."""
        temporary = path.parent / f"{TEMPORARY}{uuid4().hex}"
        try:
            _make_folder(path.parent)
            with open(temporary, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            _remove(temporary)
            raise _sorted(error, path) from error
        return temporary


def _remove(temporary: Path) -> None:
    """Tidy up after a write; what cannot be removed stays invisible to every listing."""
    with suppress(OSError):
        temporary.unlink()


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents, each new name synced: a power cut cannot lose a committed object's path."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_unless_missing(error: OSError) -> None:
    """For os.walk: a folder that vanished is empty, anything else is told."""
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        raise _sorted(error, Path(str(error.filename))) from error


def _sorted(error: OSError, path: Path) -> AstraFlowError:
    """The project's error for what the operating system said about `path`."""
    if error.errno in _FULL:
        return ConfigError(f"no space left to write {path} ({error.strerror}); free some, or set ASTRAFLOW_STORE elsewhere")
    if error.errno in _FORBIDDEN:
        return ConfigError(
            f"access to {path} is denied ({error.strerror}); correct its permissions, or set ASTRAFLOW_STORE elsewhere"
        )
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP):
        return ConfigError(
            f"{path} cannot be an object ({error.strerror}); a file stands where a folder belongs, or the reverse"
        )
    return TransientError(f"the file system failed at {path}: {error}")
