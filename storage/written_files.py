"""Writing of files of stored objects into local folders.

Only here do names from a store become names of local files.
"""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from storage import plain_names
from storage.errors import CorruptError

TEMPORARY_PREFIX = ".astraflow-"
"""Prefix of the names of temporary files."""


def write_inside(folder: Path, name: str, body: bytes) -> None:
    """Write the file `name` in `folder` atomically.

    An existing file or symbolic link of this name is replaced, and the link is not followed. The
    folder, which a person chose, is created if it is missing and may be reached through links.

    Raises:
        CorruptError: `name` is not a plain file name.
        OSError: the file cannot be written.
    """
    if fault := plain_names.fault(name):
        raise CorruptError(
            f"{plain_names.quoted(name)} cannot be written into {folder}: the name {fault}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f"{TEMPORARY_PREFIX}{uuid4().hex}"

    def opener(_: str, flags: int) -> int:
        return os.open(
            temporary, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=descriptor
        )

    try:
        with open(temporary, "wb", opener=opener) as file:
            file.write(body)
        os.replace(temporary, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    finally:
        with suppress(OSError):  # it was renamed
            os.unlink(temporary, dir_fd=descriptor)
        os.close(descriptor)
