"""The budget of a run: what is counted, when it is used up, and what a restart continues from."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from storage import layout
from storage.errors import TransientError
from storage.records.control import Stop, Usage
from storage.records.rollouts import Order
from storage.run import orders, runs, usage
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify
from tasks.recipes.run_terms import run_terms
from tests.support.runs import builders
from tests.support.runs.supervised import World

HOUR_S = 3600.0
PRICES = {"control": 0.5, "trainers": 12.0, "rollout": 4.0, "rollout/us-east": 3.0}


@pytest.fixture
def supervised(memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Starts a run with a budget, at a whole second: sums of hours are then exact."""
    monkeypatch.setattr(runs, "time", SimpleNamespace(time=lambda: 1_700_000_000.0))

    def of(*, age_hours: float = 0.0, **budget: Any) -> World:
        world = World(memory_store, **{f"budget.{key}": value for key, value in budget.items()})
        world.wall_s += age_hours * HOUR_S
        return world

    return of


def used(world: World) -> Usage:
    stored = usage.read(world.run)
    assert stored is not None
    return stored


def order(world: World, number: int, tokens: int) -> None:
    orders.create(
        world.run,
        Order(
            number=number, prompts=(), samples_per_prompt=1, seed=0, seen=(), cursor={},
            tokens=tokens,
        ),
    )  # fmt: skip


def alive(
    world: World, member: str, hours: float, *, attempt: int = 0, started_s: float = 1.0
) -> None:
    """Write the heartbeat of a member that has been alive for some hours."""
    kind, _, rest = member.partition("-")
    builders.put_heartbeat(
        world.run,
        builders.heartbeat(
            kind,  # type: ignore[arg-type]  # one of the kinds
            member,
            attempt=attempt,
            started_s=started_s,
            region=rest.rpartition("-")[0] if kind in ("rollout", "mirror") else "",
            alive_s=hours * HOUR_S,
        ),
    )


def test_hours_are_used_up_at_exactly_the_limit(supervised: Callable[..., World]) -> None:
    world = supervised(hours=2)
    assert world.look(seconds=HOUR_S) is None
    assert world.look(seconds=HOUR_S - 0.5) is None
    launched = list(world.launcher.launched)
    assert (stop := world.look(seconds=0.5)) is not None
    assert (stop.state, stop.reason) == ("exhausted", "budget: hours 2.0 of 2")
    assert runs.read_stop(world.run) == stop
    assert world.launcher.launched == launched
    assert used(world).limits == {"hours": 2.0}
    assert used(world).used == pytest.approx({"hours": 2.0, "tokens": 0.0, "cost": 0.0})


def test_a_clock_that_is_set_back_neither_lowers_nor_holds_the_hours(
    supervised: Callable[..., World],
) -> None:
    world = supervised(hours=4)
    world.look(seconds=2 * HOUR_S)
    world.wall_s -= 50 * HOUR_S
    world.look(seconds=0.0)
    assert used(world).used["hours"] == pytest.approx(2.0)
    assert world.look(seconds=HOUR_S) is None
    assert used(world).used["hours"] == pytest.approx(3.0)
    world.supervisor = world.restarted()
    assert world.look(seconds=HOUR_S / 2) is None
    assert used(world).used["hours"] == pytest.approx(3.0), "the clock of a new supervisor begins"
    assert world.look(seconds=HOUR_S - 1) is None
    stop = world.look(seconds=2)
    assert stop is not None
    assert stop.state == "exhausted"


def test_hours_without_a_supervisor_are_counted(supervised: Callable[..., World]) -> None:
    world = supervised(hours=10)
    world.look(seconds=HOUR_S)
    world.now_s = 0.0  # of another machine
    world.wall_s += 5 * HOUR_S
    world.supervisor = world.restarted()
    world.look(seconds=HOUR_S)
    assert used(world).used["hours"] == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("tokens", "state"), [(999, None), (1000, "exhausted"), (1001, "exhausted")]
)
def test_tokens_are_those_of_the_newest_order(
    supervised: Callable[..., World], tokens: int, state: str | None
) -> None:
    world = supervised(tokens=1000)
    assert world.look() is None
    order(world, 0, 0)
    order(world, 1, 500)
    assert world.look() is None
    assert used(world).used["tokens"] == 500.0
    order(world, 2, tokens)
    stop = world.look()
    assert (stop.state if stop else None) == state
    assert stop is None or stop.reason == f"budget: tokens {tokens:,} of 1,000"
    assert used(world).used["tokens"] == tokens


