"""Which versions of a run are promoted: the best evaluated ones, or those that a person names."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.records.promotions import TeamVersion
from storage.run import evaluations
from storage.run.evaluations import Evaluation, Evaluations
from storage.store.object_store import ObjectStore
from storage.weights import manifests, tags
from tasks.recipes.run_config import RunConfig

BEST, LATEST = "best", "latest"
LISTED_MAX = 12
"""Evaluations that an error lists."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A team that may be promoted. Example:
    `Candidate({"solver": TeamVersion(…)}, "accuracy 71.0% of 500 (held_out)")`.
    """

    team: Mapping[str, TeamVersion]
    """policy → version."""
    description: str
    """What is known of it, for people."""


def find(run: ObjectStore, run_id: str, config: RunConfig, words: Sequence[str] = ()) -> Candidate:
    """Find the versions that `words` name; without words, the best evaluated ones.

    Args:
        words: `best`, `latest`, a number or a tag for every policy; `POLICY@` before one of them
            for one policy, such as `solver@40`.

    Raises:
        ConfigError: a word names no version, a policy is not named, or nothing was evaluated.
        CorruptError: a tag is damaged.
    """
    policies = list(config.policies)
    named = _words_by_policy(words or (BEST,), policies)
    best = _best(run, run_id, config) if BEST in named.values() else {}
    versions = {
        policy: best[policy] if word == BEST else _version(run, policy, word)
        for policy, word in named.items()
    }
    team = {
        policy: TeamVersion(run_id=run_id, version=version, digest=_digest(run, policy, version))
        for policy, version in versions.items()
    }
    return Candidate(team, _description(run, versions))


def read_evaluations(run: ObjectStore, run_id: str) -> Evaluations:
    """Read all evaluations of the run; those that cannot be read are logged."""
    stored = evaluations.read_all(run)
    for why in stored.unreadable.values():
        log.warning("an evaluation of %s does not count, since it cannot be read: %s", run_id, why)
    return stored


def best_versions(
    evaluated: Sequence[Evaluation], policies: Sequence[str], dataset: str
) -> dict[str, int] | None:
    """Return the versions of the highest accuracy; the earliest of equal ones. None for none.

    The accuracy is that of the workflow's final answer. Evaluations of another data set or without
    a version of each policy do not count.
    """
    counted = _counted(evaluated, policies, dataset)
    if not counted:
        return None
    # `max` keeps the first of equal ones, and they are in the order of versions
    best = max(counted, key=lambda evaluation: evaluations.scores(evaluation)[-1].accuracy)
    return {policy: best.versions[policy] for policy in policies}


def _counted(
    evaluated: Sequence[Evaluation], policies: Sequence[str], dataset: str
) -> list[Evaluation]:
    return [
        each
        for each in evaluated
        if each.dataset == dataset and set(policies) <= each.versions.keys()
    ]


def _best(run: ObjectStore, run_id: str, config: RunConfig) -> dict[str, int]:
    if config.evaluation is None:
        raise ConfigError(
            f"the recipe of {run_id} has no evaluation, so no version is known to be the best; add "
            "the section `evaluation`, or name the version with --version"
        )
    stored = read_evaluations(run, run_id)
    best = best_versions(stored.readable, list(config.policies), config.evaluation.dataset)
    if best is None:
        unreadable = "; ".join(stored.unreadable.values())
        raise ConfigError(
            f"no version of {run_id} was evaluated on {config.evaluation.dataset!r} yet "
            f"({unreadable or 'the run has no evaluation'}); wait for one, or name the version "
            "with --version"
        )
    retired = [
        f"{policy}@{version}"
        for policy, version in best.items()
        if manifests.is_retired(run, manifests.read_manifest(run, policy, version))
    ]
    if retired:
        raise ConfigError(
            f"the best evaluated versions of {run_id} cannot be promoted, since gc has deleted the "
            f"weights of {', '.join(retired)}; name others with --version. Evaluated: "
            f"{_listed(stored.readable, config)}"
        )
    return best


def _words_by_policy(words: Sequence[str], policies: Sequence[str]) -> dict[str, str]:
    """Return policy → word; ConfigError for a policy that two words name, or none."""
    named: dict[str, str] = {}
    for_all: list[str] = []
    for word in words:
        policy, at, version = word.rpartition("@")
        if not at:
            for_all.append(word)
        elif policy not in policies:
            raise ConfigError(
                f"{word!r} names no policy of the run; those are {', '.join(policies)}"
            )
        elif policy in named:
            raise ConfigError(f"two versions of {policy} are named; name one")
        else:
            named[policy] = version
    if len(for_all) > 1:
        raise ConfigError(
            f"{' and '.join(for_all)} each name a version of every policy; name one, or write "
            f"{policies[0]}@{for_all[0]}"
        )
    named |= {policy: for_all[0] for policy in policies if for_all and policy not in named}
    if missing := [policy for policy in policies if policy not in named]:
        raise ConfigError(
            f"no version of {', '.join(missing)} is named; policies that were trained together are "
            f"promoted together, so name {missing[0]}@VERSION, too"
        )
    return {policy: named[policy] for policy in policies}


def _version(run: ObjectStore, policy: str, word: str) -> int:
    newest = manifests.latest(run, policy)
    if newest is None:
        raise ConfigError(f"{policy} has no version yet; wait for the base model")
    version = newest if word == LATEST else tags.resolve(run, policy, word)
    if version > newest:
        raise ConfigError(f"{policy} has no version {version}; its newest is {newest}")
    return version


def _digest(run: ObjectStore, policy: str, version: int) -> str:
    try:
        return manifests.read_manifest(run, policy, version).digest
    except NotFoundError as error:
        raise ConfigError(
            f"{policy} has no version {version}: {error}; name another version"
        ) from error
    except CorruptError as error:
        raise ConfigError(
            f"{policy}@{version} cannot be used: {error}; put the object back, or name another "
            "version"
        ) from error


def _description(run: ObjectStore, versions: Mapping[str, int]) -> str:
    """Return the accuracy of the versions, if they were evaluated together."""
    if not evaluations.exists(run, versions):
        return "not evaluated"
    try:
        return _accuracy(evaluations.read(run, versions))
    except CorruptError as error:
        log.warning("an evaluation of the candidate cannot be read: %s", error)
        return "its evaluation cannot be read"


def _accuracy(evaluation: Evaluation) -> str:
    score = evaluations.scores(evaluation)[-1]
    return f"accuracy {score.accuracy:.1%} of {score.n} ({evaluation.dataset})"


def _listed(evaluated: Sequence[Evaluation], config: RunConfig) -> str:
    assert config.evaluation is not None, "without an evaluation nothing is the best"
    counted = _counted(evaluated, list(config.policies), config.evaluation.dataset)
    ordered = sorted(counted, key=lambda each: -evaluations.scores(each)[-1].accuracy)
    texts = [
        f"{', '.join(f'{policy}@{version}' for policy, version in each.versions.items())}: "
        f"{_accuracy(each)}"
        for each in ordered[:LISTED_MAX]
    ]
    return "; ".join(texts)
