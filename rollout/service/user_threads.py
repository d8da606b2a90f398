"""The default executor of an event loop that runs users' code: `asyncio.to_thread` in a workflow.

A call that never returns keeps its thread until the process ends. Neither the end of the event loop
nor the end of the process waits for it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

USER_THREADS_MAX = 64
"""Maximum concurrent calls of users' code; further ones wait until one returns."""


class UserThreads(ThreadPoolExecutor):
    """An executor with daemon threads: Python waits at its exit for those of the base class.

    Event loops accept only a ThreadPoolExecutor. A thread ends when no call waits.
    """

    def __init__(self, threads_max: int = USER_THREADS_MAX) -> None:
        super().__init__(threads_max)
        self._threads_max = threads_max
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._calls_lock = threading.Lock()
        self._num_running = 0
        self._was_full = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()
        with self._calls_lock:
            if self._num_running < self._threads_max:
                threading.Thread(target=self._run, name="user", daemon=True).start()
                self._num_running += 1
            elif not self._was_full:
                self._was_full = True
                log.warning(
                    "%d calls of asyncio.to_thread by the workflow are in progress, and further "
                    "ones wait; a call that never returns keeps its thread: give it a time limit",
                    self._threads_max,
                )
            self._calls.append((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the calls that have not begun; wait for none."""
        with self._calls_lock:
            waiting, self._calls = self._calls, deque()
        for future, _ in waiting:
            future.cancel()

    def _run(self) -> None:
        while True:
            with self._calls_lock:
                if not self._calls:
                    self._num_running -= 1
                    return
                future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # the caller's: it is raised where the call is awaited
                future.set_exception(error)
            else:
                future.set_result(result)
