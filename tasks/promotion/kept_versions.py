"""Tags on runs that keep the weights of champion, previous champion and challenger from gc.

    {log}-{policy}-{version}       solver@40 of the log tiny: `tiny-solver-40`
    … -x{digest}                   where this could be the tag of another log, too

The name of a tag contains the version, so a tag never moves: it is created before the decision, and
deleted after another decision has replaced the version. A tag `champion` would have to be deleted
before it is created again, and a crash between the two would leave the champion to gc.
"""

import hashlib
from collections.abc import Iterable

from storage import layout
from storage.errors import AstraFlowError, ConfigError, CorruptError, NotFoundError
from storage.promotion.promotions import PromotionLog
from storage.records.promotions import PromotionDecision, Team, TeamVersion
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.weights import manifests, tags
from tasks.promotion.decision_log import Standing


def keep(store: ObjectStore, name: str, team: Team) -> None:
    """Tag every version of a team, in its run. Tags that exist stay.

    Raises ConfigError for a version that does not exist, whose data was retired, which has other
    weights than the team names, or whose tag cannot be read.
    """
    for policy, version in team.items():
        run = require_weights(store, policy, version)
        tag = _tag(name, policy, version.version)
        if not layout.NAME.fullmatch(tag):
            raise ConfigError(
                f"{tag!r} cannot be a tag, which has up to 100 letters, digits, '_' and '-'; "
                "promote under a shorter name (--name)"
            )
        try:
            tags.create(run, tag, policy, version.version)
        except CorruptError as error:
            raise ConfigError(
                f"{error}; remove it with `astraflow tag {version.run_id} --remove {tag}`, and run "
                "the command again"
            ) from error


def require_weights(store: ObjectStore, policy: str, version: TeamVersion) -> ObjectStore:
    """Return the run of a team's version; ConfigError where that has other weights now, or none.

    A run that was deleted may have another in its place, under the same id.
    """
    run = runs.open_run(store, version.run_id)
    what = f"{policy}@{version.version} of {version.run_id}"
    try:
        digest = manifests.read_manifest(run, policy, version.version).digest
    except (CorruptError, NotFoundError) as error:
        raise ConfigError(f"{what} cannot be used: {error}; name another version") from error
    if digest != version.digest:
        raise ConfigError(
            f"{what} is not what it was: its weights have the digest {digest}, and had "
            f"{version.digest}; another run has its id now"
        )
    return run


def release(store: ObjectStore, log: PromotionLog, standing: Standing) -> list[str]:
    """Delete the tags of versions that the log names and that have no role any more.

    Tags of versions that no decision names stay: another process may be about to decide. Nothing is
    deleted while a part of the log cannot be read. Returns the problems, which the next call meets
    again.
    """
    if standing.unknown or log.unreadable:
        return []
    needed = set(_tags(log.name, standing.roles.values()))
    problems = []
    for run_id, tag in dict.fromkeys(_tags(log.name, log.readable)):
        if (run_id, tag) in needed:
            continue
        try:
            run = store.sub(layout.run_prefix(run_id))
            if run.exists(layout.tag(tag)):
                run.delete(layout.tag(tag))
        except AstraFlowError as error:
            problems.append(f"the tag {tag} of the run {run_id} is not deleted: {error}")
    return problems


def _tags(name: str, decisions: Iterable[PromotionDecision]) -> list[tuple[str, str]]:
    """Return (run id, tag) of every version of these decisions that can have a tag."""
    named = [
        (version.run_id, _tag(name, policy, version.version))
        for decision in decisions
        for policy, version in decision.team.items()
    ]
    return [(run_id, tag) for run_id, tag in named if layout.NAME.fullmatch(tag)]


def _tag(name: str, policy: str, version: int) -> str:
    """Return the name of the tag, which may be too long for one."""
    tag = f"{name.replace('.', '_')}-{policy}-{version}"
    if "." in name or "-" in policy:  # the log a.b is not a_b, nor a with the policy b-c a-b with c
        tag += f"-x{hashlib.sha256(f'{name}/{policy}'.encode()).hexdigest()[:8]}"
    return tag
