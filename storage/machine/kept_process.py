"""A child process that has read something untrusted, and answers questions about it.

KeptProcess(module, first) ──first, then questions──▶ LimitedProcess ──lost──▶ another one
"""

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from storage.machine.limited_process import LimitedProcess, ProcessDiedError, ProcessTimeoutError

ATTEMPTS_MAX: Final = 2
"""Children that may end without an answer to one question: the memory of a used one may be full, or
something else of the machine has ended it.
"""
KILL_INTERVAL_S: Final = 0.1


class KeptProcess:
    """A child of `child_limits.serve`, which is started with its first question. Usable from any
    thread, for one question at a time.
    """

    def __init__(self, module: str, first: dict[str, Any]) -> None:
        self._module, self.first = module, first
        self._child: LimitedProcess | None = None
        self._in_use = threading.Lock()
        """Held while the child is asked."""
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def ask(self, question: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a question; without one, to the first one. See `result`.

        A child that is lost is replaced, and asked both again. One that exceeds its CPU time is
        lost as well, and not asked again.

        Raises:
            ProcessTimeoutError, ProcessDiedError: no answer. The latter also after `close`.
            OSError: a process cannot be started.
        """
        with self._in_use:
            for _ in range(ATTEMPTS_MAX - 1):
                with suppress(ProcessDiedError):
                    return self._ask(question)
            return self._ask(question)

    def close(self) -> None:
        """End the child, from any thread; a question in progress gets ProcessDiedError."""
        self._is_closed = True
        while not self._in_use.acquire(timeout=KILL_INTERVAL_S):
            if (child := self._child) is not None:
                child.kill()
        self._drop()
        self._in_use.release()

    def _ask(self, question: dict[str, Any] | None) -> dict[str, Any]:
        try:
            if question is None or self._child is None or self._child.has_ended:
                self._drop()
                self._check_open()
                self._child = LimitedProcess(self._module)
                first = self._child.ask(self.first)
                if "error" in first:  # it has not read what later questions are about
                    self._drop()
                if question is None or "error" in first:
                    return first
            self._check_open()
            return self._child.ask(question)
        except (ProcessTimeoutError, ProcessDiedError):
            self._drop()
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise ProcessDiedError("it was closed")

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def answered(module: str, question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a new child to one question. Raises as `KeptProcess.ask`."""
    process = KeptProcess(module, question)
    try:
        return process.ask()
    finally:
        process.close()


def result(answer: dict[str, Any], errors: Iterable[type[Exception]]) -> Any:
    """Return the result of an answer of `child_limits.serve`; raise the error that it names."""
    if "error" in answer:
        raised = next(each for each in errors if each.__name__ == answer["error"])
        raise raised(answer["message"])
    return answer["result"]
