"""Run a part of a test without root's rights: in a child process of another user if the tests run
as root.
"""

import fcntl
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


def as_ordinary_user(folder: Path, work: Callable[[], None]) -> None:
    """Call `work`, which can fail as in a test and can use `folder`. As root, call it in a forked
    child that owns `folder` and has the rights of an ordinary user.
    """
    if os.geteuid() != 0:
        work()
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    with _opened_parents(folder):
        told = _in_child(work)
    if told:
        raise AssertionError(told)


@contextmanager
def _opened_parents(folder: Path) -> Iterator[None]:
    """Let other users pass through the folders above, which pytest closes to them.

    Test processes share these folders: one at a time opens them, or it would close them again while
    the child of another needs them.
    """
    lock = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        modes = {
            parent: mode for parent in folder.parents if not (mode := parent.stat().st_mode) & 0o001
        }
        for parent, mode in modes.items():
            parent.chmod(mode | 0o001)
        try:
            yield
        finally:
            for parent, mode in modes.items():
                parent.chmod(mode)
    finally:
        os.close(lock)


def _in_child(work: Callable[[], None]) -> str:
    """The exception of `work` as text; empty if there was none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as told:
        text = told.read()
    os.waitpid(child, 0)
    return text
