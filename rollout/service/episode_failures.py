"""What an exception that left a workflow means: a failed episode of a kind, or a broken engine.

The first member of an exception group decides its kind and its text. A broken engine is found
anywhere in an exception: in groups, and among the exceptions from which it follows.
"""

import asyncio
from collections.abc import Iterator
from typing import Final

from rollout.agents.failures import (
    EnvironmentFailedError,
    ModelFailedError,
    RewardFailedError,
    ToolFailedError,
    error_text,
)
from rollout.engines.engine import (
    EngineFailedError,
    GenerationAbortedError,
    RequestRefusedError,
)
from rollout.rewards.judge_process import JudgeTimeoutError
from storage.errors import AstraFlowError, ConfigError
from storage.records.rollouts import Episode, FailureKind

ERROR_CHARS_MAX = 500

FAILURE_KINDS: Final[tuple[tuple[type[BaseException], FailureKind], ...]] = (
    (ModelFailedError, FailureKind.MODEL),
    (EnvironmentFailedError, FailureKind.ENVIRONMENT),
    (ToolFailedError, FailureKind.TOOL),
    (JudgeTimeoutError, FailureKind.TIMEOUT),
    (RewardFailedError, FailureKind.REWARD),
    (TimeoutError, FailureKind.TIMEOUT),
    (GenerationAbortedError, FailureKind.INFRASTRUCTURE),
    (RequestRefusedError, FailureKind.INFRASTRUCTURE),
    (ConnectionError, FailureKind.INFRASTRUCTURE),
    (ConfigError, FailureKind.WORKFLOW_BUG),
    (AstraFlowError, FailureKind.INFRASTRUCTURE),
    (BaseException, FailureKind.WORKFLOW_BUG),
)
"""Kind of the failure for each class of exception; the first class that matches decides."""


def failed_episode(error: BaseException, timeout_s: float | None = None) -> Episode:
    """Return the episode that `error` ended; `timeout_s`: the time limit that it exceeded."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if timeout_s is not None:
        message = f"timeout after {timeout_s:g} s"
    elif isinstance(error, asyncio.CancelledError):
        message = "CancelledError: something that the workflow awaited was cancelled"
    else:
        message = error_text(error)
    kind = next(kind for raised, kind in FAILURE_KINDS if isinstance(error, raised))
    return Episode(sequences=(), reward=0.0, error=message[:ERROR_CHARS_MAX], failure_kind=kind)


def forget_variables(error: BaseException) -> None:
    """Free the variables of the calls that `error`, and those it follows from, left: tokens and
    texts, which cycles of references would keep until the next collection.

    The calls' frames are not cleared: some may belong to a task that goes on, such as a workflow's
    queue, which clearing would end.
    """
    for part in _chain(error):
        part.__traceback__ = None


def broken_engine(error: BaseException) -> EngineFailedError | None:
    """Return the failure of an engine that `error` is, groups, or follows from; None for none."""
    return next((part for part in _chain(error) if isinstance(part, EngineFailedError)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, those of its group, and those from which it follows."""
    pending: list[BaseException | None] = [error]
    seen = set[int]()
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        yield part
        seen.add(id(part))
        pending += [part.__cause__, part.__context__]
        if isinstance(part, BaseExceptionGroup):
            pending += part.exceptions
