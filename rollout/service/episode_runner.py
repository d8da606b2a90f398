"""Plays a workflow: one episode, one prompt's group, many prompts at once. The same for training
and for evaluation.

Whatever happens inside a play is data: what it raised, or that it took too long, stands on its
episode, and the others go on. Only a broken engine is no episode's fault and ends the whole play.
Knows nothing of orders, leases or the store.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rollout.agents.episode_time import EpisodeLimit, episode_limit
from rollout.agents.seeds import derived_seed
from rollout.agents.workflow import Agent, Calls
from rollout.engines.engine import EngineFailedError
from rollout.service.agent_pool import AgentPool
from storage.records.rollouts import Episode, Group, Prompt

T = TypeVar("T")
Seen = Callable[[Episode], None]
"""Told of every episode as soon as it is over."""

ERROR_CHARS_MAX = 500


async def play_prompts(
    cast: AgentPool, prompts: Sequence[Prompt], samples: int, seed: int, seen: Seen | None = None
) -> tuple[Group, ...]:
    """`samples` episodes of each prompt, in the order of `prompts`. Raises EngineFailedError, and
    nothing for a failed episode.

    The random numbers of a request follow from (seed, index of the prompt, sample, number of the
    call in its episode).
    """
    plays = [
        play_group(cast, prompt, samples, derived_seed(seed, index), seen)
        for index, prompt in enumerate(prompts)
    ]
    return tuple(await _together(plays))


async def play_group(
    cast: AgentPool, prompt: Prompt, samples: int, seed: int, seen: Seen | None = None
) -> Group:
    """`samples` episodes of one prompt, all at once as far as the cast has places."""
    plays = [
        play_episode(cast, prompt, derived_seed(seed, sample), seen) for sample in range(samples)
    ]
    return Group(prompt, tuple(await _together(plays)))


async def play_episode(
    cast: AgentPool, prompt: Prompt, seed: int, seen: Seen | None = None
) -> Episode:
    """One play. Its time runs from when it gets a place, except while a judge is waited for; a
    workflow that raises or overruns gives an episode with `error`.
    """
    async with cast.place():
        calls = Calls()
        agents = {role: Agent(player, seed, calls) for role, player in cast.players.items()}
        limit: EpisodeLimit | None = None
        start_s = time.perf_counter()
        try:
            async with episode_limit(cast.timeout_s) as limit:
                episode = _checked(await cast.workflow.play(prompt, agents))
        except EngineFailedError:
            raise
        except (
            Exception
        ) as error:  # a rollout's own failure, whatever it is, is data on its episode
            cut = isinstance(error, TimeoutError) and limit is not None and limit.is_over
            message = (
                f"timeout after {cast.timeout_s:g} s" if cut else f"{type(error).__name__}: {error}"
            )
            episode = Episode(sequences=(), reward=0.0, error=message[:ERROR_CHARS_MAX])
        episode = replace(episode, seconds=time.perf_counter() - start_s)
    if seen is not None:
        seen(episode)
    return episode


def _checked(episode: object) -> Episode:
    """What a workflow returned, fit to be stored: numbers plain and finite, the first sequence
    marked.
    """
    if not isinstance(episode, Episode):
        raise TypeError(f"the workflow returned {type(episode).__name__}, not an Episode")
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


def _finite(what: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"the workflow's {what} is {value}; it must be a finite number")
    return float(value)


async def _together(plays: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; when one raises, the others are cancelled and its error is raised
    itself, not in a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(play) for play in plays]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
