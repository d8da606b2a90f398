"""Amounts of a budget as people read them, and when little of it is left."""

import pytest

from storage.records.control import BudgetKind
from tasks.monitoring.budget_status import BudgetStatus, budget_words


@pytest.mark.parametrize(
    ("kind", "used", "limit", "words"),
    [
        ("hours", 7.96, 8.0, "hours 8.0 of 8"),
        ("hours", 0.0123, 0.05, "hours 0.0123 of 0.05"),
        ("hours", 1.0, 1.5, "hours 1.0 of 1.5"),
        ("hours", 10.0, 100.0, "hours 10.0 of 100"),
        ("tokens", 1234567.0, 2e9, "tokens 1,234,567 of 2,000,000,000"),
        ("cost", 500.125, 500.0, "cost 500.12 of 500"),
        ("cost", 1.0, 0.25, "cost 1.00 of 0.25"),
    ],
)
def test_amounts_of_a_budget_are_written_as_people_write_them(
    kind: BudgetKind, used: float, limit: float, words: str
) -> None:
    assert budget_words({kind: BudgetStatus(used=used, limit=limit)}) == f"budget: {words}"
    assert budget_words({}) == ""


@pytest.mark.parametrize(
    ("used", "nearly", "up"),
    [(7.99, False, False), (8.0, True, False), (9.99, True, False), (10.0, True, True)],
)
def test_a_budget_is_nearly_used_up_from_80_percent_and_used_up_at_its_limit(
    used: float, nearly: bool, up: bool
) -> None:
    budget = BudgetStatus(used=used, limit=10.0)
    assert (budget.is_nearly_used_up, budget.is_used_up) == (nearly, up)
