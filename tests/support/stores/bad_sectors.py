"""Local stores of which one object cannot be read, or which go away during a command.

Replaced are the functions that call the operating system: no test can damage a disk or take it away.
"""

import errno
from pathlib import Path
from typing import BinaryIO

import pytest

from storage.errors import TransientError
from storage.store import local, object_store
from storage.store.local import LocalFiles


def fail_reads(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Let every read of one object fail as on a bad sector. There is no second try: it would change
    nothing but the time.
    """
    monkeypatch.setattr(object_store, "TRIES_MAX", 1)
    opened = local._open_file

    def open_file(folder: int, name: str, path: Path) -> BinaryIO:
        if str(path).endswith(key):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(folder, name, path)

    monkeypatch.setattr(local, "_open_file", open_file)


def go_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store answer one more question for its folders, and none after it."""
    folders = LocalFiles.folders
    prefixes: list[str] = []

    def once(store: LocalFiles, prefix: str) -> list[str]:
        prefixes.append(prefix)
        if len(prefixes) > 1:
            raise TransientError(f"the store is away: {prefix}")
        return folders(store, prefix)

    monkeypatch.setattr(LocalFiles, "folders", once)
