"""What a run has used of each limit of its budget, and how it is shown."""

from collections.abc import Mapping

from storage.config_model import Frozen
from storage.errors import UNREADABLE
from storage.records.control import BudgetKind, Usage
from storage.run import usage
from storage.store.object_store import ObjectStore

WARN_SHARE = 0.8
"""Share of a limit from which it is nearly used up."""


class BudgetStatus(Frozen):
    """One limit of the run's budget."""

    used: float
    limit: float

    @property
    def is_used_up(self) -> bool:
        return self.used >= self.limit

    @property
    def is_nearly_used_up(self) -> bool:
        return self.used >= WARN_SHARE * self.limit


def budget_words(budget: Mapping[BudgetKind, BudgetStatus]) -> str:
    """Return what people are shown: `budget: hours 2.5 of 8, cost 31.25 of 500`; empty for none."""
    parts = []
    for kind, each in budget.items():
        digits = {"hours": 1 if each.limit >= 1 else 4, "tokens": 0, "cost": 2}[kind]
        limit = f"{each.limit:,.{digits}f}"
        limit = limit.rstrip("0").rstrip(".") if "." in limit else limit
        parts.append(f"{kind} {each.used:,.{digits}f} of {limit}")
    return f"budget: {', '.join(parts)}" if parts else ""


def budget_of(record: Usage) -> dict[BudgetKind, BudgetStatus]:
    """Return each limit with what is used of it."""
    return {
        kind: BudgetStatus(used=record.used.get(kind, 0.0), limit=limit)
        for kind, limit in record.limits.items()
    }


def read_budget(run: ObjectStore, problems: list[str]) -> dict[BudgetKind, BudgetStatus]:
    """Read the budget of a run. A usage that cannot be read is added to `problems`."""
    try:
        record = usage.read(run)
    except UNREADABLE as error:
        problems.append(str(error))
        return {}
    return budget_of(record) if record else {}
