"""The evaluation service: plays the held-out prompts with an exact vector of versions.

    versions exist ──▶ play every held-out prompt once ──▶ eval_samples/{versions}.arrow, then
                                                           evals/{versions}.arrow (created once)

One evaluation of `actor_and_verify` gives two accuracies on the same first attempts: of the solver
alone and of the team. This module uses neither Prefect nor MLflow.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from data_ops.prompts.frozen import stream_of
from rollout.placement import worker_gpus
from rollout.service import event_loop
from rollout.service.episode_runner import run_prompts
from storage.coordination.gpus_of_service import gpus_of_service
from storage.coordination.lifetime import Lifetime, StoppedError
from storage.errors import ConfigError, ConflictError, CorruptError
from storage.records.control import ServiceState, WaitReason
from storage.records.progress import EvaluationProgress
from storage.records.rollouts import Episode, Group
from storage.run import evaluations
from storage.run.evaluations import Evaluation
from storage.store.object_store import ObjectStore
from storage.weights import manifests
from tasks import held_out_play
from tasks.kept_episodes import keep
from tasks.recipes.placement import evaluation_engine
from tasks.recipes.run_config import HELD_OUT_MAX, EvaluationConfig, RunConfig

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
"""Pause between two polls for the next versions."""
EVALUATION_SEED = 20_260_515
"""The seed of every evaluation of every run: curves then differ by the weights alone."""

Evaluate = Callable[[Mapping[str, int]], bool]
"""Evaluates these versions. Returns False when the service must stop before the end."""


def evaluate_versions(
    run: ObjectStore,
    config: RunConfig,
    versions: Mapping[str, int],
    on_episode: Callable[[Episode], None] | None = None,
) -> Evaluation:
    """Play every held-out prompt once with these versions; store a sample, then the result.

    Returns the stored evaluation: of two evaluations of one vector the first is kept; this one, if
    that is damaged. `on_episode` is called after each episode.

    Raises:
        ConfigError: the prompts cannot be read, or are more than HELD_OUT_MAX.
        NotFoundError: a version does not exist.
        CorruptError: the bytes of a version do not have the digests in its manifest.
    """
    assert config.evaluation is not None, "no vector is due without an evaluation"
    started_s = time.monotonic()  # the wall clock may be set back
    groups = event_loop.run(_play(run, config, config.evaluation, versions, on_episode))
    seconds = time.monotonic() - started_s
    num_kept = keep(run, versions, groups, config.evaluation.kept_episodes)
    evaluation = _evaluation(groups, config, config.evaluation, versions, seconds, num_kept)
    try:
        evaluations.create(run, evaluation)
    except ConflictError:
        try:
            return evaluations.read(run, versions)
        except CorruptError as error:
            log.warning("the evaluation of %s is not stored: %s", _text(versions), error)
    return evaluation


def follow(
    lifetime: Lifetime,
    config: RunConfig,
    as_task: Callable[[Evaluate], Evaluate] = lambda evaluate: evaluate,
) -> None:
    """Evaluate every due vector as soon as its versions exist.

    Returns after the last vector, or when the service must stop, also in the middle of an
    evaluation. `as_task` may wrap the evaluation of one vector, to show it as a task.
    """
    run, heartbeat = lifetime.run, lifetime.heartbeat
    progress = _Progress(lifetime)
    engine = evaluation_engine(config)
    gpus = worker_gpus(engine, tuple(config.policies))

    def evaluate(versions: Mapping[str, int]) -> bool:
        try:
            with gpus_of_service(lifetime, gpus, engine.device_share) as are_held:
                if not are_held:
                    return False
                evaluate_versions(run, config, versions, progress)
        except StoppedError as error:
            log.info("the evaluation of %s is not completed: %s", _text(versions), error)
            return False
        return True

    for versions in config.evaluated_versions():
        try:
            with heartbeat.span("wait"):
                _wait_for(lifetime, versions)
        except StoppedError as error:
            log.info("%s are not evaluated: %s", _text(versions), error)
            return
        if evaluations.exists(run, versions):
            continue
        note = f"evaluating {_text(versions)}"
        heartbeat.update(state=ServiceState.WORKING, versions=dict(versions), note=note)
        with heartbeat.span("evaluate"):
            if not as_task(evaluate)(versions):
                return
        try:
            stored = evaluations.read(run, versions)
        except CorruptError as error:
            log.warning("the evaluation of %s is damaged: %s", _text(versions), error)
            continue
        for score in evaluations.scores(stored):
            log.info(
                "%s: %s %.1f %% of %d",
                _text(versions),
                score.workflow,
                100 * score.accuracy,
                score.n,
            )


class _Progress:
    """Counts episodes in the heartbeat; raises StoppedError when the evaluation must stop."""

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime, self._episodes = lifetime, 0

    def __call__(self, episode: Episode) -> None:
        self._episodes += 1
        self._lifetime.heartbeat.update(progress=EvaluationProgress(episodes=self._episodes))
        self._lifetime.check()


def _wait_for(lifetime: Lifetime, versions: Mapping[str, int]) -> None:
    """Wait until every version exists; raises StoppedError when the service must stop before."""
    run = lifetime.run

    def missing() -> list[str]:
        return [
            policy
            for policy, version in versions.items()
            if not manifests.exists(run, policy, version)
        ]

    lifetime.check()
    while policies := lifetime.retry("looking for versions", missing):
        newest = max(versions.values())
        what = f"version {newest}" if newest else "the base model"
        lifetime.heartbeat.update(
            state=ServiceState.WAITING,
            wait_reason=WaitReason.VERSION if newest else WaitReason.BASE_MODEL,
            note=f"waits for {what} of {', '.join(policies)}",
        )
        lifetime.wait(POLL_INTERVAL_S)
        lifetime.check()


async def _play(
    run: ObjectStore,
    config: RunConfig,
    evaluation: EvaluationConfig,
    versions: Mapping[str, int],
    on_episode: Callable[[Episode], None] | None,
) -> tuple[Group, ...]:
    stream = stream_of(run, "evaluation.prompts", evaluation.prompts)
    # Before any prompt is made: a built-in source makes as many as its limit says.
    if (num_prompts := stream.num(evaluation.prompts.limit)) > HELD_OUT_MAX:
        raise ConfigError(
            f"evaluation.prompts has {num_prompts:,} prompts, and at most {HELD_OUT_MAX:,} are "
            "played; set a limit, and start the run under another id"
        )
    prompts = stream.all(evaluation.prompts.limit)
    in_run = {policy: (run, version) for policy, version in versions.items()}
    async with held_out_play.pool_with(in_run, config, evaluation) as pool:
        return await run_prompts(pool, prompts, 1, EVALUATION_SEED, on_episode)


def _evaluation(
    groups: Sequence[Group],
    config: RunConfig,
    evaluation: EvaluationConfig,
    versions: Mapping[str, int],
    seconds: float,
    num_kept: int,
) -> Evaluation:
    episodes = [group.episodes[0] for group in groups]
    return Evaluation(
        versions=dict(versions),
        dataset=evaluation.dataset,
        workflow=config.rollout.workflow.name,
        rows=tuple(group.prompt.id for group in groups),
        first_attempt=held_out_play.results(episodes, "first_attempt"),
        final=held_out_play.results(episodes, "final"),
        created_s=time.time(),
        seconds=seconds,
        num_kept=num_kept,
    )


def _text(versions: Mapping[str, int]) -> str:
    return ", ".join(f"{policy} {version}" for policy, version in versions.items())
