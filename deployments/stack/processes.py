"""Start, identify and stop processes that outlive the command that started them.

A process is identified by its id and its start in the kernel's ticks, so that a stale record never
matches another process with a reused id, whatever happens to the clock. Every process also has the
mark ASTRAFLOW_STACK in its environment, which its children inherit: a search for the mark finds
those that outlived their parent.
"""

import contextlib
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from deployments.paths import open_private, open_regular
from deployments.stack.machine import start_of
from storage.errors import ConfigError
from storage.machine import ports

MARK = "ASTRAFLOW_STACK"
"""Environment variable with the home of the stack that a process belongs to."""
CLOCK_SLACK_S = 2.0
"""Tolerance of the creation time, by which a process is identified where the start is unknown. It
shifts when the clock is corrected."""
KILL_TIMEOUT_S = 60.0
"""A killed process ends the next time that it gets CPU time, which may take long under load."""
POLL_S = 0.05
LOG_BYTES_MAX = 16_000_000
"""A larger log is renamed to `NAME.old` when its process starts again."""
INHERITED_UMASK = -1
"""The new process has the umask of the process that starts it."""
SHOWN_MAX = 60
"""Characters of a command line that are shown."""

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Child processes of this command, which must reap them: a zombie would count as alive."""


@dataclass(frozen=True)
class Process:
    """A started process. Example:
    `Process("prefect-server", 4711, 1763690000.25, "/clone/.astraflow/logs/…", "0d6f… 3107122")`.
    """

    name: str
    pid: int
    created_s: float
    log: str
    """Path of the file with its output."""
    start: str = ""
    """Boot id and ticks of its start; empty in a record of an earlier release, and on other systems
    than Linux."""


def start(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    folder: Path,
    umask: int = INHERITED_UMASK,
) -> Process:
    """Start a command in a new session, so that Ctrl-C in the terminal does not reach it.

    `umask` is that of the new process. The log has mode 0600. Call it in the main thread.
    """
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        log.replace(log.with_suffix(".old"))
    with open(log, "ab", opener=open_private) as output:
        output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n".encode())
        output.flush()
        with interruptible():
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
    return Process(name, child.pid, created_s, str(log), start_of(child.pid))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let processes that are started in the block react to SIGINT.

    A command in the background of a shell script ignores it, and so would its children. Prefect's
    worker sends itself a SIGINT when it gets SIGTERM, and would never end.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a child gets the default
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_alive(process: Process) -> bool:
    """Return whether the process still runs."""
    return _find(process) is not None


def cpu_s(process: Process) -> float:
    """Return the CPU time of the process, its finished children and its running descendants.

    It is 0 when the process has ended.
    """
    total = 0.0
    for member in _tree(process):
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            total += times.user + times.system
            total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def listens(process: Process, port: int) -> bool:
    """Return whether the process or a descendant listens on a TCP port, which another process may
    have taken first.
    """
    return ports.listens(_tree(process), port)


def stop(processes: Iterable[Process], grace_s: float) -> None:
    """Send SIGTERM to each process; after `grace_s` kill those still running, with descendants."""
    terminated: list[psutil.Process] = []
    for process in processes:
        if tree := _tree(process):
            terminated += tree
            with contextlib.suppress(psutil.Error):
                tree[0].terminate()
    _kill_after(terminated, grace_s)


def drain(processes: Iterable[Process], grace_s: float) -> None:
    """Stop the direct children of each process and wait for them; the processes keep running."""
    children = [
        child for process in processes if (parent := _find(process)) for child in parent.children()
    ]
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.terminate()
    _kill_after(children, grace_s)


def sweep(mark: str, grace_s: float) -> list[str]:
    """Stop every process with the mark; return a description of each."""
    processes = marked(mark)
    descriptions = [_describe(process) for process in processes]
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _kill_after(processes, grace_s)
    return descriptions


def marked(mark: str) -> list[psutil.Process]:
    """Return the running processes with this mark in their environment, except this process."""
    processes = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(MARK) == mark
                and _runs(process)
            ):
                processes.append(process)
        except (psutil.Error, OSError):
            continue  # it has ended, or belongs to another user
    return processes


def last_lines(log: str | Path, count: int = 12) -> str:
    """Return the end of a log, for an error message; empty when the log cannot be read."""
    try:
        with open(log, "rb", opener=open_regular) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except (OSError, ConfigError):
        return ""
    return "\n".join(line for line in lines[-count:] if line.strip())


def _describe(process: psutil.Process) -> str:
    """Return id and arguments of a process: `4711 (-m prefect worker start --pool trainers …)`."""
    try:
        arguments = " ".join(process.cmdline()[1:])
    except psutil.Error:
        arguments = "ended"
    return f"{process.pid} ({textwrap.shorten(arguments, SHOWN_MAX, placeholder=' …')})"


def _find(process: Process) -> psutil.Process | None:
    if process.pid in _children:
        _children[process.pid].poll()
    try:
        candidate = psutil.Process(process.pid)
        is_same = (
            start_of(process.pid) == process.start
            if process.start
            else abs(candidate.create_time() - process.created_s) < CLOCK_SLACK_S
            or _has_mark_of(candidate, process)
        )
    except (psutil.Error, OSError):
        return None
    return candidate if is_same and _runs(candidate) else None


def _has_mark_of(candidate: psutil.Process, process: Process) -> bool:
    """Return whether `candidate` belongs to the stack in whose home the log of `process` is: it is
    the process then, although the clock has been set since its start.
    """
    mark = candidate.environ().get(MARK)
    return bool(mark) and Path(str(mark)) in Path(process.log).parents


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _tree(process: Process) -> list[psutil.Process]:
    """Return the process and its descendants; nothing when it has ended."""
    root = _find(process)
    if root is None:
        return []
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return [root]


def _kill_after(processes: list[psutil.Process], grace_s: float) -> None:
    for process in _still_alive(processes, grace_s):
        with contextlib.suppress(psutil.Error):
            process.kill()
    _still_alive(processes, KILL_TIMEOUT_S)


def _still_alive(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return the processes that run after the timeout; return earlier when none does.

    A zombie counts as ended. `psutil.wait_procs` would wait for its parent to reap it, and in a
    container without an init process no parent does.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        for pid in [pid for pid, child in _children.items() if child.poll() is not None]:
            del _children[pid]
        alive = [process for process in processes if _runs(process)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(POLL_S)
