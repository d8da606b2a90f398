"""Measures what a run has used of its budget, and decides that it is used up.

    hours   the wall clock since `run.json` was created; it goes on when the clock is set back
    tokens  the newest order has the sampled tokens of all shards that the dataflow has ingested
    cost    heartbeats say how long each attempt was alive; the sum is kept in `usage.json`

A restarted supervisor continues from `usage.json`, so no number decreases.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from storage.errors import CorruptError, NotFoundError
from storage.records.control import BudgetKind, CountedLife, Heartbeat, Usage
from storage.records.numbers import QUANTITY_MAX
from storage.run import orders, runs, usage
from storage.store.object_store import ObjectStore
from tasks.monitoring.budget_status import BudgetStatus, budget_of, budget_words
from tasks.recipes.prices import price_per_hour
from tasks.recipes.run_config import BudgetConfig

log = logging.getLogger(__name__)

HOUR_S = 3600.0


@dataclass(kw_only=True)
class BudgetMeter:
    """The budget of one run; used by one thread at a time."""

    run: ObjectStore
    config: BudgetConfig
    clock: Callable[[], float] = time.monotonic
    """Seconds of a clock that is never set."""
    wall_clock: Callable[[], float] = time.time
    _used: dict[BudgetKind, float] | None = field(default=None, init=False)
    """None before the first measurement."""
    _members: dict[str, CountedLife] = field(default_factory=dict, init=False)
    _is_on: bool = field(default=True, init=False)
    """Whether this start of the run, or an earlier one, has a budget."""
    _created_s: float = field(default=0.0, init=False)
    _measured_at_s: float = field(default=0.0, init=False)
    """Time of the last measurement, by `clock`."""
    _num_orders: int = field(default=0, init=False)
    _warned: set[BudgetKind] = field(default_factory=set, init=False)

    def measure(self, beats: Iterable[Heartbeat]) -> str:
        """Count and store what is used; return the budgets that are used up, in words.

        Empty while none is, and without a budget. Raises CorruptError for a damaged `usage.json` or
        `run.json`, TransientError; can then be called again.
        """
        if self._used is None:
            self._begin()
        if not self._is_on or self._used is None:
            return ""
        limits = self.config.limits
        self._used["hours"] = self._hours(self._used["hours"])
        if "tokens" in limits:
            self._used["tokens"] = max(self._used["tokens"], self._tokens())
        age_s = self._used["hours"] * HOUR_S
        for beat in beats:
            self._used["cost"] += self._new_hours(beat, age_s) * price_per_hour(
                self.config.price_per_hour, beat.kind, beat.region
            )
        used = {kind: min(amount, QUANTITY_MAX) for kind, amount in self._used.items()}
        record = Usage(limits=limits, used=used, members=self._members)
        usage.write(self.run, record)
        budgets = budget_of(record)
        self._warn(budgets)
        return budget_words({kind: each for kind, each in budgets.items() if each.is_used_up})

    def _begin(self) -> None:
        stored = self._stored()
        self._created_s = runs.read_run(self.run).created_s
        self._measured_at_s = self.clock()
        self._is_on = stored is not None or bool(self.config.limits)
        if stored is not None:
            self._members = dict(stored.members)
        self._used = {"hours": 0.0, "tokens": 0.0, "cost": 0.0, **(stored.used if stored else {})}

    def _stored(self) -> Usage | None:
        """Read what earlier starts have used; a damaged object only stops a run with a budget."""
        try:
            return usage.read(self.run)
        except CorruptError as error:
            if self.config.limits:
                raise
            log.warning("%s", error)
            return None

    def _hours(self, before: float) -> float:
        """Hours since the run was created, and at least those that passed here since `before`."""
        passed_s, self._measured_at_s = self.clock() - self._measured_at_s, self.clock()
        by_wall_clock = (self.wall_clock() - self._created_s) / HOUR_S
        return max(before + passed_s / HOUR_S, by_wall_clock)

    def _tokens(self) -> float:
        """Sampled tokens that the newest order lists; 0 without a new one that can be read."""
        number = orders.next_number(self.run, self._num_orders)
        if number == self._num_orders:
            return 0.0
        try:
            tokens = orders.read(self.run, number - 1).tokens
        except (CorruptError, NotFoundError) as error:
            log.debug("the tokens of the budget are those of an earlier order: %s", error)
            tokens = 0
        self._num_orders = number
        return float(tokens)

    def _new_hours(self, beat: Heartbeat, age_s: float) -> float:
        """Hours that a member was alive and that are not in its cost yet; they are noted.

        An attempt is not older than its run, whatever its heartbeat says. Heartbeats of an older
        attempt that still runs are ignored, as the supervisor does.
        """
        counted = self._members.get(beat.id)
        if counted and beat.attempt < counted.attempt:
            return 0.0
        is_same = counted and (counted.attempt, counted.started_s) == (beat.attempt, beat.started_s)
        before_s = counted.alive_s if counted and is_same else 0.0
        alive_s = max(before_s, min(beat.alive_s, age_s))
        self._members[beat.id] = CountedLife(
            attempt=beat.attempt, started_s=beat.started_s, alive_s=alive_s
        )
        return (alive_s - before_s) / HOUR_S

    def _warn(self, budgets: Mapping[BudgetKind, BudgetStatus]) -> None:
        """Log once each budget that is nearly used up."""
        for kind, budget in budgets.items():
            if budget.is_nearly_used_up and kind not in self._warned:
                self._warned.add(kind)
                log.warning("%s", budget_words({kind: budget}))
