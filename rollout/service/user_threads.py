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
IDLE_S = 10.0
"""How long a thread waits for its next call: what users' code keeps in `threading.local`, such as a
client, serves many calls.
"""


class UserThreads(ThreadPoolExecutor):
    """An executor with daemon threads: Python waits at its exit for those of the base class.

    Event loops accept only a ThreadPoolExecutor. A thread that had no call for IDLE_S ends.
    """

    def __init__(self, threads_max: int = USER_THREADS_MAX) -> None:
        super().__init__(threads_max)
        self._threads_max = threads_max
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._num_threads = self._num_idle = 0
        self._was_full = self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()
        with self._changed:
            if self._num_idle > len(self._calls):
                self._changed.notify()
            elif self._num_threads < self._threads_max:
                threading.Thread(target=self._run, name="user", daemon=True).start()
                self._num_threads += 1
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
        with self._changed:
            waiting, self._calls = self._calls, deque()
            self._is_shut = True
            self._changed.notify_all()
        for future, _ in waiting:
            future.cancel()

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next call; False when there was none for IDLE_S, and the thread ends."""
        with self._changed:
            self._num_idle += 1
            self._changed.wait_for(lambda: self._calls or self._is_shut, IDLE_S)
            self._num_idle -= 1
            if not self._calls:
                self._num_threads -= 1
                return False
            future, call = self._calls.popleft()
        if not future.set_running_or_notify_cancel():
            return True
        try:
            result = call()
        except StopIteration as error:  # no asyncio future takes it: its awaiter would never wake
            wrapped = RuntimeError("a call in a thread raised StopIteration")
            wrapped.__cause__ = error
            future.set_exception(wrapped)
        except BaseException as error:  # the caller's: it is raised where the call is awaited
            future.set_exception(error)
        else:
            future.set_result(result)
        return True
