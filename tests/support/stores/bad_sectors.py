"""Objects of a local store that cannot be read at all, while the others can."""

import errno
from pathlib import Path
from typing import BinaryIO

import pytest

from storage.store import local, object_store


def fail_reads(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Let every read of one object fail as on a bad sector, without another try."""
    monkeypatch.setattr(object_store, "TRIES_MAX", 1)
    opened = local._open_file

    def open_file(folder: int, name: str, path: Path) -> BinaryIO:
        if str(path).endswith(key):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(folder, name, path)

    monkeypatch.setattr(local, "_open_file", open_file)
