"""Prices of a budget: which of them is a member's, and which recipes are refused."""

from typing import Any

import pytest

from deployments.registration.deployments import DEPLOYMENTS
from storage.errors import ConfigError
from storage.records.progress import ServiceKind
from tasks.recipes.loader import load
from tasks.recipes.prices import POOLS, price_per_hour
from tasks.supervision.members import members_of

PRICES = {"control": 0.5, "trainers": 12.0, "rollout": 4.0, "rollout/us-east": 3.5}


def loaded(**settings: Any) -> dict[str, float]:
    """The limits of a recipe with this budget."""
    budget = {f"budget.{key}": value for key, value in settings.items()}
    return dict(load("multi_policy_tiny", budget).budget.limits)


@pytest.mark.parametrize(
    ("kind", "region", "price"),
    [
        ("base_model", "", 0.5),
        ("dataflow", "", 0.5),
        ("evaluation", "", 0.5),
        ("trainer", "", 12.0),
        ("rollout", "us-east", 3.5),
        ("mirror", "us-east", 3.5),
        ("rollout", "eu-west", 4.0),
        ("mirror", "eu-west", 4.0),
        ("supervisor", "", 0.0),
    ],
)
def test_a_member_has_the_price_of_its_region_or_else_of_its_pool(
    kind: ServiceKind, region: str, price: float
) -> None:
    assert price_per_hour(PRICES, kind, region) == price


def test_a_worker_of_a_region_without_a_price_costs_as_much_as_the_dearest() -> None:
    prices = {"trainers": 12.0, "rollout/us-east": 3.0, "rollout/eu-west": 5.0}
    assert price_per_hour(prices, "rollout", "mars") == 5.0
    assert price_per_hour({"trainers": 12.0}, "rollout", "mars") == 0.0


def test_each_member_has_the_pool_of_its_deployment() -> None:
    pools = {f"{each.flow}/{each.name}": each.pool for each in DEPLOYMENTS}
    every_kind = {
        "rollout.regions.us-east.mirror": "memory://mirror",
        "policies.solver.train.nodes": 2,
    }
    members = members_of(load("multi_policy_tiny", every_kind))
    assert {member.kind: pools[member.deployment] for member in members} == dict(POOLS)


def test_a_budget_has_any_of_its_limits() -> None:
    assert loaded() == {}
    assert loaded(hours=8, tokens=2.0e9) == {"hours": 8.0, "tokens": 2e9}
    assert loaded(cost=500, price_per_hour=PRICES) == {"cost": 500.0}
    by_region = {"control": 0, "trainers": 0, "rollout/us-east": 1, "rollout/eu-west": 0}
    assert loaded(hours=1, cost=1, price_per_hour=by_region) == {"hours": 1.0, "cost": 1.0}


@pytest.mark.parametrize(
    ("prices", "missing"),
    [
        ({}, "control, trainers, rollout/us-east, rollout/eu-west"),
        ({"control": 1, "rollout": 1}, "trainers"),
        ({"control": 1, "trainers": 1, "rollout/us-east": 1}, "rollout/eu-west"),
    ],
)
def test_a_cost_without_the_price_of_each_member_is_refused_with_the_missing_ones(
    prices: dict[str, float], missing: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(cost=500, price_per_hour=prices)
    assert str(caught.value) == (
        f"--set budget.cost: cannot be counted without the price of {missing}: add it to "
        "budget.price_per_hour, 0 for what costs nothing"
    )


def test_a_region_without_workers_needs_no_price() -> None:
    settings = {
        "rollout.regions.eu-west.workers": 0,
        "budget.cost": 1,
        "budget.price_per_hour": {"control": 1, "trainers": 1, "rollout/us-east": 1},
    }
    assert load("multi_policy_tiny", settings).budget.limits == {"cost": 1.0}


@pytest.mark.parametrize("key", ["rollout/mars", "mars", "trainer", "control/us-east"])
def test_a_price_of_what_the_run_does_not_have_is_refused(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(cost=500, price_per_hour={**PRICES, key: 1.0})
    assert str(caught.value).endswith(
        f"budget.price_per_hour.{key}: is neither a pool nor a region of this recipe; it has "
        "control, trainers, rollout, rollout/us-east, rollout/eu-west"
    )


def test_prices_without_a_limit_of_the_cost_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"budget\.price_per_hour: has no effect without cost"):
        loaded(hours=1, price_per_hour=PRICES)
