"""Nights and decisions of a recurring training in a store, for tests of what shows them."""

from dataclasses import replace

from storage.promotion import nights, promotions
from storage.records.nights import NightEnd, NightOutcome, NightPlan, NightStart
from storage.records.promotions import DecisionKind, GateVerdict, Requirement, TeamVersion
from storage.store.object_store import ObjectStore
from tasks.recurring.due_time import due_s
from tests.support.runs.promotable import ROW, gate_decision

NAME = "tiny"
NIGHTS = tuple(f"202601{day:02d}-0200" for day in range(1, 6))
"""Promoted, rejected, promoted, skipped, begun."""
GAIN = replace(
    ROW, dataset="pooled", problems=300, champion=0.40, candidate=0.65, gain=0.25, low=0.2,
    requirement=Requirement.GAIN, passed=True, why="better",
)  # fmt: skip


def plan(number: int, champion: int | None = None) -> NightPlan:
    night = NIGHTS[number]
    return NightPlan(
        name=NAME,
        night=night,
        run_id=f"{NAME}-{night}",
        number=number,
        due_s=due_s(night),
        began_s=due_s(night) + 5.0,
        champion=champion,
    )


def _decide(store: ObjectStore, number: int, night: int, gain: float) -> None:
    passed = gain > 0
    row = replace(GAIN, candidate=0.40 + gain, gain=gain, low=gain - 0.05, passed=passed)
    verdict = GateVerdict(
        passed=passed, reason="a|b", test="mcnemar", confidence=0.95, rows=(row, ROW)
    )
    promotions.create(
        store,
        gate_decision(
            number,
            name=NAME,
            kind=DecisionKind.PROMOTED if passed else DecisionKind.REJECTED,
            team={"solver": TeamVersion(run_id=f"{NAME}-{NIGHTS[night]}", version=8, digest="9f")},
            returns_to=None,
            gate=verdict,
        ),
    )


def write_week(store: ObjectStore) -> None:
    """Write five nights, three decisions of the gate and a rollback by hand."""

    def end(number: int, how: NightEnd, reason: str, decision: int | None = None) -> None:
        outcome = NightOutcome(
            name=NAME,
            night=NIGHTS[number],
            end=how,
            reason=reason,
            ended_s=due_s(NIGHTS[number]) + 600.0,
            decision=decision,
        )
        nights.create_outcome(store, outcome)

    for number, (champion, gain) in enumerate([(None, 0.25), (1, -0.1), (1, 0.05)]):
        nights.create_plan(store, plan(number, champion))
        _decide(store, number + 1, number, gain)
        how = NightEnd.PROMOTED if gain > 0 else NightEnd.REJECTED
        end(number, how, f"gain {gain}", number + 1)
    promotions.create(
        store,
        gate_decision(
            4, name=NAME, kind=DecisionKind.ROLLED_BACK, returns_to=1, gate=None, reason="by hand"
        ),
    )
    end(3, NightEnd.SKIPPED, "no row <b>")
    nights.create_plan(store, plan(4, 4))
    again = NightStart(
        name=NAME, night=NIGHTS[4], number=1, at_s=due_s(NIGHTS[4]) + 90.0, results=12
    )
    nights.create_start(store, again)
