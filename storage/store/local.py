"""Backend on a local or mounted file system: one file for each object.

Put-if-absent is `os.link` of a complete, synced temporary file: of many writers one gets the name,
and a reader never sees a partial file. fsspec's local `mode="create"` is not atomic, and
`open("xb")` leaves partial files after kill -9.

Every path below the root is opened folder by folder through descriptors, without following symbolic
links: a writer of the store cannot redirect others to files outside it. The root itself may be
reached through links.

Anything else than a file at a key (a link, a pipe, a folder with the name of an object) is an
unreadable object: it exists, it is listed, and reading it raises CorruptError, so that it does not
count as absent.
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
"""Prefix of the names of temporary files, which are not listed."""
DEPTH_MAX = 64
"""Deepest level of folders that is listed."""

OBJECT_SUFFIXES = (".json", ".arrow")
"""Suffixes of objects. A folder whose name ends with one is an unreadable object."""

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
_SUBFOLDER = _FOLDER | os.O_NOFOLLOW


class LocalFiles:
    """A `Backend` below the folder `root`, which the first write creates."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, key: str) -> bytes:
        return self._read(key, 0, -1)

    def read_part(self, key: str, start: int, end: int) -> bytes:
        return self._read(key, start, end - start)

    def _read(self, key: str, start: int, num_bytes: int) -> bytes:
        """Read `num_bytes` from `start`, fewer at the end of the file; −1 for all."""
        path = self.root / key
        try:
            with self._folder_of(key) as (folder, name), _open_file(folder, name, path) as file:
                status = os.fstat(file.fileno())
                _check_is_file(status, path)
                if num_bytes < 0:
                    check_size(key, status.st_size, str(path))
                file.seek(start)
                return file.read(num_bytes)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFoundError(f"there is no object {path}") from None
        except OSError as error:
            raise _translate(error, path) from error

    def create(self, key: str, body: bytes) -> bool:
        path = self.root / key
        if self.exists(key):
            return False
        try:
            with (
                self._folder_of(key, create=True) as (folder, name),
                _temporary(folder, body) as temporary,
            ):
                try:
                    os.link(
                        temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False
                    )
                except FileExistsError:
                    if not _is_object(folder, name):
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
            raise _translate(error, path) from error
        return True

    def write(self, key: str, body: bytes) -> None:
        try:
            with (
                self._folder_of(key, create=True) as (folder, name),
                _temporary(folder, body) as temporary,
            ):
                _remove_empty_folder(folder, name)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        except OSError as error:
            raise _translate(error, self.root / key) from error

    def exists(self, key: str) -> bool:
        try:
            with self._folder_of(key) as (folder, name):
                return _is_object(folder, name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _translate(error, self.root / key) from error

    def list(self, prefix: str, start_after: str) -> Keys:
        return sorted(
            key
            for key, entry in self._entries(prefix)
            if key > start_after and not entry.name.startswith(TEMPORARY_PREFIX)
        )

    def folders(self, prefix: str) -> Keys:
        try:
            with self._open_folder(_parts(prefix)) as folder, os.scandir(folder) as entries:
                return sorted(
                    entry.name for entry in entries if entry.is_dir(follow_symlinks=False)
                )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _translate(error, self.root / prefix) from error

    def delete(self, key: str) -> None:
        try:
            with self._folder_of(key) as (folder, name):
                _remove_empty_folder(folder, name)
                os.unlink(name, dir_fd=folder)
                os.fsync(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _translate(error, self.root / key) from error

    def unfinished(self, prefix: str, before_s: float) -> dict[str, int]:
        """Return key → bytes of temporary files below `prefix` that were last written before
        `before_s`, in Unix time.
        """
        sizes: dict[str, int] = {}
        for key, entry in self._entries(prefix):
            if entry.name.startswith(TEMPORARY_PREFIX):
                with suppress(FileNotFoundError):  # its writer finished it meanwhile
                    status = entry.stat(follow_symlinks=False)
                    if status.st_mtime < before_s:
                        sizes[key] = status.st_size
        return sizes

    def _entries(self, prefix: str) -> "Iterator[tuple[str, os.DirEntry[str]]]":
        """Yield key and entry of everything below `prefix` that may be an object (see `_walk`)."""
        parts = _parts(prefix)
        try:
            with self._open_folder(parts) as folder:
                yield from _walk(folder, "".join(f"{part}/" for part in parts), DEPTH_MAX)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _translate(error, self.root / prefix) from error

    @contextmanager
    def _folder_of(self, key: str, create: bool = False) -> Iterator[tuple[int, str]]:
        """Open the folder of `key`; yields its descriptor and the name of the file in it."""
        *folders, name = _parts(key)
        with self._open_folder(folders, create) as folder:
            yield folder, name

    @contextmanager
    def _open_folder(self, parts: Sequence[str], create: bool = False) -> Iterator[int]:
        """Open the folder `parts` below the root; yields its descriptor.

        With `create`, missing folders are created, and each new name is synced: a power cut cannot
        lose the path of a committed object. Raises ConfigError for a symbolic link.
        """
        if create:
            _create_folders(self.root)
        folder = os.open(self.root, _FOLDER)
        try:
            for index, part in enumerate(parts):
                try:
                    subfolder = os.open(part, _SUBFOLDER, dir_fd=folder)
                except OSError:
                    path = self.root.joinpath(*parts[: index + 1])
                    subfolder = _open_or_create(folder, part, path, create)
                os.close(folder)
                folder = subfolder
            yield folder
        finally:
            os.close(folder)


def _parts(key: str) -> Sequence[str]:
    """Split a key or a folder's prefix into names; ConfigError for one that leaves the store."""
    parts = key.removesuffix("/").split("/") if key else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ConfigError(
            f"{key!r} cannot be a key: its parts must be plain names joined by single slashes"
        )
    return parts


def _open_or_create(folder: int, name: str, path: Path, create: bool) -> int:
    """Open the folder `name` in `folder`; ConfigError for a symbolic link.

    Args:
        path: that of the folder, for errors.
        create: create the folder if it is missing.
    """
    try:
        if stat.S_ISLNK(_status(folder, name).st_mode):
            raise ConfigError(
                f"{path} is a symbolic link, which no part of a store may be; replace it by a "
                "folder, or set ASTRAFLOW_STORE to the folder that it leads to"
            )
    except FileNotFoundError:
        if not create:
            raise
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        os.fsync(folder)
    return os.open(name, _SUBFOLDER, dir_fd=folder)


def _open_file(folder: int, name: str, path: Path) -> BinaryIO:
    """Open the file `name` in `folder` for reading; does not wait for the writer of a pipe."""

    def opener(_: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)

    try:
        return open(name, "rb", opener=opener)
    except OSError:
        _check_is_file(_status(folder, name), path)
        raise


def _status(folder: int, name: str) -> os.stat_result:
    """Return the status of `name` in `folder`; of a symbolic link, that of the link itself."""
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _is_object_name(name: str) -> bool:
    return name.endswith(OBJECT_SUFFIXES) and not name.startswith(TEMPORARY_PREFIX)


def _is_object(folder: int, name: str) -> bool:
    """Return whether `name` is an object, readable or not; FileNotFoundError when it is absent."""
    return not stat.S_ISDIR(_status(folder, name).st_mode) or _is_object_name(name)


def _check_is_file(status: os.stat_result, path: Path) -> None:
    """Raise CorruptError for an object that is not a file, and not a folder of other objects."""
    if stat.S_ISLNK(status.st_mode):
        raise CorruptError(
            f"{path} is a symbolic link, which no part of a store may be; replace it by the file"
        )
    if stat.S_ISDIR(status.st_mode):
        if _is_object_name(path.name):
            raise CorruptError(
                f"{path} is a folder where an object belongs; remove it from the store"
            )
    elif not stat.S_ISREG(status.st_mode):
        raise CorruptError(
            f"{path} is a pipe, a socket or a device, not a file; remove it from the store"
        )


def _remove_empty_folder(folder: int, name: str) -> None:
    """Make way for an object that is written or deleted."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.rmdir(name, dir_fd=folder)


def _walk(
    folder: int, start: str, depth: int
) -> "Generator[tuple[str, os.DirEntry[str]], None, None]":
    """Yield key and entry of all files below `folder`, and of folders with the name of an object.

    Args:
        start: prefix of the keys: the path of `folder` with its final `/`.
        depth: levels of subfolders to list.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False) or _is_object_name(entry.name):
                yield start + entry.name, entry
            elif depth:
                try:
                    subfolder = os.open(entry.name, _SUBFOLDER, dir_fd=folder)
                except (FileNotFoundError, NotADirectoryError):
                    continue  # it was removed meanwhile
                try:
                    with closing(_walk(subfolder, f"{start}{entry.name}/", depth - 1)) as nested:
                        yield from nested
                finally:
                    os.close(subfolder)


@contextmanager
def _temporary(folder: int, body: bytes) -> Iterator[str]:
    """Write a complete, synced file into `folder`; yields its name and removes it at the end."""
    name = f"{TEMPORARY_PREFIX}{uuid4().hex}"

    def opener(_: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)

    try:
        with open(name, "wb", opener=opener) as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        yield name
    finally:
        with suppress(OSError):  # it was renamed, or it cannot be removed and is not listed
            os.unlink(name, dir_fd=folder)


def _create_folders(folder: Path) -> None:
    """Create `folder` and its parents, each new name synced."""
    if folder.is_dir():
        return
    _create_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _translate(error: OSError, path: Path) -> AstraFlowError:
    """Return the error of `storage.errors` for an error of the operating system at `path`."""
    if error.errno in _FULL:
        return ConfigError(
            f"no space left to write {path} ({error.strerror}); free some, or set ASTRAFLOW_STORE "
            "to another folder"
        )
    if error.errno in _FORBIDDEN:
        return ConfigError(
            f"access to {path} is denied ({error.strerror}); correct its permissions, or set "
            "ASTRAFLOW_STORE to another folder"
        )
    if error.errno in _MISPLACED:
        return ConfigError(
            f"{path} cannot be an object ({error.strerror}); a file is where a folder belongs, or "
            "the reverse"
        )
    return TransientError(f"the file system failed at {path}: {error}")
