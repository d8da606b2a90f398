"""One child process that judges (`math_judge.py`), as its parent uses it: start, ask, close.

No wait here depends on how busy the machine is. The kernel ends a child that uses more CPU time
than it may; a child is given up only where it uses none at all for STALL_S.
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
"""Wall-clock seconds without any use of the CPU after which a child is given up: it is stopped, or
its disk is gone.
"""
LOOK_S: Final = 1.0
"""Pause between two looks at the CPU time of a child that is waited for."""
END_TIMEOUT_S: Final = 10.0
READ_BYTES: Final = 65_536

ENVIRONMENT_TEXT: Final = (
    "PATH HOME TMPDIR LANG LANGUAGE LC_ALL LC_CTYPE TZ LD_LIBRARY_PATH DYLD_LIBRARY_PATH "
    "VIRTUAL_ENV "
    "SYSTEMROOT PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONDONTWRITEBYTECODE "
    "PYTHONPYCACHEPREFIX OMP_NUM_THREADS ASTRAFLOW_STACK"
)
ENVIRONMENT: Final = frozenset(ENVIRONMENT_TEXT.split())
"""What a child inherits of the environment: no credentials, whatever they are called.
ASTRAFLOW_STACK marks it for `astraflow down`.
"""


class JudgeTimeoutError(RewardFailedError):
    """A comparison exceeded its CPU time. The answer is neither right nor wrong."""


class JudgeFailedError(RewardFailedError):
    """No child could judge the answer. It is neither right nor wrong."""


class JudgeDiedError(Exception):
    """The child ended without an answer, and not because of its CPU time."""


class Judge:
    """One child process."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        """Start the child and wait until it is ready.

        Raises:
            ConfigError: it says that it cannot work.
            JudgeFailedError: it ended, or stopped working, before it was ready.
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
        try:
            first = self._line()
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

    def ask(self, answer: str, reference: str, timeout_s: float) -> bool:
        """Whether `answer` equals `reference`. After JudgeTimeoutError or JudgeDiedError this judge
        is of no more use.
        """
        assert self._child.stdin is not None  # requested with PIPE
        question = {"answer": answer, "reference": reference, "timeout_s": timeout_s}
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
        except OSError as error:
            raise JudgeDiedError from error
        return bool(self._line()["equal"])

    def kill(self) -> None:
        """End the child at once, from any thread; who waits for its answer gets JudgeDiedError."""
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

    def _line(self) -> dict[str, Any]:
        assert self._child.stdout is not None  # requested with PIPE
        answers = self._child.stdout.fileno()
        readable = select.poll()  # not select(): a service may hold more than 1,024 files
        readable.register(answers, select.POLLIN)
        used_s, since_s = -1.0, time.monotonic()
        while b"\n" not in self._unread:
            if not readable.poll(LOOK_S * 1000):
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
    """The part of an environment that a child gets, and this process's own module path."""
    kept = {name: value for name, value in environment.items() if name in ENVIRONMENT}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has used; 0 once it has ended."""
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(used.user + used.system)
