"""Decisions about the champion, and what follows from them in the store's tags, MLflow and Prefect.

    promote, decide, roll_back ──▶ decision in the log ──▶ project: tags, aliases
                                                                 ──▶ announce: page, event

A decision stands once it is in the log. Whatever fails after that is returned as a problem, and the
next call repairs it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from storage import layout
from storage.errors import AstraFlowError, ConfigError, ConflictError
from storage.promotion import promotions
from storage.promotion.promotions import PromotionLog
from storage.records.promotions import DecisionKind, GateVerdict, PromotionDecision, Team
from storage.store.object_store import ObjectStore
from tasks.promotion import aliases, announcements, decision_log, kept_versions
from tasks.promotion.decision_log import Standing
from tasks.tracking.mlflow_sync import tracking_uri

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settled:
    """A decision, the standing after it, and what could not be brought up to date."""

    decision: PromotionDecision
    standing: Standing
    problems: tuple[str, ...]


def promote(store: ObjectStore, name: str, team: Team, by: str, reason: str) -> Settled:
    """Make a team the champion, without a gate.

    Raises:
        ConfigError: a version has no data, the name is invalid, or the present champion is not
            known.
    """
    layout.promotions(name)  # before anything is written

    def draft(standing: Standing, log: PromotionLog) -> PromotionDecision:
        decision_log.require_known(store, standing)
        return _drafted(DecisionKind.PROMOTED, team, by, reason)

    kept_versions.keep(store, name, team)
    return _settle(store, decision_log.add(store, name, draft))


def decide(
    store: ObjectStore,
    name: str,
    team: Team,
    verdict: GateVerdict,
    champion: PromotionDecision | None,
    by: str,
    reason: str = "",
) -> Settled:
    """Promote a team that passed the gate; keep one that did not as challenger.

    Args:
        champion: the decision whose team the gate compared with.
        reason: stored before that of the gate.

    Raises:
        ConflictError: the champion changed meanwhile, so that the verdict does not hold.
        ConfigError: as for `promote`.
    """
    layout.promotions(name)
    kind = DecisionKind.PROMOTED if verdict.passed else DecisionKind.REJECTED

    def draft(standing: Standing, log: PromotionLog) -> PromotionDecision:
        decision_log.require_known(store, standing)
        is_decided = verdict.passed and _is_champion(standing, team)
        if not is_decided and not decision_log.same_team(standing.champion, champion):
            raise ConflictError(
                f"the champion of {name} is {_number(standing.champion)} now, and the candidate "
                f"was compared with {_number(champion)}; compare it with the new champion"
            )
        why = "; ".join(filter(None, (reason, verdict.reason)))
        return _drafted(kind, team, by, why, gate=verdict)

    kept_versions.keep(store, name, team)
    return _settle(store, decision_log.add(store, name, draft))


def roll_back(
    store: ObjectStore, name: str, by: str, reason: str, to: int | None = None
) -> Settled:
    """Make an earlier champion the champion again.

    Args:
        to: number of a decision whose team was the champion; None: the champion before.

    Raises:
        ConfigError: there is no such champion, or its data was retired.
    """

    def draft(standing: Standing, log: PromotionLog) -> PromotionDecision:
        target = _previous(store, standing) if to is None else _champion_of(log, to)
        if standing.champion is not None and decision_log.same_team(standing.champion, target):
            raise ConfigError(
                f"the team of decision {target.number} is the champion of {name} already"
            )
        kept_versions.keep(store, name, target.team)
        why = reason or f"back to decision {target.number}"
        return _drafted(DecisionKind.ROLLED_BACK, target.team, by, why, returns_to=target.number)

    return _settle(store, decision_log.add(store, name, draft))


def project(store: ObjectStore, name: str) -> tuple[Standing, tuple[str, ...]]:
    """Bring the store's tags and MLflow's aliases to what the log says.

    Repeating it changes nothing. Returns the standing, and the problems, one sentence each.
    """
    stored = promotions.read_log(store, name)
    standing = decision_log.fold(stored)
    problems: list[str] = []

    def release() -> None:
        problems.extend(kept_versions.release(store, stored, standing))

    def move_aliases() -> None:
        uri = tracking_uri()
        if uri is None:
            problems.append(
                "MLFLOW_TRACKING_URI is not set, so MLflow's aliases stay; `astraflow promotions "
                f"{name} --repair` moves them later"
            )
            return
        projected = aliases.project(store, standing, uri)
        problems.extend(projected.problems)
        for move in projected.moves:
            log.info("MLflow: %s@%s is %s", move.alias.model, move.alias.name, move.version)

    for role, decision in standing.roles.items():
        keep = partial(kept_versions.keep, store, name, decision.team)
        _attempt(f"gc may delete weights of the {role}, which is not tagged", keep, problems)
    _attempt("tags of earlier champions are not deleted", release, problems)
    _attempt(
        f"MLflow's aliases are not moved; `astraflow promotions {name} --repair` moves them",
        move_aliases,
        problems,
    )
    return standing, tuple(problems)


def _settle(store: ObjectStore, decision: PromotionDecision) -> Settled:
    """Bring tags and aliases up to date, and announce the decision."""
    standing, problems = project(store, decision.name)
    more: list[str] = []

    def tell_mlflow() -> None:
        if (uri := tracking_uri()) is not None:
            announcements.to_mlflow(store, decision, uri)

    def tell_prefect() -> None:
        if url := announcements.prefect_api_url():
            announcements.to_prefect(store, decision, url)

    _attempt("MLflow does not show the decision", tell_mlflow, more)
    _attempt("Prefect does not show the decision", tell_prefect, more)
    return Settled(decision, standing, (*problems, *more))


def _attempt(failure: str, act: Callable[[], None], problems: list[str]) -> None:
    """Call `act`; any error becomes a problem, since the decision stands."""
    try:
        act()
    except AstraFlowError as error:
        problems.append(f"{failure}: {error}")
    except Exception as error:  # Prefect's and MLflow's clients may raise anything
        log.debug("%s", failure, exc_info=error)
        problems.append(f"{failure}: {type(error).__name__}: {error}")


def _previous(store: ObjectStore, standing: Standing) -> PromotionDecision:
    decision_log.require_known(store, standing)
    if standing.unknown_previous:
        raise ConfigError(
            f"the champion of {standing.name} before the present one is not known: "
            f"{standing.unknown_previous}; put the object back into {store.url} from a copy, or "
            f"name a decision with --to NUMBER: `astraflow promotions {standing.name}` lists them"
        )
    if standing.previous is None:
        raise ConfigError(
            f"{standing.name} has no earlier champion to return to; `astraflow promotions "
            f"{standing.name}` lists the decisions, --to NUMBER names one"
        )
    return standing.previous


def _champion_of(log: PromotionLog, number: int) -> PromotionDecision:
    """Return a decision that made its team the champion; ConfigError for another one."""
    if number in log.unreadable:
        raise ConfigError(
            f"decision {number} of {log.name} cannot be read: {log.unreadable[number]}; put the "
            "object back from a copy, or name another decision"
        )
    decision = next((each for each in log.readable if each.number == number), None)
    if decision is None:
        last = log.next_number - 1
        has = f"its decisions are 1 to {last}" if last else "it has no decision yet"
        raise ConfigError(f"{log.name} has no decision {number}; {has}")
    if decision.kind is DecisionKind.REJECTED:
        raise ConfigError(
            f"the team of decision {number} was rejected and never the champion; `astraflow "
            "promote` promotes it"
        )
    return decision


def _is_champion(standing: Standing, team: Team) -> bool:
    return standing.champion is not None and dict(standing.champion.team) == dict(team)


def _drafted(
    kind: DecisionKind,
    team: Team,
    by: str,
    reason: str,
    returns_to: int | None = None,
    gate: GateVerdict | None = None,
) -> PromotionDecision:
    """Return a decision without name, number and time, which `decision_log.add` sets."""
    return PromotionDecision(
        name="draft",
        number=0,
        kind=kind,
        at_s=0.0,
        by=by,
        reason=reason,
        team=dict(team),
        returns_to=returns_to,
        gate=gate,
    )


def _number(decision: PromotionDecision | None) -> str:
    return "no team" if decision is None else f"the team of decision {decision.number}"
