"""The nights of a recurring training with their decisions, for pages, tables and MLflow."""

from dataclasses import dataclass

from storage.promotion import nights, promotions
from storage.records.nights import NightOutcome, NightPlan
from storage.records.promotions import GateRow, PromotionDecision, Requirement
from storage.store.object_store import ObjectStore
from tasks.promotion import decision_log
from tasks.promotion.decision_log import Standing


@dataclass(frozen=True, kw_only=True)
class NightRow:
    """One night. Without an outcome it runs, or its process died."""

    night: str
    plan: NightPlan | None
    outcome: NightOutcome | None
    decision: PromotionDecision | None
    """About its candidate; None where nothing was decided, or the decision cannot be read."""

    @property
    def state(self) -> str:
        return self.outcome.end.value if self.outcome else "begun"

    @property
    def gain_row(self) -> GateRow | None:
        """The row of the gate's table on which a gain was required."""
        rows = self.decision.gate.rows if self.decision and self.decision.gate else ()
        return next((row for row in rows if row.requirement is Requirement.GAIN), None)


@dataclass(frozen=True, kw_only=True)
class RoleChange:
    """The roles after a decision: role → number of the decision with the team that has it."""

    decision: PromotionDecision
    roles: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class NightHistory:
    """Everything that is stored of a recurring training."""

    name: str
    nights: tuple[NightRow, ...]
    """In the order of their due times."""
    changes: tuple[RoleChange, ...]
    """In the order of the decisions, those by hand among them."""
    standing: Standing
    unreadable: dict[str, str]
    """Night, or number of a decision → why it cannot be read."""


def read(store: ObjectStore, name: str) -> NightHistory:
    """Read the nights and the promotion log of a name.

    Raises ConfigError for an invalid name, and for folders that cannot be listed.
    """
    stored, log = nights.read_all(store, name), promotions.read_log(store, name)
    decisions = {decision.number: decision for decision in log.readable}
    rows = tuple(
        NightRow(
            night=night.id,
            plan=night.plan,
            outcome=night.outcome,
            decision=decisions.get(night.outcome.decision or 0) if night.outcome else None,
        )
        for night in stored.readable
    )
    changes = [
        RoleChange(
            decision=decisions[number],
            roles={role: each.number for role, each in standing.roles.items()},
        )
        for number, standing in decision_log.standings(log)
        if number in decisions
    ]
    unreadable = {f"night {night}": why for night, why in stored.unreadable.items()}
    unreadable |= {f"decision {number}": why for number, why in log.unreadable.items()}
    return NightHistory(
        name=name,
        nights=rows,
        changes=tuple(changes),
        standing=decision_log.fold(log),
        unreadable=unreadable,
    )
