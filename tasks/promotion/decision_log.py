"""The promotion log as a state: who is champion, and how the next decision is added.

    decisions 1, 2, … ──fold──▶ Standing: champion, previous, challenger
    Standing ──draft──▶ decision n + 1, created once ──conflict──▶ read again, draft again

A champion that is rolled back is not kept as `previous`: a second rollback goes one champion
further back.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from storage import layout
from storage.errors import ConfigError, ConflictError
from storage.formats.json_values import storable_text
from storage.plain_names import new_write_id
from storage.promotion import promotions
from storage.promotion.promotions import PromotionLog
from storage.records.promotions import DecisionKind, PromotionDecision
from storage.store.object_store import ObjectStore

REASON_MAX, BY_MAX = 5_000, 200
"""Characters; longer texts are cut when they are written."""
TRIES_MAX = 100
"""Tries to add one decision. Each lost one means that another writer added a decision."""


@dataclass(frozen=True)
class _Champion:
    """A champion and the one before it."""

    decision: PromotionDecision
    before: "_Champion | None"
    unknown_before: str
    """Why the champion before is not known; empty where it is known, and where there was none."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a promotion log says now."""

    name: str
    champion: PromotionDecision | None
    """The decision whose team is in use; None before the first promotion, and where unknown."""
    previous: PromotionDecision | None
    """The champion that a rollback returns to."""
    challenger: PromotionDecision | None
    """The newest team that was rejected since the champion was last changed."""
    unknown: str = ""
    """Why the champion is not known: a decision that may have changed it cannot be read. Empty
    where it is known.
    """
    unknown_previous: str = ""
    """The same of `previous`, where the champion is known."""

    @property
    def roles(self) -> dict[str, PromotionDecision]:
        """Role → decision, of those that are filled."""
        filled = {
            "champion": self.champion,
            "previous": self.previous,
            "challenger": self.challenger,
        }
        return {role: decision for role, decision in filled.items() if decision is not None}


Draft = Callable[[Standing, PromotionLog], PromotionDecision]
"""Returns the decision to add; its name, number, time and write id are set by `add`."""


def fold(log: PromotionLog) -> Standing:
    """Compute the standing from all decisions of a log."""
    standing = Standing(name=log.name, champion=None, previous=None, challenger=None)
    for _, after in standings(log):
        standing = after
    return standing


def standings(log: PromotionLog) -> Iterator[tuple[int, Standing]]:
    """Yield each decision's number and the standing after it, in the order of the numbers.

    An unreadable decision may have been a promotion: after it the champion is unknown, until a
    later decision names one.
    """
    champions: dict[int, _Champion] = {}
    champion: _Champion | None = None
    challenger: PromotionDecision | None = None
    unknown = ""
    decisions = {decision.number: decision for decision in log.readable}
    for number in sorted(decisions.keys() | log.unreadable.keys()):
        decision = decisions.get(number)
        if decision is None:
            champion = challenger = None
            unknown = log.unreadable[number]
        elif decision.kind is DecisionKind.REJECTED:
            challenger = decision
        else:
            before, unknown_before = champion, unknown
            if decision.kind is DecisionKind.ROLLED_BACK:
                returned = champions.get(decision.returns_to or 0)
                before = returned.before if returned else None
                unknown_before = (
                    returned.unknown_before
                    if returned
                    else f"decision {decision.returns_to}, to which decision {number} returned, "
                    "cannot be read"
                )
            champion = champions[number] = _Champion(decision, before, unknown_before)
            challenger, unknown = None, ""
        yield (
            number,
            Standing(
                name=log.name,
                champion=champion.decision if champion else None,
                previous=champion.before.decision if champion and champion.before else None,
                challenger=challenger,
                unknown=unknown,
                unknown_previous=champion.unknown_before if champion else "",
            ),
        )


def require_known(store: ObjectStore, standing: Standing) -> None:
    """Raise ConfigError where the champion is unknown: nothing is promoted over it."""
    if standing.unknown:
        raise ConfigError(
            f"the champion of {standing.name} is not known: {standing.unknown}; put the object "
            f"back into {store.url} from a copy, or name the champion yourself: `astraflow "
            f"promotions {standing.name}` lists the decisions, `astraflow rollback "
            f"{standing.name} --to NUMBER` returns to one"
        )


def add(store: ObjectStore, name: str, draft: Draft) -> PromotionDecision:
    """Add a decision to a log and return it as it is stored.

    `draft` is called with the newest state, and again after another writer was first. A promotion
    of the champion's own team, or another rejection of the challenger's, is not added: the decision
    that exists is returned, so that a flow that is run again adds nothing.

    Raises:
        ConflictError: other writers were first each time.
        Exception: that of `draft`, such as a ConfigError; nothing is added then.
    """
    for _ in range(TRIES_MAX):
        log = promotions.read_log(store, name)
        standing = fold(log)
        drafted = draft(standing, log)
        if (existing := _same_decision(standing, drafted)) is not None:
            return existing
        decision = replace(
            drafted,
            name=name,
            number=log.next_number,
            at_s=time.time(),
            by=storable_text(drafted.by)[:BY_MAX],
            reason=storable_text(drafted.reason)[:REASON_MAX],
            write_id=new_write_id(),
        )
        try:
            promotions.create(store, decision)
        except ConflictError:
            continue
        return decision
    raise ConflictError(
        f"{store.url}/{layout.promotions(name)}: {TRIES_MAX} times another writer added a decision "
        "first; run the command again"
    )


def _same_decision(standing: Standing, drafted: PromotionDecision) -> PromotionDecision | None:
    """Return the decision after which the drafted one would change nothing; None for none."""
    match drafted.kind:
        case DecisionKind.PROMOTED:
            existing = standing.champion
        case DecisionKind.REJECTED:
            existing = standing.challenger
        case DecisionKind.ROLLED_BACK:
            return None
    return existing if existing is not None and same_team(existing, drafted) else None


def same_team(one: PromotionDecision | None, other: PromotionDecision | None) -> bool:
    """Return whether both decisions name the same weights; two Nones are the same."""
    return _weights(one) == _weights(other)


def _weights(decision: PromotionDecision | None) -> Mapping[str, tuple[str, int, str]] | None:
    if decision is None:
        return None
    return {
        policy: (version.run_id, version.version, version.digest)
        for policy, version in decision.team.items()
    }
