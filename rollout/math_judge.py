"""The child process that compares mathematical answers with math-verify: `python -m rollout.math_judge`.

    parent ──{"answer": "\\\\frac12", "reference": "0.5", "timeout_s": 5.0}──▶ child, in its main thread
           ◀──{"equal": true}  or  {"timeout": true}──

One JSON object a line. The first line the child writes is `{"ready": true}`, or `{"failed": reason}` before it leaves.
It lives until its standard input ends, so it dies with its parent. math-verify can compute for ever, in Python and in
C: a Python signal ends the first, the kernel ends the second, and a limit on memory ends what would eat the machine.
"""

import json
import os
import resource
import signal
import sys
from types import FrameType
from typing import Any, Final, TextIO

MEMORY_BYTES_MAX: Final = 2 << 30
GRACE_CPU_S: Final = 1.0
"""CPU seconds beyond the timeout after which the kernel ends a child that no Python signal can reach."""


class Overrun(BaseException):
    """The comparison took too long. Not an Exception: math-verify swallows those."""


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the libraries print must not end up among the replies
    _limit_memory()
    signal.signal(signal.SIGALRM, _overrun)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches children too; theirs is to wait for the parent
    try:
        import math_verify  # noqa: F401 -- the import is what takes time; the comparisons then start at once
    except ImportError as error:
        _reply(replies, {"failed": str(error)})
        return
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _reply(replies, _judged_within(request["timeout_s"], request["answer"], request["reference"]))


def equal(answer: str, reference: str) -> bool:
    """Whether two LaTeX expressions mean the same, by math-verify; False for what it cannot read. Has no timeout
    itself."""
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    gold = parse(f"\\boxed{{{reference}}}", latex, parsing_timeout=None)
    given = parse(f"\\boxed{{{answer}}}", latex, parsing_timeout=None)
    return bool(verify(gold, given, timeout_seconds=None))


def _judged_within(timeout_s: float, answer: str, reference: str) -> dict[str, Any]:
    try:
        signal.setitimer(signal.ITIMER_PROF, timeout_s + GRACE_CPU_S)  # no handler: the kernel's default ends the process
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            return {"equal": equal(answer, reference)}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except Overrun:
        return {"timeout": True}
    except Exception:  # math-verify and sympy raise anything at all for what a model wrote; no such answer is equal
        return {"equal": False}


def _overrun(_signal: int, _frame: FrameType | None) -> None:
    raise Overrun


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_BYTES_MAX:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, hard))


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
