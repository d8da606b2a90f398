"""The parent's side of the judges: a few child processes (`math_judge.py`), started when first needed and replaced
when lost.

    await equal(…) ──▶ a thread of the pool ──JSON line──▶ child
                                            ◀─JSON line──

Works from any thread and any event loop. A child that does not answer in time is killed; one that dies is replaced,
and its question is asked once more. Knows nothing of prompts and rewards.
"""

import asyncio
import json
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from storage.errors import ConfigError

JUDGES_MAX: Final = 2
"""Child processes of one pool; one compares some hundred answers a second."""
START_TIMEOUT_S: Final = 60.0
"""A child imports math-verify and sympy first: half a second of CPU, much longer where the machine is busy."""
GRACE_S: Final = 0.5
"""What a child gets beyond the timeout to say by itself that it took too long."""
ASKS_MAX: Final = 2
"""How often one question is asked when the child dies over it."""
INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "ASTRAFLOW_STACK")
"""What a child needs of the environment; no key and no secret is among it. The last one marks processes of the stack."""
END_TIMEOUT_S: Final = 1.0
READ_BYTES: Final = 65_536


class JudgeTimeoutError(Exception):
    """The comparison took longer than it may."""


class JudgeFailedError(Exception):
    """Child after child died over the question."""


class JudgePool:
    """At most `judges_max` children, each working at one question at a time; further questions wait in line."""

    def __init__(self, timeout_s: float, judges_max: int = JUDGES_MAX) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(judges_max, thread_name_prefix="math-judge")
        self._idle: list[Judge] = []
        self._lock = threading.Lock()

    async def equal(self, answer: str, reference: str) -> bool:
        """Whether `answer` means what `reference` means. Raises JudgeTimeoutError, JudgeFailedError, or ConfigError when
        math-verify is not installed."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._equal, answer, reference)

    def close(self) -> None:
        """Ends all children; what is still in line is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for judge in self._idle:
            judge.close()
        self._idle.clear()

    def _equal(self, answer: str, reference: str) -> bool:
        question = {"answer": answer, "reference": reference, "timeout_s": self._timeout_s}
        for _ in range(ASKS_MAX):
            judge = self._take()
            try:
                reply = judge.ask(question, self._timeout_s + GRACE_S)
            except JudgeDiedError:
                judge.close()
                continue
            except BaseException:
                judge.close()
                raise
            with self._lock:
                self._idle.append(judge)
            if "timeout" in reply:
                raise JudgeTimeoutError(f"no verdict within {self._timeout_s:g} s")
            return bool(reply["equal"])
        raise JudgeFailedError(f"{ASKS_MAX} judges died over one question")

    def _take(self) -> "Judge":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Judge()


class JudgeDiedError(Exception):
    """The child left without an answer."""


class Judge:
    """One child process."""

    def __init__(self) -> None:
        """Starts the child and waits until it is ready; ConfigError when it says that it cannot work."""
        paths = os.pathsep.join(path for path in sys.path if path)
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout.math_judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in INHERITED if name in os.environ} | {"PYTHONPATH": paths},
        )
        self._unread = b""
        try:
            first = self._line(START_TIMEOUT_S)
        except (JudgeDiedError, JudgeTimeoutError) as error:
            self.close()
            raise JudgeFailedError(f"the math judge did not start within {START_TIMEOUT_S:g} s") from error
        if "failed" in first:
            self.close()
            raise ConfigError(f"answers cannot be judged: {first['failed']}; install math-verify, or name another reward")

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One question, one answer. After JudgeTimeoutError or JudgeDiedError this judge is of no more use."""
        assert self._child.stdin is not None  # asked for by PIPE
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
        except OSError as error:
            raise JudgeDiedError from error
        return self._line(timeout_s)

    def close(self) -> None:
        self._child.kill()
        self._child.wait(END_TIMEOUT_S)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # an unsent question to a dead child

    def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._child.stdout is not None  # asked for by PIPE
        answers = self._child.stdout.fileno()
        readable = select.poll()  # not select(): a service may hold more than 1,024 files
        readable.register(answers, select.POLLIN)
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not readable.poll(left_s * 1000):
                raise JudgeTimeoutError(f"no answer within {timeout_s:g} s")
            piece = os.read(answers, READ_BYTES)
            if not piece:
                raise JudgeDiedError
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply
