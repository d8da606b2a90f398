"""A few child processes that judge answers: started when first needed, replaced when lost.

    await equal(…) ──▶ verdicts kept ──▶ questions in progress ──▶ a thread of the pool ──▶ child (`math_judge.py`)

The same question is judged once, however many samples of a group give the same answer. Works from
any thread and any event loop. Knows nothing of prompts and rewards.
"""

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from rollout.rewards.judge_process import Judge, JudgeDiedError, JudgeFailedError, JudgeTimeoutError

JUDGES_MAX: Final = 2
"""Child processes of one pool."""
ASKS_MAX: Final = 2
"""How often one question is asked when the child dies over it."""
VERDICTS_MAX: Final = 10_000
"""Verdicts that are kept. Timeouts and failures are not kept."""

Question = tuple[str, str]
"""(answer, reference)"""


class JudgePool:
    """At most `judges_max` children, each working at one question at a time; further questions wait
    in a queue.
    """

    def __init__(
        self, timeout_s: float, judges_max: int = JUDGES_MAX, verdicts_max: int = VERDICTS_MAX
    ) -> None:
        """`timeout_s`: CPU seconds that one comparison may use in its child. Time in the queue does
        not count.
        """
        self._timeout_s = timeout_s
        self._verdicts_max = verdicts_max
        self._threads = ThreadPoolExecutor(judges_max, thread_name_prefix="math-judge")
        self._lock = threading.Lock()
        self._idle: list[Judge] = []
        self._busy: set[Judge] = set()
        self._verdicts: OrderedDict[Question, bool] = OrderedDict()
        self._in_progress: dict[Question, Future[bool]] = {}
        self._closed = False

    async def equal(self, answer: str, reference: str) -> bool:
        """Whether `answer` means what `reference` means.

        Raises:
            JudgeTimeoutError, JudgeFailedError: there is no verdict.
            ConfigError: math-verify is not installed.
        """
        question = answer, reference
        with self._lock:
            if question in self._verdicts:
                self._verdicts.move_to_end(question)
                return self._verdicts[question]
            verdict = self._in_progress.get(question)
            if verdict is None:
                verdict = self._in_progress[question] = self._threads.submit(self._judge, question)
        return await asyncio.shield(
            asyncio.wrap_future(verdict)
        )  # one who gives up must not cancel it for the others

    def close(self) -> None:
        """End all children; questions in the queue are dropped, and those in progress fail."""
        with self._lock:
            self._closed = True
            for judge in self._busy:
                judge.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for judge in self._idle:
            judge.close()
        self._idle.clear()

    def _judge(self, question: Question) -> bool:
        try:
            verdict = self._asked(question)
            with self._lock:
                self._verdicts[question] = verdict
                while len(self._verdicts) > self._verdicts_max:
                    self._verdicts.popitem(last=False)
            return verdict
        finally:
            with self._lock:
                del self._in_progress[question]

    def _asked(self, question: Question) -> bool:
        for _ in range(ASKS_MAX):
            if self._closed:
                break
            judge = self._take()
            try:
                verdict = judge.ask(*question, self._timeout_s)
            except JudgeDiedError:
                self._drop(judge)
                continue
            except JudgeTimeoutError:
                self._drop(judge)
                raise JudgeTimeoutError(
                    f"no verdict within {self._timeout_s:g} s of CPU time"
                ) from None
            except BaseException:
                self._drop(judge)
                raise
            with self._lock:
                self._busy.discard(judge)
                self._idle.append(judge)
            return verdict
        raise JudgeFailedError(f"{ASKS_MAX} judges died over one question")

    def _take(self) -> Judge:
        with self._lock:
            judge = self._idle.pop() if self._idle else None
        judge = judge or Judge()
        with self._lock:
            self._busy.add(judge)
            if self._closed:
                judge.kill()
        return judge

    def _drop(self, judge: Judge) -> None:
        with self._lock:
            self._busy.discard(judge)
        judge.close()
