"""Run a workflow: one episode, the group of one prompt, or many prompts concurrently.

    run_prompts ──▶ run_group (one per prompt) ──▶ run_episode (one per sample) ──▶ workflow.play

Used for training and for evaluation. Any error within an episode is data on the episode, with its
kind, and the other episodes continue; so is an episode that cannot be stored. Only a broken engine
raises.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

from rollout.agents.episode_time import EpisodeLimit, episode_limit
from rollout.agents.seeds import derived_seed
from rollout.agents.workflow import Agent, CallCounter
from rollout.engines.engine import Engine, EngineFailedError
from rollout.service.agent_pool import AgentPool
from rollout.service.episode_failures import broken_engine, failed_episode, forget_variables
from rollout.service.event_loop import cancel, gather
from storage.errors import CorruptError
from storage.records.rollouts import Episode, Group, Prompt
from storage.records.rollouts import Sequence as TokenSequence
from storage.run.shard_checks import storable_episode

OnEpisode = Callable[[Episode], None]
"""Called with every episode when it ends."""


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
    return tuple(await gather(groups))


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
    return Group(prompt, tuple(await gather(episodes)))


async def run_episode(
    pool: AgentPool, prompt: Prompt, seed: int, on_episode: OnEpisode | None = None
) -> Episode:
    """Run one episode. A workflow that raises or exceeds the time limit gives a failed episode.

    The time limit begins with the episode's slot in the pool; waiting for a judge does not count.
    """
    async with pool.slot():
        limit: EpisodeLimit | None = None
        start_s = time.perf_counter()
        try:
            async with episode_limit(pool.timeout_s) as limit:
                episode = _checked(await _play(pool, prompt, seed), pool.engines)
        except BaseException as error:  # any error of an episode is data on the episode
            if isinstance(error, KeyboardInterrupt | GeneratorExit) or _is_cancelled(error):
                raise
            if broken := broken_engine(error):
                raise EngineFailedError(str(broken)) from error
            is_cut = isinstance(error, TimeoutError) and limit is not None and limit.is_over
            episode = failed_episode(error, pool.timeout_s if is_cut else None)
            forget_variables(error)
        episode = replace(episode, seconds=time.perf_counter() - start_s)
    if on_episode is not None:
        on_episode(episode)
    return episode


async def _play(pool: AgentPool, prompt: Prompt, seed: int) -> object:
    """Run the workflow, in a task of its own: cancellations within it are not the caller's.

    A workflow that ignores the caller's cancellation is abandoned after a while (`cancel`).
    """
    calls = CallCounter()
    agents = {role: Agent(player, seed, calls) for role, player in pool.players.items()}
    own_prompt = replace(prompt, fields=deepcopy(prompt.fields))  # the shard has the original

    async def play() -> object:
        return await pool.workflow.play(own_prompt, agents)

    task = asyncio.create_task(play(), name=f"the workflow {type(pool.workflow).__name__}")
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        if not await cancel([task]):
            raise
    return task.result()


def _is_cancelled(error: BaseException) -> bool:
    """Whether `error` is the cancellation of the current task, not of one that it awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _checked(episode: object, engines: Mapping[str, Engine]) -> Episode:
    """Check and normalize what a workflow returned, so that its shard can be stored and read."""
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
            temperature=_finite(f"temperature of sequence {index}", sequence.temperature),
            starts_episode=index == 0,
        )
        for index, sequence in enumerate(episode.sequences)
    )
    metrics = {name: _finite(f"metric {name}", value) for name, value in episode.metrics.items()}
    reward = _finite("reward", episode.reward)
    try:
        episode = storable_episode(
            replace(episode, sequences=sequences, reward=reward, metrics=metrics)
        )
    except CorruptError as error:
        raise ValueError(
            f"the workflow returned an episode that cannot be stored: {error}"
        ) from error
    for index, sequence in enumerate(episode.sequences):
        _check_weights(index, sequence, engines)
    return episode


def _check_weights(index: int, sequence: TokenSequence, engines: Mapping[str, Engine]) -> None:
    """Check that the weights which sampled the tokens of a sequence were loaded here."""
    for owner, policy in enumerate(sequence.policies):
        if policy not in engines:
            raise ValueError(
                f"sequence {index} of the workflow names the policy {policy}; the workflow's "
                f"policies are {', '.join(engines)}"
            )
        for version in set(sequence.versions[sequence.owners == owner].tolist()):
            try:
                engines[policy].digest(version)
            except KeyError:
                raise ValueError(
                    f"sequence {index} of the workflow names version {version} of {policy}, which "
                    "was not loaded here; use the versions of the answers"
                ) from None


def _finite(noun: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"the workflow's {noun} is {value}; it must be a finite number")
    return float(value)
