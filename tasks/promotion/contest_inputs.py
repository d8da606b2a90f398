"""What a contest is played with: the versions of a team, the problems, and all that outcomes need.

    team ──▶ its versions, compared with their manifests ─┐
    sources of problems ──▶ problems of each data set ────┼─▶ conditions ──▶ key of the outcomes
    candidate's recipe ──▶ workflow, sampling, engines ───┘

This module plays nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_ops.prompts.frozen import stream_of
from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.plain_names import TENSOR_SUFFIX, quoted, without_write_id
from storage.promotion.outcomes import EPISODES_MAX, PlayConditions, digest_of
from storage.records.promotions import Team, TeamVersion
from storage.records.rollouts import Prompt
from storage.records.weights import Manifest
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.weights import manifests
from tasks import held_out_play
from tasks.recipes.run_config import HELD_OUT_MAX, ContestConfig, EvaluationConfig, RunConfig

NO_EFFECT: Mapping[str, Any] = {
    "devices": True,
    "device_share": True,
    "threads": True,
    "max_concurrent": True,
    "sglang": {"python", "urls", "memory_share", "check_every", "shared"},
}
"""Settings of engines that say where and how fast episodes are played, not how they end."""


@dataclass(frozen=True)
class PlayedVersion:
    """A version of a team, in its own run."""

    run: ObjectStore
    manifest: Manifest
    model: str
    """Digest of what its outcomes depend on besides its weights: tokenizer, form of the model."""


def gate_settings(config: RunConfig) -> tuple[ContestConfig, EvaluationConfig]:
    """Return the sections `gate`, or its defaults, and `evaluation`; ConfigError without that."""
    if config.evaluation is None:
        raise ConfigError(
            "the recipe has no evaluation, which says how held-out problems are played; add the "
            "section `evaluation`, or promote without --gate"
        )
    return config.gate or ContestConfig(), config.evaluation


def versions_of(
    store: ObjectStore, side: str, team: Team, config: RunConfig
) -> dict[str, PlayedVersion]:
    """Find the versions of a team.

    Raises:
        ConfigError: the team has other policies than `config`, or a version does not exist.
        CorruptError: a version has other weights than the team names, or is damaged.
    """
    if team.keys() != config.policies.keys():
        raise ConfigError(
            f"the {side} is a team of {', '.join(team)}, and the candidate's recipe is played by "
            f"{', '.join(config.policies)}; promote the first team of such a recipe without --gate"
        )
    return {policy: _version(store, side, policy, named) for policy, named in team.items()}


def _version(store: ObjectStore, side: str, policy: str, named: TeamVersion) -> PlayedVersion:
    where = f"the {side}'s {policy}@{named.version} of the run {named.run_id}"
    try:
        run = runs.open_run(store, named.run_id)
        manifest = manifests.read_manifest(run, policy, named.version)
        base = manifests.read_manifest(run, policy, 0)
    except (ConfigError, NotFoundError) as error:
        raise ConfigError(
            f"{where} cannot be played: {error}; put the run back, or promote another team"
        ) from error
    if manifest.digest != named.digest:
        raise CorruptError(
            f"{where} has the digest {manifest.digest}, and the team names {named.digest}; put the "
            "run back as it was, or promote another team"
        )
    files = {
        without_write_id(file.name): file.digest
        for file in base.files
        if not file.name.endswith(TENSOR_SUFFIX)
    }
    adapter = None if manifest.adapter is None else asdict(manifest.adapter)
    return PlayedVersion(run, manifest, digest_of({"files": files, "adapter": adapter}))


def refuse_retired(side: str, versions: Mapping[str, PlayedVersion]) -> None:
    """Raise ConfigError for versions whose data gc has deleted."""
    retired = [
        f"{policy}@{each.manifest.version} of {runs.run_id(each.run)}"
        for policy, each in versions.items()
        if manifests.is_retired(each.run, each.manifest)
    ]
    if retired:
        raise ConfigError(
            f"the {side} cannot be played, since gc has deleted the weights of "
            f"{', '.join(retired)}; promote a team without --gate first"
        )


def prompts_by_dataset(
    gate: ContestConfig, evaluation: EvaluationConfig, run: ObjectStore
) -> dict[str, list[Prompt]]:
    """Read the problems of each data set; ConfigError for ones that could not be judged.

    Args:
        run: the candidate's, which has the rows of an evaluation on a data window.
    """
    sources = gate.datasets or {evaluation.dataset: evaluation.prompts}
    streams = {
        name: stream_of(run, "evaluation.prompts", source) for name, source in sources.items()
    }
    # Before any problem is made: a built-in source makes as many as its limit says.
    nums = {dataset: stream.num(sources[dataset].limit) for dataset, stream in streams.items()}
    for dataset, num_problems in nums.items():
        if num_problems < gate.min_problems:
            raise ConfigError(
                f"{dataset} has {num_problems} problems, and the gate needs {gate.min_problems} "
                "(gate.min_problems); name a larger data set, or set another number"
            )
        if (episodes := num_problems * gate.samples) > EPISODES_MAX:
            raise ConfigError(
                f"{dataset} has {num_problems:,} problems, so {episodes:,} episodes would be "
                f"played by each team, and {EPISODES_MAX:,} are allowed; set a limit, or lower "
                "gate.samples"
            )
    if (total := sum(nums.values())) > HELD_OUT_MAX:
        raise ConfigError(
            f"the data sets of the gate have {total:,} problems together, and at most "
            f"{HELD_OUT_MAX:,} are played; set limits, or name fewer data sets"
        )
    prompts = {name: stream.all(sources[name].limit) for name, stream in streams.items()}
    for dataset, problems in prompts.items():
        seen: set[str] = set()
        for prompt in problems:
            if prompt.id in seen:
                raise ConfigError(
                    f"{dataset}: two problems have the id {quoted(prompt.id)}; give each its own"
                )
            seen.add(prompt.id)
    return prompts


def conditions(
    dataset: str,
    prompts: Sequence[Prompt],
    versions: Mapping[str, PlayedVersion],
    config: RunConfig,
    seed: int,
) -> PlayConditions:
    """Return all that the outcomes of a team on one data set depend on."""
    gate, evaluation = gate_settings(config)
    sampling = held_out_play.sampling_of(config, evaluation)
    return PlayConditions(
        dataset=dataset,
        prompts=digest_of([[prompt.id, prompt.fields] for prompt in prompts]),
        samples=gate.samples,
        seed=seed,
        weights={policy: each.manifest.digest for policy, each in versions.items()},
        models={policy: each.model for policy, each in versions.items()},
        settings={
            "workflow": config.rollout.workflow.model_dump(mode="json"),
            "sampling": {name: each.model_dump(mode="json") for name, each in sampling.items()},
            "engine": config.rollout.engine.model_dump(mode="json", exclude=dict(NO_EFFECT)),
        },
    )
