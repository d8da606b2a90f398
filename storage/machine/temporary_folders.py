"""Temporary folders that do not outlive their process for long, however it ends.

The process holds a lock on its folder. The next process that makes a folder with the same prefix
deletes those that nobody holds.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for this user alone, which is deleted at the end.

    It is in `parent`, by default in the machine's folder of temporary files.
    """
    parent = parent or Path(tempfile.gettempdir())
    _delete_abandoned(prefix, parent)
    folder, lock = _locked_folder(prefix, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):  # deleted by another process before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.exists():
                    return folder, lock
            os.close(lock)


def _delete_abandoned(prefix: str, parent: Path) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or deleted meanwhile
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
