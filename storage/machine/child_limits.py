"""The child's side of a `LimitedProcess`: its limits, and how it answers.

    parent ──{"cpu_s": 30.0, "call": "text", "tokens": [349, 358]}──▶ child: serve(answer)
           ◀──{"result": "approve"}──────────────────────────────────
           ◀──{"error": "ConfigError", "message": "the base model …"}

The kernel ends a process that exceeds its CPU time with SIGPROF, by which the parent recognizes a
timeout. CPU time does not depend on the machine's load.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, Final, TextIO

import psutil

MEMORY_BYTES_MAX: Final = 2 << 30
"""Address space beyond that of the imported libraries, which depends on the machine."""
ANSWER_CHARS_MAX: Final = 1 << 23
"""Of an answer as JSON, such as a million tokens: the parent has no limit of memory."""
START_CPU_S: Final = 240.0
"""CPU seconds after which the kernel ends a child that is still importing."""


def open_replies() -> TextIO:
    """Return the stream of the answers. What libraries print is not among them from here on.

    Called before the imports, whose CPU time is limited.
    """
    limit_cpu(START_CPU_S)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Ctrl-C in a terminal reaches children too; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return replies


def reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def limit_cpu(seconds: float) -> None:
    """Make the kernel end this process after `seconds` of CPU time; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF has no handler here


def limit_memory(bytes_max: int) -> None:
    """Refuse this process more than `bytes_max` of address space."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > bytes_max:
        resource.setrlimit(resource.RLIMIT_AS, (bytes_max, hard))


def address_space_bytes() -> int:
    """Return the address space that this process has taken so far."""
    return int(psutil.Process().memory_info().vms)


def serve(
    answer: Callable[..., Any],
    replies: TextIO,
    errors: tuple[type[Exception], ...],
    answer_chars_max: int = ANSWER_CHARS_MAX,
) -> None:
    """Answer each line of the standard input by `answer(**question)`, until it ends.

    Called after the imports. `cpu_s` of a question is the limit of its CPU time; without it,
    `answer` sets one. The parent gets the names of `errors`; others count as the first of them.
    Where the memory is full, the process ends without an answer: that of a new one may suffice.
    """
    limit_memory(address_space_bytes() + MEMORY_BYTES_MAX)
    limit_cpu(0)
    reply(replies, {"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        limit_cpu(question.pop("cpu_s", 0.0))
        try:
            message = {"result": answer(**question)}
        except MemoryError:
            return
        except Exception as error:  # the libraries raise anything for what a stranger wrote
            known = next((each for each in errors if isinstance(error, each)), None)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            message = {"error": (known or errors[0]).__name__, "message": text}
        written = json.dumps(message)
        if len(written) > answer_chars_max:
            text = f"the result has more than {answer_chars_max:,} characters"
            written = json.dumps({"error": errors[0].__name__, "message": text})
        limit_cpu(0)
        replies.write(written + "\n")
        replies.flush()
