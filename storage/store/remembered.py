"""Readers of objects that never change, which views read every second.

    remembered(256)(read)(run, key) ──▶ value: kept
                                    ──▶ CorruptError after more than SLOW_S: kept for a while

A person may put a good copy in the place of a damaged object: it is read again then.
"""

import time
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Final, ParamSpec, TypeVar

from storage.errors import CorruptError

P = ParamSpec("P")
R = TypeVar("R")

SLOW_S: Final = 0.05
"""CPU seconds."""
RETRY_FACTOR: Final = 100.0
"""A slow object is read again after so many times the CPU time that it took: one part in a hundred
of a process's time, however often it is asked for.
"""


def remembered(num_max: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function of hashable arguments, which keeps `num_max` results."""

    def decorate(read: Callable[P, R]) -> Callable[P, R]:
        kept = lru_cache(num_max)(read)
        failed: dict[object, tuple[float, str]] = {}
        """Place → when it is read again, and why it could not be."""

        @wraps(read)
        def reader(*args: P.args, **kwargs: P.kwargs) -> R:
            place = (args, tuple(kwargs.items()))
            until_s, why = failed.get(place, (0.0, ""))
            if time.monotonic() < until_s:
                raise CorruptError(why)
            start_s = time.thread_time()
            try:
                return kept(*args, **kwargs)  # type: ignore[arg-type]  # they must be hashable
            except CorruptError as error:
                took_s = time.thread_time() - start_s
                if took_s > SLOW_S:
                    if len(failed) >= num_max:
                        failed.clear()
                    failed[place] = time.monotonic() + RETRY_FACTOR * took_s, str(error)
                raise

        return reader

    return decorate
