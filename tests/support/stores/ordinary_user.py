"""Run a part of a test without root's rights: in a child process of another user if the tests run
as root.
"""

import os
import traceback
from collections.abc import Callable
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
    opened = [parent for parent in folder.parents if not parent.stat().st_mode & 0o001]
    modes = [parent.stat().st_mode for parent in opened]
    for parent in opened:  # pytest closes its folders to other users
        parent.chmod(parent.stat().st_mode | 0o001)
    try:
        told = _in_child(work)
    finally:
        for parent, mode in zip(opened, modes, strict=True):
            parent.chmod(mode)
    if told:
        raise AssertionError(told)


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