def test_an_order_is_read_once_for_the_tokens(
    supervised: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = supervised(tokens=1000)
    read, numbers = orders.read, list[int]()

    def counting(run: ObjectStore, number: int) -> Order:
        numbers.append(number)
        return read(run, number)

    monkeypatch.setattr(orders, "read", counting)
    world.look(rounds=2)
    order(world, 0, 100)
    order(world, 1, 200)
    world.look(rounds=3)
    order(world, 2, 300)
    world.look(rounds=3)
    assert numbers == [1, 2]
    assert used(world).used["tokens"] == 300.0


def test_tokens_never_decrease_over_damaged_orders_and_restarts(
    supervised: Callable[..., World],
) -> None:
    world = supervised(tokens=1000)
    order(world, 0, 700)
    world.look()
    order(world, 1, 600)  # of a dataflow that lost order 0
    world.look()
    assert used(world).used["tokens"] == 700.0
    order(world, 2, 800)
    world.run.put(layout.order(2), b"torn")
    assert world.look() is None
    world.supervisor = world.restarted()
    assert world.look() is None
    assert used(world).used["tokens"] == 700.0
    order(world, 3, 1000)
    assert world.look() is not None


def test_the_cost_is_the_hours_of_each_member_times_its_price(
    supervised: Callable[..., World],
) -> None:
    world = supervised(cost=100, price_per_hour=PRICES, age_hours=200)
    world.look()
    alive(world, "trainer-solver", 2)
    alive(world, "rollout-us-east-0", 1)
    alive(world, "rollout-eu-west-0", 0.5)
    alive(world, "dataflow", 4)
    alive(world, "supervisor", 100)
    world.look(rounds=3)
    assert used(world).used["cost"] == pytest.approx(24 + 3 + 2 + 2)
    alive(world, "trainer-solver", 2.5)
    alive(world, "rollout-us-east-0", 0.25)  # its machine was moved back in time
    world.look(rounds=2)
    assert used(world).used["cost"] == pytest.approx(31 + 6)


@pytest.mark.parametrize(("hours", "state"), [(1.999, None), (2.0, "exhausted")])
def test_the_cost_is_used_up_at_exactly_the_limit(
    supervised: Callable[..., World], hours: float, state: str | None
) -> None:
    world = supervised(cost=24, price_per_hour=PRICES, age_hours=5)
    alive(world, "trainer-solver", hours)
    stop = world.look()
    assert (stop.state if stop else None) == state
    assert stop is None or stop.reason == "budget: cost 24.00 of 24"


def test_the_hours_of_earlier_attempts_are_in_the_cost(supervised: Callable[..., World]) -> None:
    world = supervised(cost=1000, price_per_hour=PRICES, age_hours=5)
    alive(world, "trainer-solver", 2)
    world.look()
    alive(world, "trainer-solver", 0.5, attempt=1, started_s=2.0)
    world.look()
    assert used(world).used["cost"] == pytest.approx(24 + 6)
    alive(world, "trainer-solver", 3, attempt=0)  # it lives on beside its successor
    world.look()
    alive(world, "trainer-solver", 1, attempt=1, started_s=2.0)
    world.look()
    assert used(world).used["cost"] == pytest.approx(24 + 12)
    alive(world, "trainer-solver", 0.25, attempt=1, started_s=1.5)  # another process, another clock
    world.look()
    assert used(world).used["cost"] == pytest.approx(24 + 12 + 3)


def test_an_attempt_is_not_older_than_its_run(supervised: Callable[..., World]) -> None:
    world = supervised(cost=1000, price_per_hour=PRICES)
    alive(world, "trainer-solver", 1e6)
    world.look(seconds=2 * HOUR_S)
    assert used(world).used["cost"] == pytest.approx(24)
    alive(world, "trainer-solver", 2.5)  # its next heartbeat, which is true
    world.look(seconds=0.5 * HOUR_S)
    assert used(world).used["cost"] == pytest.approx(30)


def test_a_restarted_supervisor_counts_on(supervised: Callable[..., World]) -> None:
    world = supervised(cost=1000, hours=100, price_per_hour=PRICES, age_hours=5)
    alive(world, "trainer-solver", 2)
    alive(world, "trainer-verifier", 1)
    world.look()
    world.supervisor = world.restarted()
    world.look()
    assert used(world).used["cost"] == pytest.approx(36)
    alive(world, "trainer-solver", 3)  # it went on while nobody watched
    alive(world, "trainer-verifier", 0.5, attempt=1, started_s=2.0)
    world.supervisor = world.restarted()
    world.look()
    assert used(world).used["cost"] == pytest.approx(36 + 12 + 6)


def test_a_poll_that_could_not_store_the_usage_counts_nothing_twice(
    supervised: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = supervised(cost=1000, price_per_hour=PRICES, age_hours=5)
    alive(world, "trainer-solver", 2)
    write, failures = usage.write, [TransientError("away"), TransientError("away")]

    def away_at_first(run: ObjectStore, record: Usage) -> None:
        if failures:
            raise failures.pop()
        write(run, record)

    monkeypatch.setattr(usage, "write", away_at_first)
    assert world.look(rounds=2) is None
    assert usage.read(world.run) is None
    assert world.look() is None
    assert used(world).used["cost"] == pytest.approx(24)


def test_all_budgets_that_are_used_up_are_the_reason(supervised: Callable[..., World]) -> None:
    world = supervised(hours=1, tokens=5000, cost=12, price_per_hour=PRICES)
    order(world, 0, 4999)
    alive(world, "trainer-solver", 1.25)
    stop = world.look(seconds=1.25 * HOUR_S)
    assert stop is not None
    assert stop.reason == "budget: hours 1.2 of 1, cost 15.00 of 12"


def test_a_run_that_completes_at_its_limit_is_completed(supervised: Callable[..., World]) -> None:
    world = supervised(hours=1)
    for watch in world.supervisor.watches.values():
        watch.done = True
    stop = world.look(seconds=2 * HOUR_S)
    assert stop is not None
    assert stop.state == "completed"
    assert used(world).used["hours"] == pytest.approx(2.0)


def test_a_budget_ends_the_run_while_prefect_does_not_answer(
    supervised: Callable[..., World],
) -> None:
    world = supervised(hours=1)
    world.launcher.away = True
    stop = world.look(seconds=HOUR_S)
    assert stop is not None
    assert stop.state == "exhausted"


def test_a_warning_is_logged_once_when_80_percent_of_a_limit_are_used(
    supervised: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tasks.supervision.budget")
    world = supervised(hours=100, tokens=1000)
    order(world, 0, 799)
    world.look(seconds=79 * HOUR_S)
    assert caplog.messages == []
    order(world, 1, 800)
    world.look(rounds=2)
    assert caplog.messages == ["budget: tokens 800 of 1,000"]
    world.look(rounds=2, seconds=HOUR_S)
    assert caplog.messages[1:] == ["budget: hours 80.0 of 100"]


def test_a_run_continues_with_a_larger_budget_and_not_with_the_same(
    supervised: Callable[..., World],
) -> None:
    world = supervised(cost=24, price_per_hour=PRICES, age_hours=5)
    alive(world, "trainer-solver", 2)
    assert world.look() is not None
    world.supervisor = world.restarted(**{"budget.hours": 50})
    assert runs.read_stop(world.run) is None
    again = world.look()
    assert again is not None
    assert (again.state, world.launcher.launched) == ("exhausted", [])
    world.supervisor = world.restarted(**{"budget.cost": 30})
    assert world.look() is None
    assert len(world.launcher.launched) > 0
    assert used(world).limits == {"cost": 30.0}
    cheaper = {"budget.cost": 30, "budget.price_per_hour.trainers": 1}
    world.supervisor = world.restarted(**cheaper)
    alive(world, "trainer-solver", 3)
    assert world.look() is None
    assert used(world).used["cost"] == pytest.approx(25), "hours that are counted keep their cost"


def test_a_run_without_a_budget_stores_no_usage_and_one_that_lost_its_budget_no_limits(
    supervised: Callable[..., World],
) -> None:
    world = supervised()
    world.look(seconds=1000 * HOUR_S)
    assert usage.read(world.run) is None
    world.supervisor = world.restarted(**{"budget.hours": 1})
    assert world.look() is not None
    world.supervisor = world.restarted(**{"budget.hours": None})
    assert world.look() is None
    stored = used(world)
    assert (stored.limits, stored.used["hours"] >= 1000) == ({}, True)


def test_a_damaged_usage_fails_a_run_with_a_budget_and_no_other(
    supervised: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    world = supervised(hours=8)
    world.look()
    world.run.put(layout.USAGE, b"{}")
    assert world.look() is None, "this supervisor has the numbers, and writes them again"
    world.run.put(layout.USAGE, b"{}")
    world.supervisor = world.restarted()
    stop = world.look()
    assert stop is not None
    assert stop.state == "failed"
    assert "usage.json back from a copy, or delete it: " in stop.reason
    world.supervisor = world.restarted(**{"budget.hours": None})
    assert world.look() is None
    assert "usage.json back from a copy" in caplog.messages[-1]


def test_absurd_lives_in_heartbeats_leave_a_usage_that_can_be_read(
    supervised: Callable[..., World],
) -> None:
    prices = {**PRICES, "trainers": 1e12}
    world = supervised(cost=1e12, price_per_hour=prices, age_hours=10_000)
    alive(world, "trainer-solver", 2**53 / HOUR_S)
    stop = world.look()
    assert stop is not None
    assert stop.state == "exhausted"
    assert used(world).used["cost"] == 2**53


def test_an_unfinished_run_that_used_up_its_budget_has_no_violations(
    supervised: Callable[..., World],
) -> None:
    world = supervised(hours=1)
    assert world.look(seconds=HOUR_S) is not None
    assert verify(world.run, run_terms(world.run)).ok


def test_a_cancellation_has_priority_over_the_budget(supervised: Callable[..., World]) -> None:
    world = supervised(hours=1)
    cancelled = runs.request_stop(world.run, Stop("cancelled", "enough", 1.0))
    assert world.look(seconds=2 * HOUR_S) == cancelled
