"""Champion and candidate play the same problems with the same seeds, for the gate.

    problems of each data set ─┐
    champion's versions ───────┼─▶ outcomes under their key ──stored──▶ read
    candidate's recipe ────────┘                            ──absent──▶ play, create once

Both teams play the workflow of the candidate's recipe, with its reward, engines and limits. The
weights and the tokenizer of each version are read from its own run. What is stored is not played
again: a contest that was killed continues, and a champion that stays is played once.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from rollout.engines.engine import EngineFailedError
from rollout.placement import worker_gpus
from rollout.service import event_loop
from rollout.service.agent_pool import AgentPool
from rollout.service.episode_runner import run_prompts
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.machine.gpu_locks import held_gpus
from storage.promotion import outcomes
from storage.promotion.outcomes import PlayConditions, TeamOutcomes
from storage.records.promotions import Team
from storage.records.rollouts import Episode, FailureKind, Group, Prompt
from storage.store.object_store import ObjectStore
from tasks import held_out_play
from tasks.held_out_play import Versions
from tasks.promotion.contest_inputs import (
    PlayedVersion,
    conditions,
    gate_settings,
    prompts_by_dataset,
    refuse_retired,
    versions_of,
)
from tasks.promotion.gate.outcomes import PairedOutcomes
from tasks.recipes.placement import evaluation_engine
from tasks.recipes.run_config import RunConfig

GATE_SEED = 20_260_917
"""The seed of every contest. It is not that of the evaluations, which selected the candidate."""
FAILED_MAX = 0.1
"""Share of episodes that may fail for other reasons than the policies' answers. Above it nothing is
stored: outcomes are created once, and an outage would be the team's result for ever.
"""
Side: TypeAlias = Literal["champion", "candidate"]
SIDES: tuple[Side, ...] = ("champion", "candidate")


@dataclass(frozen=True)
class PlayProgress:
    """How far one team is on one data set. Example: `PlayProgress("gsm8k", "champion", 7, 500)`."""

    dataset: str
    side: Side
    episodes: int
    """Played ones, or all of them where the outcomes are stored."""
    episodes_all: int


OnProgress: TypeAlias = Callable[[PlayProgress], None]


@dataclass(frozen=True)
class _Part:
    """One team on one data set."""

    side: Side
    prompts: Sequence[Prompt]
    conditions: PlayConditions

    @property
    def place(self) -> tuple[Side, str]:
        return self.side, self.conditions.dataset

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(prompt.id for prompt in self.prompts)

    @property
    def episodes(self) -> int:
        return len(self.prompts) * self.conditions.samples

    def progress(self, episodes: int) -> PlayProgress:
        return PlayProgress(self.conditions.dataset, self.side, episodes, self.episodes)


def paired_outcomes(
    store: ObjectStore,
    name: str,
    champion: Team,
    candidate: Team,
    config: RunConfig,
    on_progress: OnProgress = lambda progress: None,
    check: Callable[[], None] = lambda: None,
    seed: int = GATE_SEED,
) -> tuple[PairedOutcomes, ...]:
    """Return the outcomes of both teams on each data set of the gate; those not stored are played.

    Sample s of a problem has one seed for both teams, so equal teams have equal outcomes.

    Args:
        name: the promotion log in whose folder outcomes are stored.
        champion: the team to beat. Its versions may be of other runs than the candidate's.
        config: of the candidate's run; without `gate`, the defaults of that section.
        on_progress: called for each team and data set at first, and after each of their episodes.
        check: called before each team's data sets and after each episode. What it raises ends the
            contest; complete data sets are stored.

    Raises:
        ConfigError: a recipe without evaluation, teams of other policies, problems that cannot be
            read or stored, versions that do not exist or that gc has deleted, an engine that
            failed, as with weights that are no numbers, or too many failed episodes.
        CorruptError: a version has other weights than its team names, or an object is damaged.
        GpuBusyError: another process uses a GPU of the engines.
    """
    gate, evaluation = gate_settings(config)
    versions = {
        side: versions_of(store, side, team, config)
        for side, team in zip(SIDES, (champion, candidate), strict=True)
    }
    own_run = next(iter(versions["candidate"].values())).run
    prompts = prompts_by_dataset(gate, evaluation, own_run)
    parts = [
        _Part(side, problems, conditions(dataset, problems, versions[side], config, seed))
        for side in SIDES
        for dataset, problems in prompts.items()
    ]
    found = {part.place: outcome for part in parts if (outcome := _stored(store, name, part))}
    for part in parts:
        on_progress(part.progress(part.episodes if part.place in found else 0))
    engine = evaluation_engine(config)
    gpus = worker_gpus(engine, tuple(config.policies))
    for side in SIDES:
        if missing := [part for part in parts if part.side == side and part.place not in found]:
            refuse_retired(side, versions[side])
            with held_gpus(f"the gate of {name}", gpus, engine.device_share):
                playing = _played(store, name, missing, versions[side], config, on_progress, check)
                try:
                    found |= event_loop.run(playing)
                except EngineFailedError as error:
                    raise ConfigError(f"the {side} cannot be played: {error}") from error
    return tuple(
        PairedOutcomes.of(
            dataset,
            [prompt.id for prompt in problems],
            champion=found["champion", dataset].accuracies,
            candidate=found["candidate", dataset].accuracies,
        )
        for dataset, problems in prompts.items()
    )


def _stored(store: ObjectStore, name: str, part: _Part) -> TeamOutcomes | None:
    try:
        stored = outcomes.read(store, name, part.conditions)
    except NotFoundError:
        return None
    if stored.problems != part.problems:
        raise CorruptError(
            f"{store.url}/{outcomes.key(name, part.conditions)} has other problems than its "
            "digest; put it back from a copy, or delete it to have it played again"
        )
    return stored


async def _played(
    store: ObjectStore,
    name: str,
    parts: Sequence[_Part],
    versions: Mapping[str, PlayedVersion],
    config: RunConfig,
    on_progress: OnProgress,
    check: Callable[[], None],
) -> dict[tuple[Side, str], TeamOutcomes]:
    """Play parts of one team with one pool of agents; each is stored before the next begins."""
    _, evaluation = gate_settings(config)
    loaded: Versions = {
        policy: (each.run, each.manifest.version) for policy, each in versions.items()
    }
    played = {}
    check()
    async with held_out_play.pool_with(loaded, config, evaluation) as pool:
        for part in parts:
            outcome = await _play(pool, part, on_progress, check)
            played[part.place] = await in_system_thread(_keep, store, name, part, outcome)
    return played


async def _play(
    pool: AgentPool, part: _Part, on_progress: OnProgress, check: Callable[[], None]
) -> TeamOutcomes:
    episodes = 0

    def on_episode(episode: Episode) -> None:
        nonlocal episodes
        episodes += 1
        on_progress(part.progress(episodes))
        check()

    started_s = time.monotonic()  # the wall clock may be set back
    samples, seed = part.conditions.samples, part.conditions.seed
    groups = await run_prompts(pool, part.prompts, samples, seed, on_episode)
    _refuse_failures(part, groups)
    return TeamOutcomes(
        conditions=part.conditions,
        problems=part.problems,
        accuracies=np.stack([held_out_play.results(each.episodes, "final") for each in groups]),
        created_s=time.time(),
        seconds=time.monotonic() - started_s,
    )


def _refuse_failures(part: _Part, groups: Sequence[Group]) -> None:
    """Raise ConfigError where more than FAILED_MAX of the episodes failed for other reasons than
    the policies' answers.
    """
    errors = [
        f"{episode.failure_kind}: {episode.error}"
        for group in groups
        for episode in group.episodes
        if episode.error is not None and episode.failure_kind is not FailureKind.MODEL
    ]
    if len(errors) > FAILED_MAX * part.episodes:
        raise ConfigError(
            f"{len(errors):,} of {part.episodes:,} episodes of the {part.side} on "
            f"{part.conditions.dataset} failed, the first with {errors[0]}; nothing is stored or "
            "decided, and the next call plays them again: correct the cause first"
        )


def _keep(store: ObjectStore, name: str, part: _Part, played: TeamOutcomes) -> TeamOutcomes:
    """Store what was played; of two writers the first one's outcomes are kept and returned."""
    try:
        outcomes.create(store, name, played)
    except ConflictError:
        return _stored(store, name, part) or played
    return played
