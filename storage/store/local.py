"""Objects as files of a local (or mounted) file system. Knows nothing of runs.

Put-if-absent is `os.link` of a finished, synced temporary file: of many writers one gets the name,
and nobody ever sees half a file. fsspec's local `mode="create"` is not atomic, and `open("xb")`
leaves torn files behind a kill -9.

Every path below the root is walked folder by folder through descriptors, and no symbolic link on it
is followed: whoever can write into the store cannot make its readers and writers leave it. The root
itself may be reached through links.

What is no file and stands at a key (a link, a pipe, a folder that has an object's name) is an
object that cannot be read: it exists, is listed, and reading it is CorruptError, so that nobody
takes it for absent.
"""

import errno
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from storage.errors import AstraFlowError, ConfigError, CorruptError, NotFoundError, TransientError
from storage.store.backend import Keys, check_size

TEMPORARY_PREFIX = ".tmp-"
"""Names of unfinished files begin so; no listing shows them."""
DEPTH_MAX = 64
"""Folders that are nested deeper hold no objects."""

OBJECT_SUFFIXES = (".json", ".arrow")
"""A folder whose name ends so stands where an object belongs."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_MISPLACED = {
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOTEMPTY,
    errno.ELOOP,
}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BELOW = _FOLDER | os.O_NOFOLLOW


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
            with self._beside(key) as (folder, name), _reading(folder, name, path) as file:
                status = os.fstat(file.fileno())
                _refuse_other_than_file(status, path)
                if num_bytes < 0:
                    check_size(key, status.st_size, str(path))
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
        try:
            with (
                self._beside(key, make=True) as (folder, name),
                _temporary(folder, body) as temporary,
            ):
                try:
                    os.link(
                        temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False
                    )
                except FileExistsError:
                    if not _stands(folder, name):
                        raise ConfigError(
                            f"{path} is a folder where an object belongs; remove it from the store"
                        ) from None
                    return False
                except OSError as error:
                    if error.errno in _NO_LINKS:
                        raise ConfigError(
                            f"the file system of {path.parent} has no hard links "
                            f"({error.strerror}), which commits need; "
                            "put the store on another one (ASTRAFLOW_STORE)"
                        ) from error
                    raise
                os.fsync(folder)
        except OSError as error:
            raise _sorted(error, path) from error
        return True

    def write(self, key: str, body: bytes) -> None:
        try:
            with (
                self._beside(key, make=True) as (folder, name),
                _temporary(folder, body) as temporary,
            ):
                _remove_empty_folder(folder, name)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        except OSError as error:
            raise _sorted(error, self.root / key) from error

    def exists(self, key: str) -> bool:
        try:
            with self._beside(key) as (folder, name):
                return _stands(folder, name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _sorted(error, self.root / key) from error

    def list(self, prefix: str, start_after: str) -> Keys:
        found = (
            key
            for key, entry in self._entries(prefix)
            if not entry.name.startswith(TEMPORARY_PREFIX)
        )
        return sorted(key for key in found if key > start_after)

    def folders(self, prefix: str) -> Keys:
        try:
            with self._opened(_parts(prefix)) as folder, os.scandir(folder) as entries:
                return sorted(
                    entry.name for entry in entries if entry.is_dir(follow_symlinks=False)
                )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _sorted(error, self.root / prefix) from error

    def delete(self, key: str) -> None:
        try:
            with self._beside(key) as (folder, name):
                _remove_empty_folder(folder, name)
                os.unlink(name, dir_fd=folder)
                os.fsync(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _sorted(error, self.root / key) from error

    def unfinished(self, prefix: str, before_s: float) -> dict[str, int]:
        """Key → bytes of unfinished files below `prefix` that nobody has written to since Unix time
        `before_s`.
        """
        found: dict[str, int] = {}
        for key, entry in self._entries(prefix):
            if entry.name.startswith(TEMPORARY_PREFIX):
                with suppress(FileNotFoundError):  # its writer was at work after all
                    status = entry.stat(follow_symlinks=False)
                    if status.st_mtime < before_s:
                        found[key] = status.st_size
        return found

    def _entries(self, prefix: str) -> "Iterator[tuple[str, os.DirEntry[str]]]":
        """Everything below `prefix` that may stand at a key, as `_walk` tells, by its key."""
        parts = _parts(prefix)
        try:
            with self._opened(parts) as folder:
                yield from _walk(folder, "".join(f"{part}/" for part in parts), DEPTH_MAX)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _sorted(error, self.root / prefix) from error

    @contextmanager
    def _beside(self, key: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """A descriptor of the folder that holds `key`, and the name of `key` in it."""
        *folders, name = _parts(key)
        with self._opened(folders, make) as folder:
            yield folder, name

    @contextmanager
    def _opened(self, parts: Sequence[str], make: bool = False) -> Iterator[int]:
        """A descriptor of the folder `parts` below the root; `make`: of one that is made where it
        is missing, each new name synced, so that a power cut cannot lose a committed object's path.
        ConfigError for a symbolic link.
        """
        if make:
            _make_folder(self.root)
        folder = os.open(self.root, _FOLDER)
        try:
            for at, part in enumerate(parts):
                try:
                    below = os.open(part, _BELOW, dir_fd=folder)
                except OSError:
                    below = _make_below(folder, part, self.root.joinpath(*parts[: at + 1]), make)
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)


def _parts(key: str) -> Sequence[str]:
    """The names that a key or a folder's prefix consists of; ConfigError for one that leads out of
    the store.
    """
    parts = key.removesuffix("/").split("/") if key else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ConfigError(
            f"{key!r} cannot be a key: its parts must be plain names joined by single slashes"
        )
    return parts


def _make_below(folder: int, name: str, path: Path, make: bool) -> int:
    """A descriptor of the folder `name` in `folder`, which could not be opened: made if it is
    missing and `make` says so. `path` is where that is.
    """
    try:
        if stat.S_ISLNK(_status(folder, name).st_mode):
            raise ConfigError(
                f"{path} is a symbolic link, which no part of a store may be; put a folder in its "
                "place, or name the place it "
                "leads to by ASTRAFLOW_STORE"
            )
    except FileNotFoundError:
        if not make:
            raise
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        os.fsync(folder)
    return os.open(name, _BELOW, dir_fd=folder)


def _reading(folder: int, name: str, path: Path) -> BinaryIO:
    """The file `name` in `folder`, opened; of a pipe, without waiting for its writer."""

    def opened(_: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)

    try:
        return open(name, "rb", opener=opened)
    except OSError:
        _refuse_other_than_file(_status(folder, name), path)
        raise


def _status(folder: int, name: str) -> os.stat_result:
    """Of `name` in `folder` itself, be it a symbolic link."""
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _is_of_object(name: str) -> bool:
    return name.endswith(OBJECT_SUFFIXES) and not name.startswith(TEMPORARY_PREFIX)


def _stands(folder: int, name: str) -> bool:
    """Whether the place of the object `name` is taken; FileNotFoundError where nothing is."""
    return not stat.S_ISDIR(_status(folder, name).st_mode) or _is_of_object(name)


def _refuse_other_than_file(status: os.stat_result, path: Path) -> None:
    """CorruptError when an object's place is taken by what is no file. A folder whose name is no
    object's takes none.
    """
    if stat.S_ISLNK(status.st_mode):
        raise CorruptError(
            f"{path} is a symbolic link, which no part of a store may be; put the file itself in "
            "its place"
        )
    if stat.S_ISDIR(status.st_mode):
        if _is_of_object(path.name):
            raise CorruptError(
                f"{path} is a folder where an object belongs; remove it from the store"
            )
    elif not stat.S_ISREG(status.st_mode):
        raise CorruptError(
            f"{path} is no file but a pipe, a socket or a device; remove it from the store"
        )


def _remove_empty_folder(folder: int, name: str) -> None:
    """Where an object is to be written or deleted."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.rmdir(name, dir_fd=folder)


