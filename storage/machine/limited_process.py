"""A child process that works on untrusted input, and whose CPU time and memory are limited.

    parent: LimitedProcess ──one JSON object per line──▶ child: `child_limits.py`
                           ◀──one JSON object per line──

The child sets its own limits, and the kernel enforces them. No time limit depends on the load of
the machine: a child is abandoned only after STALL_S without any use of the CPU.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import psutil

STALL_S: Final = 120.0
"""Wall-clock seconds without any use of the CPU after which a child is abandoned: it is suspended,
or its disk is lost.
"""
POLL_INTERVAL_S: Final = 1.0
"""Pause between two polls of a child's CPU time."""
END_TIMEOUT_S: Final = 10.0
READ_BYTES: Final = 65_536

ENVIRONMENT_TEXT: Final = (
    "PATH HOME TMPDIR LANG LANGUAGE LC_ALL LC_CTYPE TZ LD_LIBRARY_PATH DYLD_LIBRARY_PATH "
    "VIRTUAL_ENV SYSTEMROOT PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING "
    "PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX OMP_NUM_THREADS TORCHINDUCTOR_CACHE_DIR "
    "ASTRAFLOW_STACK"
)
ENVIRONMENT: Final = frozenset(ENVIRONMENT_TEXT.split())
"""The variables that a child inherits; no other one, so that it gets no credentials.
ASTRAFLOW_STACK marks it for `astraflow down`.
"""


class ProcessTimeoutError(Exception):
    """The child exceeded its CPU time."""


class ProcessDiedError(Exception):
    """The child ended without an answer, for another reason than its CPU time."""


class LimitedProcess:
    """One child process: `python -m MODULE`."""

    def __init__(self, module: str, stall_s: float = STALL_S) -> None:
        """Start the child and wait for its first line.

        Raises:
            ProcessDiedError: it ended or stalled before.
        """
        self._stall_s = stall_s
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(os.environ),
            cwd="/",  # Python does not start in a folder that was deleted
        )
        self._unread = bytearray()
        try:
            self.first = self._read_line()
            """The first line: whether the child can work."""
        except (ProcessDiedError, ProcessTimeoutError) as error:
            code = self._child.poll()
            self.close()
            ended = "stopped working" if code is None else f"ended with status {code}"
            raise ProcessDiedError(f"{ended} before it was ready") from error

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether the child has ended, so that no question can be written."""
        return self._child.poll() is not None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one question; one thread at a time.

        Raises:
            ProcessTimeoutError, ProcessDiedError: no answer; this child cannot be used further.
        """
        self._write(json.dumps(question).encode() + b"\n")
        return self._read_line()

    def kill(self) -> None:
        """End the child at once, from any thread; a waiting `ask` raises ProcessDiedError."""
        self._child.kill()

    def close(self) -> None:
        self._child.kill()
        self._child.wait(END_TIMEOUT_S)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def _write(self, line: bytes) -> None:
        assert self._child.stdin is not None  # requested with PIPE
        questions = self._child.stdin.fileno()
        os.set_blocking(questions, False)
        unwritten = memoryview(line)
        while unwritten:
            self._wait_for(questions, select.POLLOUT)
            try:
                unwritten = unwritten[os.write(questions, unwritten) :]
            except OSError as error:
                raise ProcessDiedError("it ended before the question was written") from error

    def _read_line(self) -> dict[str, Any]:
        assert self._child.stdout is not None  # requested with PIPE
        answers = self._child.stdout.fileno()
        while not self._unread.endswith(b"\n"):  # the child writes nothing after an answer
            self._wait_for(answers, select.POLLIN)
            piece = os.read(answers, READ_BYTES)
            if not piece:
                self._raise_ended()
            self._unread += piece
        line, self._unread = self._unread, bytearray()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _wait_for(self, pipe: int, event: int) -> None:
        """Wait until a pipe of the child can be used, or its other end is closed."""
        ready = select.poll()  # not select(): a service may hold more than 1,024 files
        ready.register(pipe, event)
        used_s, since_s = -1.0, time.monotonic()
        while not ready.poll(POLL_INTERVAL_S * 1000):
            now_s, before_s = time.monotonic(), used_s
            used_s = _cpu_s(self._child.pid)
            since_s = now_s if used_s > before_s else since_s
            if now_s - since_s > self._stall_s:
                raise ProcessDiedError(f"it did not use the CPU for {self._stall_s:g} s")

    def _raise_ended(self) -> None:
        code = self._child.wait(END_TIMEOUT_S)
        if code == -signal.SIGPROF:
            raise ProcessTimeoutError("it used up its CPU time")
        raise ProcessDiedError(f"it ended with status {code}")


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited part of an environment, with this process's module path."""
    kept = {name: value for name, value in environment.items() if name in ENVIRONMENT}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process; 0 once it has ended."""
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(used.user + used.system)
