"""Run a workflow: one episode, the group of one prompt, or many prompts concurrently.

    run_prompts ──▶ run_group (one per prompt) ──▶ run_episode (one per sample) ──▶ workflow.play

Used for training and for evaluation. Any error within an episode is data on the episode, with its
kind, and the other episodes continue. Only a broken engine raises.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from rollout.agents.episode_time import EpisodeLimit, episode_limit
from rollout.agents.failures import (
    EnvironmentFailedError,
    ModelFailedError,
    RewardFailedError,
    ToolFailedError,
)
from rollout.agents.seeds import derived_seed
from rollout.agents.workflow import Agent, CallCounter
from rollout.engines.engine import EngineFailedError, GenerationAbortedError
from rollout.rewards.judge_process import JudgeTimeoutError
from rollout.service.agent_pool import AgentPool
from storage.errors import AstraFlowError, ConfigError
from storage.records.rollouts import Episode, FailureKind, Group, Prompt

T = TypeVar("T")
OnEpisode = Callable[[Episode], None]
"""Called with every episode when it ends."""

ERROR_CHARS_MAX = 500

FAILURE_KINDS: Final[tuple[tuple[type[Exception], FailureKind], ...]] = (
    (ModelFailedError, FailureKind.MODEL),
    (EnvironmentFailedError, FailureKind.ENVIRONMENT),
    (ToolFailedError, FailureKind.TOOL),
    (JudgeTimeoutError, FailureKind.TIMEOUT),
    (RewardFailedError, FailureKind.REWARD),
    (TimeoutError, FailureKind.TIMEOUT),
    (GenerationAbortedError, FailureKind.INFRASTRUCTURE),
    (ConnectionError, FailureKind.INFRASTRUCTURE),
    (ConfigError, FailureKind.WORKFLOW_BUG),
    (AstraFlowError, FailureKind.INFRASTRUCTURE),
    (Exception, FailureKind.WORKFLOW_BUG),
)
"""Kind of the failure for each class of exception; the first class that matches decides."""


async def run_prompts(
    pool: AgentPool,
    prompts: Sequence[Prompt],
    samples: int,
    seed: int,
    on_episode: OnEpisode | None = None,
) -> tuple[Group, ...]:
    """Run `samples` episodes of each prompt; return the groups in the order of `prompts`.

    The random numbers of a request follow from (seed, index of the prompt, sample, number of the
    call in its episode).

    Raises:
        EngineFailedError: an engine broke. A failed episode raises nothing.
    """
    groups = [
        run_group(pool, prompt, samples, derived_seed(seed, index), on_episode)
        for index, prompt in enumerate(prompts)
    ]
    return tuple(await _gather(groups))


async def run_group(
    pool: AgentPool,
    prompt: Prompt,
    samples: int,
    seed: int,
    on_episode: OnEpisode | None = None,
) -> Group:
    """Run `samples` episodes of one prompt, concurrently as far as the pool has slots."""
    episodes = [
        run_episode(pool, prompt, derived_seed(seed, sample), on_episode)
        for sample in range(samples)
    ]
    return Group(prompt, tuple(await _gather(episodes)))


async def run_episode(
    pool: AgentPool, prompt: Prompt, seed: int, on_episode: OnEpisode | None = None
) -> Episode:
    """Run one episode. A workflow that raises or exceeds the time limit gives a failed episode.

    The time limit begins with the episode's slot in the pool; waiting for a judge does not count.
    """
    async with pool.slot():
        calls = CallCounter()
        agents = {role: Agent(player, seed, calls) for role, player in pool.players.items()}
        limit: EpisodeLimit | None = None
        start_s = time.perf_counter()
        try:
            async with episode_limit(pool.timeout_s) as limit:
                episode = _checked(await pool.workflow.play(prompt, agents))
        except EngineFailedError:
            raise
        except Exception as error:  # any error of an episode is data on the episode
            is_cut = isinstance(error, TimeoutError) and limit is not None and limit.is_over
            message = (
                f"timeout after {pool.timeout_s:g} s"
                if is_cut
                else f"{type(error).__name__}: {error}"
            )
            episode = Episode(
                sequences=(),
                reward=0.0,
                error=message[:ERROR_CHARS_MAX],
                failure_kind=failure_kind(error),
            )
        episode = replace(episode, seconds=time.perf_counter() - start_s)
    if on_episode is not None:
        on_episode(episode)
    return episode


def failure_kind(error: Exception) -> FailureKind:
    """Return the kind of an episode's failure, by the class of the exception that ended it."""
    return next(kind for raised, kind in FAILURE_KINDS if isinstance(error, raised))


def _checked(episode: object) -> Episode:
    """Check and normalize what a workflow returned: plain finite numbers, first sequence marked."""
    if not isinstance(episode, Episode):
        raise TypeError(f"the workflow returned {type(episode).__name__}, not an Episode")
    if (episode.error is None) != (episode.failure_kind is None):
        raise ValueError(
            "the workflow returned an episode with only one of error and failure_kind; "
            "a failed episode has both"
        )
    sequences = tuple(
        replace(
            sequence,
            reward=_finite(f"reward of sequence {index}", sequence.reward),
            starts_episode=index == 0,
        )
        for index, sequence in enumerate(episode.sequences)
    )
    metrics = {name: _finite(f"metric {name}", value) for name, value in episode.metrics.items()}
    return replace(
        episode, sequences=sequences, reward=_finite("reward", episode.reward), metrics=metrics
    )


def _finite(noun: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"the workflow's {noun} is {value}; it must be a finite number")
    return float(value)


async def _gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first error cancels the others, and is raised ungrouped."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
