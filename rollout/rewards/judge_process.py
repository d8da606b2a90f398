"""The parent's side of a judge, a child process (`math_judge.py`): start, ask, close."""

from typing import Final

from rollout.agents.failures import RewardFailedError
from storage.errors import ConfigError
from storage.machine.limited_process import (
    STALL_S,
    LimitedProcess,
    ProcessDiedError,
    ProcessTimeoutError,
)

MODULE: Final = "rollout.rewards.math_judge"


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
        try:
            self._process = LimitedProcess(MODULE, stall_s)
        except ProcessDiedError as error:
            raise JudgeFailedError(f"the math judge {error}") from error
        self.gave_last_answer = False
        """Whether the child answers no further question: its memory is full."""
        if "failed" in self._process.first:
            self.close()
            raise ConfigError(
                f"answers cannot be judged: {self._process.first['failed']}; install math-verify, "
                "or name another reward"
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the child has ended, so that no question can be written."""
        return self._process.has_ended

    def ask(self, answer: str, reference: str, timeout_s: float) -> bool:
        """Return whether `answer` equals `reference`.

        Raises:
            JudgeTimeoutError, JudgeDiedError: no verdict; this judge cannot be used further.
        """
        question = {"answer": answer, "reference": reference, "timeout_s": timeout_s}
        try:
            reply = self._process.ask(question)
        except ProcessTimeoutError as error:
            raise JudgeTimeoutError("the comparison was ended") from error
        except ProcessDiedError as error:
            raise JudgeDiedError from error
        self.gave_last_answer = bool(reply.get("last"))
        return bool(reply["equal"])

    def kill(self) -> None:
        """End the child at once, from any thread; a waiting `ask` raises JudgeDiedError."""
        self._process.kill()

    def close(self) -> None:
        self._process.close()
