"""Waiting in tests for events that are expected soon, with a long limit because a machine may be
slow. Only a failing test waits long.
"""

import time
from collections.abc import Callable

PATIENCE_S = 840.0
"""Less than the timeout of a test (`pyproject.toml`), so that a failing one says what it waited
for.
"""


def until(true: Callable[[], bool], pause_s: float = 0.01) -> None:
    """Wait for an effect of a thread or another process."""
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end_s:
            raise AssertionError(f"it did not happen within {PATIENCE_S:g} s")
        time.sleep(pause_s)
