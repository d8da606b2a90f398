"""MLflow's aliases `champion`, `previous` and `challenger`, computed from a promotion log.

    Standing ──▶ registered version of each team's policies ──▶ wanted aliases ─┐
                                       aliases that MLflow has ──▶ difference ◀─┘ ──▶ moves

Repeating it changes nothing, and completes moves that a crash interrupted. A team moves as a whole:
where one of its versions cannot be registered, none of its aliases is moved. A registered model
belongs to one log, by a tag: two logs would overwrite each other's aliases.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.errors import ConfigError, CorruptError, NotFoundError
from storage.records.promotions import PromotionDecision, TeamVersion
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.promotion.decision_log import Standing
from tasks.promotion.kept_versions import require_weights
from tasks.recipes.stored_config import read_config
from tasks.tracking.mlflow_client import (
    DIGEST_TAG,
    POLICY_TAG,
    RUN_TAG,
    VERSION_TAG,
    Board,
    client_of,
    model_name,
    translated,
)
from tasks.tracking.mlflow_sync import register_version

ALIASES = ("previous", "challenger", "champion")
"""In the order of their moves. Those of `champion` are last, and next to each other."""
LOG_TAG = "astraflow.promotions"
"""Of a registered model: the promotion log to which its aliases belong."""


@dataclass(frozen=True, order=True)
class Alias:
    """A name of a version. Example: `Alias("astraflow-solver", "champion")`."""

    model: str
    name: str


@dataclass(frozen=True)
class Move:
    """A change of one alias; the version None deletes it."""

    alias: Alias
    version: str | None


@dataclass(frozen=True)
class Projection:
    """What was changed in MLflow, and what could not be."""

    moves: tuple[Move, ...]
    problems: tuple[str, ...]


def project(store: ObjectStore, standing: Standing, uri: str) -> Projection:
    """Move MLflow's aliases to the teams of a log; only those that differ are written.

    Versions that are not registered yet are registered, as at the end of a run.

    Raises MlflowError when MLflow does not answer. A repeated call completes the moves.
    """
    if standing.unknown:
        why = f"MLflow's aliases stay, because the champion is not known: {standing.unknown}"
        return Projection((), (why,))
    with translated():
        client = client_of(uri)
    wanted: dict[Alias, str] = {}
    kept: set[str] = set()
    problems = []
    if standing.unknown_previous:
        kept.add("previous")
        problems.append(
            "MLflow's alias previous stays where it is, because the champion before is not known: "
            f"{standing.unknown_previous}"
        )
    for role in ALIASES:
        if (decision := standing.roles.get(role)) is None:
            continue
        try:
            wanted |= _aliases_of_team(store, client, uri, standing.name, role, decision)
        except ConfigError as error:
            kept.add(role)
            problems.append(f"MLflow's alias {role} stays where it is: {error}")
    owned = _owned_models(client, standing.name, {alias.model for alias in wanted})
    planned = moves(_present(owned), wanted, kept)
    for move in planned:
        _carry_out(client, move)
    return Projection(tuple(planned), tuple(problems))


def moves(
    present: Mapping[Alias, str], wanted: Mapping[Alias, str], kept: Iterable[str] = ()
) -> list[Move]:
    """Return the moves from the present aliases to the wanted ones, in the order of ALIASES.

    Aliases that are not wanted are deleted, after all others were set; those named in `kept` are
    not touched.
    """
    order = {name: rank for rank, name in enumerate(ALIASES)}
    touched = order.keys() - set(kept)
    to_set = [
        Move(alias, version)
        for alias, version in wanted.items()
        if alias.name in touched and present.get(alias) != version
    ]
    to_delete = [
        Move(alias, None) for alias in present if alias.name in touched and alias not in wanted
    ]
    return [
        *sorted(to_set, key=lambda move: (order[move.alias.name], move.alias)),
        *sorted(to_delete, key=lambda move: (order[move.alias.name], move.alias)),
    ]


def _aliases_of_team(
    store: ObjectStore, client: Any, uri: str, log: str, role: str, decision: PromotionDecision
) -> dict[Alias, str]:
    """Return the aliases of a team's versions, which are registered if they are not yet.

    Raises ConfigError for a version that cannot be registered, and for a model of another log.
    """
    aliases = {}
    for policy, version in decision.team.items():
        try:
            model, number = _find(client, store, policy, version) or _register(
                store, uri, policy, version
            )
        except (ConfigError, CorruptError, NotFoundError, OSError) as error:
            raise ConfigError(
                f"{policy}@{version.version} of {version.run_id} is not registered: {error}"
            ) from error
        alias = Alias(model, role)
        if alias in aliases:
            raise ConfigError(
                f"the registered model {model} has versions of several policies, and an alias "
                "names one version; register each policy's versions in a model of its own"
            )
        _claim(client, model, log)
        aliases[alias] = number
    return aliases


def _find(
    client: Any, store: ObjectStore, policy: str, version: TeamVersion
) -> tuple[str, str] | None:
    """Return model and number of the registered version with the tags of this one; None for none.

    A version that an earlier release registered has no tag of its run: MLflow's run has it.
    """
    wanted = (version.run_id, policy)
    with translated():
        found = client.search_model_versions(f"tags.`{VERSION_TAG}` = '{version.version}'")
        untagged = []
        for registered in sorted(found, key=lambda each: (each.name, int(each.version))):
            if registered.tags.get(DIGEST_TAG, version.digest) != version.digest:
                continue  # of a run that was deleted, and had the same id
            if RUN_TAG not in registered.tags:
                untagged.append(registered)
            elif (registered.tags[RUN_TAG], registered.tags.get(POLICY_TAG)) == wanted:
                return str(registered.name), str(registered.version)
        for registered in _of_experiment(store, policy, version, untagged):
            run_tags = client.get_run(registered.run_id).data.tags if registered.run_id else {}
            if (run_tags.get(RUN_TAG), run_tags.get(POLICY_TAG)) == wanted:
                return str(registered.name), str(registered.version)
    return None


def _of_experiment(
    store: ObjectStore, policy: str, version: TeamVersion, registered: Sequence[Any]
) -> list[Any]:
    """Return those of the model of the run's experiment."""
    if not registered:
        return []
    config = read_config(runs.open_run(store, version.run_id))
    name = model_name(config.tracking.experiment, policy)
    return [each for each in registered if each.name == name]