def _walk(
    folder: int, start: str, depth: int
) -> "Generator[tuple[str, os.DirEntry[str]], None, None]":
    """Everything below `folder`, whose keys begin with `start`, that is no folder, or one that has
    an object's name.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False) or _is_of_object(entry.name):
                yield start + entry.name, entry
            elif depth:
                try:
                    below = os.open(entry.name, _BELOW, dir_fd=folder)
                except (FileNotFoundError, NotADirectoryError):
                    continue  # it was removed meanwhile
                try:
                    with closing(_walk(below, f"{start}{entry.name}/", depth - 1)) as found:
                        yield from found
                finally:
                    os.close(below)


@contextmanager
def _temporary(folder: int, body: bytes) -> Iterator[str]:
    """The name of a finished, synced file in `folder`, which is gone at the end."""
    name = f"{TEMPORARY_PREFIX}{uuid4().hex}"

    def opened(_: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)

    try:
        with open(name, "wb", opener=opened) as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        yield name
    finally:
        with suppress(OSError):  # renamed, or it cannot be removed: then no listing shows it
            os.unlink(name, dir_fd=folder)


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents, each new name synced."""
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


def _sorted(error: OSError, path: Path) -> AstraFlowError:
    """The project's error for what the operating system said about `path`."""
    if error.errno in _FULL:
        return ConfigError(
            f"no space left to write {path} ({error.strerror}); free some, or set ASTRAFLOW_STORE "
            "elsewhere"
        )
    if error.errno in _FORBIDDEN:
        return ConfigError(
            f"access to {path} is denied ({error.strerror}); correct its permissions, or set "
            "ASTRAFLOW_STORE elsewhere"
        )
    if error.errno in _MISPLACED:
        return ConfigError(
            f"{path} cannot be an object ({error.strerror}); a file stands where a folder belongs, "
            "or the reverse"
        )
    return TransientError(f"the file system failed at {path}: {error}")
