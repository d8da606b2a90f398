"""Reports of code that blocks an event loop: users' code that computes without an `await`.

Nothing can interrupt it. Meanwhile no lease is renewed and no episode is cut; so a person must
learn where it is.
"""

import asyncio
import logging
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

BLOCKED_S = 30.0
"""How long an event loop may be blocked before it is reported."""
POLL_INTERVAL_S = 1.0
"""Pause between two polls of an event loop."""
ASTRAFLOW = Path(__file__).parents[2]
LIBRARIES = (
    "<",
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib", "scripts")),
    *(
        f"{ASTRAFLOW / room}{os.sep}"
        for room in ("storage", "rollout", "tasks", "flows", "deployments")
    ),
)
"""Prefixes of the files that a person did not write: of Python, installed packages, AstraFlow."""
ADVICE = "; code of a workflow or reward must await, or call asyncio.to_thread"


@contextmanager
def reported_blocks(
    loop: asyncio.AbstractEventLoop, report: Callable[[str], None]
) -> Iterator[None]:
    """Report when `loop`, which runs in this thread within the block, is blocked for BLOCKED_S.

    `report` gets the innermost line of users' code, or else of all code, and an empty text when
    the event loop continues. It is called from another thread. The log has the whole stack.
    """
    thread, ended = threading.get_ident(), threading.Event()
    watch = threading.Thread(
        target=_watch, args=(loop, thread, ended, report), name="blocked-loop", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        ended.set()


def _watch(
    loop: asyncio.AbstractEventLoop,
    thread: int,
    ended: threading.Event,
    report: Callable[[str], None],
) -> None:
    while not ended.wait(POLL_INTERVAL_S):
        answered = threading.Event()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return  # it is closed
        if answered.wait(BLOCKED_S) or ended.is_set():
            continue
        stack = traceback.extract_stack(sys._current_frames().get(thread))
        log.warning(
            "code has blocked the event loop for %g s:\n%s", BLOCKED_S, "".join(stack.format())
        )
        report(note(stack))
        while not answered.wait(POLL_INTERVAL_S):
            if ended.is_set():
                return
        report("")


def note(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return what blocks an event loop whose thread has this stack, the innermost frame last."""
    own = [frame for frame in stack if not frame.filename.startswith(LIBRARIES)]
    frame = (own or stack)[-1]
    return (
        f"blocked for {BLOCKED_S:g} s by {frame.filename}, line {frame.lineno}, in {frame.name}: "
        f"no lease is renewed, so others take the orders{ADVICE if own else ''}"
    )