def _register(store: ObjectStore, uri: str, policy: str, version: TeamVersion) -> tuple[str, str]:
    run = require_weights(store, policy, version)
    config = read_config(run)
    if not config.tracking.enabled:
        raise ConfigError("the recipe of its run has tracking.enabled: false")
    experiment = config.tracking.experiment
    board = Board(uri, experiment, version.run_id, list(config.policies), is_live=False)
    return model_name(experiment, policy), register_version(board, run, policy, version.version)


def _claim(client: Any, model: str, log: str) -> None:
    """Tag the model with its log; ConfigError if it belongs to another one."""
    with translated():
        owner = client.get_registered_model(model).tags.get(LOG_TAG)
        if owner is None:
            client.set_registered_model_tag(model, LOG_TAG, log)
    if owner not in (None, log):
        raise ConfigError(
            f"the registered model {model} has the aliases of the promotion log {owner}; promote "
            f"with --name {owner}, or set tracking.experiment of the recipe to another name"
        )


def _owned_models(client: Any, log: str, used: set[str]) -> list[Any]:
    """Return the registered models of a log, those without an alias of a present team included."""
    with translated():
        owned = client.search_registered_models(filter_string=f"tags.`{LOG_TAG}` = '{log}'")
        names = used | {model.name for model in owned}
        return [client.get_registered_model(name) for name in sorted(names)]


def _present(models: Sequence[Any]) -> dict[Alias, str]:
    return {
        Alias(str(model.name), name): str(version)
        for model in models
        for name, version in model.aliases.items()
        if name in ALIASES
    }


def _carry_out(client: Any, move: Move) -> None:
    with translated():
        if move.version is None:
            client.delete_registered_model_alias(move.alias.model, move.alias.name)
        else:
            client.set_registered_model_alias(move.alias.model, move.alias.name, move.version)
