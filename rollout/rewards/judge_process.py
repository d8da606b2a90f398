"""The parent's side of a judge, a child process (`math_judge.py`): start, ask, close.

No time limit depends on the load of the machine. The kernel ends a child that exceeds its CPU time;
a child is abandoned only after STALL_S without any use of the CPU.
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

from rollout.agents.failures import RewardFailedError
from storage.errors import ConfigError

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
    "VIRTUAL_ENV "
    "SYSTEMROOT PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONDONTWRITEBYTECODE "
    "PYTHONPYCACHEPREFIX OMP_NUM_THREADS ASTRAFLOW_STACK"
)
ENVIRONMENT: Final = frozenset(ENVIRONMENT_TEXT.split())
"""The variables that a child inherits; no other one, so that it gets no credentials.
ASTRAFLOW_STACK marks it for `astraflow down`.
"""


class JudgeTimeoutError(RewardFailedError):
    """A comparison exceeded its CPU time. The answer is neither right nor wrong."""


class JudgeFailedError(RewardFailedError):
    """No child could judge the answer. It is neither right nor wrong."""


class JudgeDiedError(Exception):
    """The child ended without an answer, for another reason than its CPU time."""


class Judge:
    """One child process."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        """Start the child and wait until it is ready.

        Raises:
            ConfigError: it reports that it cannot work.
            JudgeFailedError: it ended or stalled before it was ready.
        """
        self._stall_s = stall_s
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout.rewards.math_judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(os.environ),
        )
        self._unread = b""
        self.gave_last_answer = False
        """Whether the child answers no further question: its memory is full."""
        try:
            first = self._read_line()
        except (JudgeDiedError, JudgeTimeoutError) as error:
            code = self._child.poll()
            self.close()
            ended = "stopped working" if code is None else f"ended with status {code}"
            raise JudgeFailedError(f"the math judge {ended} before it was ready") from error
        if "failed" in first:
            self.close()
            raise ConfigError(
                f"answers cannot be judged: {first['failed']}; install math-verify, or name "
                "another reward"
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether the child has ended, so that no question can be written."""
        return self._child.poll() is not None

    def ask(self, answer: str, reference: str, timeout_s: float) -> bool:
        """Return whether `answer` equals `reference`.

        Raises:
            JudgeTimeoutError, JudgeDiedError: no verdict; this judge cannot be used further.
        """
        assert self._child.stdin is not None  # requested with PIPE
        question = {"answer": answer, "reference": reference, "timeout_s": timeout_s}
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
        except OSError as error:
            raise JudgeDiedError from error
        reply = self._read_line()
        self.gave_last_answer = bool(reply.get("last"))
        return bool(reply["equal"])

    def kill(self) -> None:
        """End the child at once, from any thread; a waiting `ask` raises JudgeDiedError."""
        self._child.kill()

    def close(self) -> None:
        self._child.kill()
        self._child.wait(END_TIMEOUT_S)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # an unsent question to a dead child

    def _read_line(self) -> dict[str, Any]:
        assert self._child.stdout is not None  # requested with PIPE
        answers = self._child.stdout.fileno()
        readable = select.poll()  # not select(): a service may hold more than 1,024 files
        readable.register(answers, select.POLLIN)
        used_s, since_s = -1.0, time.monotonic()
        while b"\n" not in self._unread:
            if not readable.poll(POLL_INTERVAL_S * 1000):
                now_s, before_s = time.monotonic(), used_s
                used_s = _cpu_s(self._child.pid)
                since_s = now_s if used_s > before_s else since_s
                if now_s - since_s > self._stall_s:
                    raise JudgeDiedError
                continue
            piece = os.read(answers, READ_BYTES)
            if not piece:
                self._raise_ended()
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _raise_ended(self) -> None:
        if self._child.wait(END_TIMEOUT_S) == -signal.SIGPROF:
            raise JudgeTimeoutError("the comparison was ended")
        raise JudgeDiedError


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
