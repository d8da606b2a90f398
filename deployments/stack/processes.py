"""Processes that outlive the command that started them: start, recognise and stop them. Knows
nothing of what they do.

A process is recognised by its id together with its time of creation, so that a stale record never
points at a stranger that was given the same id. Everything started here also carries a mark in its
environment, which its own children inherit: a sweep by mark finds those that outlived their parent.
"""

import contextlib
import os
import subprocess
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from deployments.paths import open_private

MARK = "ASTRAFLOW_STACK"
"""Environment variable that marks a process as part of the stack whose home it names."""
CLOCK_SLACK_S = 2.0
"""The creation time is derived from the boot time, which moves a little when the clock is
corrected.
"""
KILL_TIMEOUT_S = 60.0
"""A killed process ends when it is next given CPU time."""
POLL_S = 0.05
LOG_BYTES_MAX = 16_000_000
"""A log beyond this size is put aside as `NAME.old` when its process starts again."""
KEPT_UMASK = -1
"""The new process has the umask of the one that starts it."""
WORDS_MAX = 60
"""Characters of a command line that a person is shown."""

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Processes that this very command started: while it lives, it must reap them, else a dead one
still looks alive.
"""


@dataclass(frozen=True)
class Process:
    """A started process. Example:
    `Process("prefect-server", 4711, 1763690000.25, "/clone/.astraflow/logs/…")`.
    """

    name: str
    pid: int
    created_s: float
    log: str
    """Path of the file that its output goes to."""


def start(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    folder: Path,
    umask: int = KEPT_UMASK,
) -> Process:
    """Starts a command in a session of its own, so that Ctrl-C in the terminal does not reach it.
    Only its owner may read the log; `umask` is that of the new process.
    """
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        log.replace(log.with_suffix(".old"))
    with open(log, "ab", opener=open_private) as output:
        output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n".encode())
        output.flush()
        child = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=umask,
        )
    _children[child.pid] = child
    try:
        created_s = psutil.Process(child.pid).create_time()
    except psutil.NoSuchProcess:
        created_s = time.time()
    return Process(name, child.pid, created_s, str(log))


def is_alive(process: Process) -> bool:
    return _find(process) is not None


def lives_since(pid: int, at_s: float) -> bool:
    """Whether the process that had this id at Unix time `at_s` lives; one that was given the id
    later does not count.
    """
    try:
        found = psutil.Process(pid)
        return found.create_time() < at_s + CLOCK_SLACK_S and _lives(found)
    except (psutil.Error, ValueError, OverflowError):
        return False


def cpu_s(process: Process) -> float:
    """CPU time of the process, of its finished children and of its living descendants; 0 when it is
    gone.
    """
    found = _find(process)
    total = 0.0
    for one in (found, *_descendants(found)) if found else ():
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
            total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def listens(process: Process, port: int) -> bool:
    """Whether it is this process, or a descendant of it, that listens on a TCP port: another may
    have been faster.
    """
    found = _find(process)
    for one in (found, *_descendants(found)) if found else ():
        try:
            if any(
                each.status == psutil.CONN_LISTEN and each.laddr.port == port
                for each in one.net_connections("tcp")
            ):
                return True
        except psutil.AccessDenied:
            return True  # this system does not tell; whoever answers on the port is believed
        except psutil.NoSuchProcess:
            continue
    return False


def stop(processes: Iterable[Process], grace_s: float) -> None:
    """Asks each process to leave (SIGTERM), and after the grace kills whatever is left of it and of
    its descendants.
    """
    asked: list[psutil.Process] = []
    for process in processes:
        found = _find(process)
        if found is not None:
            asked += [found, *_descendants(found)]
            with contextlib.suppress(psutil.Error):
                found.terminate()
    _kill_after(asked, grace_s)


def drain(processes: Iterable[Process], grace_s: float) -> None:
    """Asks the direct children of each process to leave, and waits for them; the processes
    themselves stay.
    """
    children = [
        child for process in processes if (found := _find(process)) for child in found.children()
    ]
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.terminate()
    _kill_after(children, grace_s)


def sweep(mark: str, grace_s: float) -> list[str]:
    """Stops every process that carries the mark; returns what they were."""
    found = marked(mark)
    words = [_words(process) for process in found]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _kill_after(found, grace_s)
    return words


def marked(mark: str) -> list[psutil.Process]:
    """Living processes with this mark in their environment, this process excepted."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(MARK) == mark
                and _lives(process)
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's: not ours
    return found


def last_lines(log: str | Path, count: int = 12) -> str:
    """The end of a log, for an error message; empty when there is none."""
    try:
        with Path(log).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines[-count:] if line.strip())


def _words(process: psutil.Process) -> str:
    """Id and arguments of a process, for a person:
    `4711 (-m prefect worker start --pool trainers …)`.
    """
    try:
        arguments = " ".join(process.cmdline()[1:])
    except psutil.Error:
        arguments = "gone"
    return f"{process.pid} ({textwrap.shorten(arguments, WORDS_MAX, placeholder=' …')})"


def _find(process: Process) -> psutil.Process | None:
    if process.pid in _children:
        _children[process.pid].poll()
    try:
        found = psutil.Process(process.pid)
        same = abs(found.create_time() - process.created_s) < CLOCK_SLACK_S
    except psutil.Error:
        return None
    return found if same and _lives(found) else None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _kill_after(processes: list[psutil.Process], grace_s: float) -> None:
    for process in _still_alive(processes, grace_s):
        with contextlib.suppress(psutil.Error):
            process.kill()
    _still_alive(processes, KILL_TIMEOUT_S)


def _still_alive(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that live after the timeout; returns earlier when none does. One that nobody has waited
    for yet is gone too.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        for pid in [pid for pid, child in _children.items() if child.poll() is not None]:
            del _children[pid]
        alive = [process for process in processes if _lives(process)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(POLL_S)
