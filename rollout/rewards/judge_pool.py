"""A pool of child processes that judge answers, started on demand and replaced when lost.

    equal() ──▶ cached verdicts ──▶ questions in progress ──▶ thread ──▶ child (`math_judge.py`)

Equal questions are judged once, even if many samples of a group give the same answer. Usable from
any thread and any event loop.
"""

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from rollout.rewards.judge_process import Judge, JudgeDiedError, JudgeFailedError, JudgeTimeoutError

JUDGES_MAX: Final = 2
"""Most child processes of one pool."""
ATTEMPTS_MAX: Final = 2
"""Most attempts at one question whose child dies. A child that died before is no attempt."""
VERDICTS_MAX: Final = 10_000
"""Most cached verdicts. Timeouts and failures are not cached."""
CLOSED: Final = "the pool of judges was closed before the answer was judged"

Question = tuple[str, str]
"""(answer, reference)"""


class JudgePool:
    """At most `judges_max` children, one question each; further questions wait in a queue."""

    def __init__(
        self, timeout_s: float, judges_max: int = JUDGES_MAX, verdicts_max: int = VERDICTS_MAX
    ) -> None:
        """`timeout_s`: limit of a comparison's CPU seconds; time in the queue does not count."""
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
        """Return whether `answer` and `reference` are equal.

        Raises:
            JudgeTimeoutError, JudgeFailedError: there is no verdict; the latter also once the
                pool is closed.
            ConfigError: math-verify is not installed.
        """
        question = answer, reference
        with self._lock:
            if question in self._verdicts:
                self._verdicts.move_to_end(question)
                return self._verdicts[question]
            verdict = self._in_progress.get(question)
            if verdict is None:
                if self._closed:
                    raise JudgeFailedError(CLOSED)
                verdict = self._in_progress[question] = self._threads.submit(self._judge, question)
        # The shield: a cancelled caller must not cancel the verdict for the others.
        return await asyncio.shield(asyncio.wrap_future(verdict))

    def close(self) -> None:
        """End all children; drop the queue, and fail the questions in progress."""
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
            verdict = self._ask(question)
            with self._lock:
                self._verdicts[question] = verdict
                while len(self._verdicts) > self._verdicts_max:
                    self._verdicts.popitem(last=False)
            return verdict
        finally:
            with self._lock:
                del self._in_progress[question]

    def _ask(self, question: Question) -> bool:
        for attempt in range(ATTEMPTS_MAX):
            if self._closed:
                raise JudgeFailedError(CLOSED)
            judge = self._take(is_new=attempt > 0)  # a used child may have had too little memory
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
            except BaseException:  # its answer would be taken for that to the next question
                self._drop(judge)
                raise
            if judge.gave_last_answer:
                self._drop(judge)
                return verdict
            with self._lock:
                self._busy.discard(judge)
                self._idle.append(judge)
            return verdict
        raise JudgeFailedError(f"{ATTEMPTS_MAX} judges died over one question")

    def _take(self, is_new: bool) -> Judge:
        """Return an idle child that lives, or a new one."""
        judge = None if is_new else self._take_idle()
        while judge is not None and judge.has_ended:
            judge.close()
            judge = self._take_idle()
        judge = judge or Judge()
        with self._lock:
            self._busy.add(judge)
            if self._closed:
                judge.kill()
        return judge

    def _take_idle(self) -> Judge | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _drop(self, judge: Judge) -> None:
        with self._lock:
            self._busy.discard(judge)
        judge.close()
