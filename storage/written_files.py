"""Writes what stored objects hold into local folders. Names from a store become names of local
files nowhere else.
"""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from storage import plain_names
from storage.errors import CorruptError

TEMPORARY_PREFIX = ".astraflow-"
"""Names of unfinished files begin so."""


def write_inside(folder: Path, name: str, body: bytes) -> None:
    """Write the file `name` directly in `folder`, whole or not at all; a file or a symbolic link of
    that name is replaced, and never followed. The folder is made where it is missing, and may
    itself be reached through links: a person names it.

    CorruptError for a name that is more than the plain name of a file; OSError when the file cannot
    be written.
    """
    if wrong := plain_names.fault(name):
        raise CorruptError(
            f"{plain_names.quoted(name)} cannot be written into {folder}: the name {wrong}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    temporary = f"{TEMPORARY_PREFIX}{uuid4().hex}"

    def opened(_: str, flags: int) -> int:
        return os.open(
            temporary, flags | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=place
        )

    try:
        with open(temporary, "wb", opener=opened) as file:
            file.write(body)
        os.replace(temporary, name, src_dir_fd=place, dst_dir_fd=place)
    finally:
        with suppress(OSError):  # renamed already
            os.unlink(temporary, dir_fd=place)
        os.close(place)
