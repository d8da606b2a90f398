"""Objects of a local store that are no file that this user may read: folders, links, pipes."""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet


def link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def folder(path: Path) -> None:
    (path / "within").mkdir(parents=True)


STRANGE: dict[str, Callable[[Path], None]] = {
    "a link": link,
    "a pipe": os.mkfifo,
    "an empty folder": os.mkdir,
    "a full folder": folder,
}


def strange(keys: Iterable[str]) -> list[ParameterSet]:
    """Every key with every maker, except folders where a key is that of a folder."""
    return [
        pytest.param(key, make, id=f"{key} is {name}")
        for key in keys
        for name, make in STRANGE.items()
        if "." in key or "folder" not in name
    ]


def take_place(path: Path, make: Callable[[Path], None]) -> None:
    """Replace the file at `path` by the object that `make` creates."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)
