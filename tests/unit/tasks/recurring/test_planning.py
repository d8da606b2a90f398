"""What a night does: begin, go on, or skip."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from storage import layout
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import ConfigError, CorruptError
from storage.promotion import nights, promotions
from storage.records.control import Stop
from storage.records.nights import NightEnd, NightOutcome, NightPlan, NightStart
from storage.records.promotions import DecisionKind
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.recurring import planning
from tasks.recurring.due_time import due_s
from tasks.recurring.planning import Schedule
from tasks.recurring.restarts import RESTARTS_MAX
from tests.support.patience import until
from tests.support.runs import promotable
from tests.support.stores.bad_sectors import fail_reads
from tests.support.stores.strange_objects import link, take_place

FIRST, SECOND, THIRD = "20260101-0200", "20260102-0200", "20260103-0200"
SCHEDULE = Schedule(late_limit_s=3600.0, catches_up=False, begins_with_champion=True)


def begin(
    store: ObjectStore,
    night: str,
    schedule: Schedule = SCHEDULE,
    late_s: float = 5.0,
    pause: Callable[[float], None] = lambda seconds: None,
) -> NightPlan | NightOutcome:
    return planning.begin(store, "tiny", night, schedule, lambda: due_s(night) + late_s, pause)


def planned(store: ObjectStore, night: str, schedule: Schedule = SCHEDULE) -> NightPlan:
    plan = begin(store, night, schedule)
    assert isinstance(plan, NightPlan)
    return plan


def skipped(store: ObjectStore, night: str, **given: object) -> str:
    outcome = begin(store, night, **given)  # type: ignore[arg-type]
    assert isinstance(outcome, NightOutcome)
    assert outcome.end is NightEnd.SKIPPED
    assert nights.read_plan(store, "tiny", night) is None
    return outcome.reason


def judged(store: ObjectStore, night: str, how: NightEnd = NightEnd.PROMOTED) -> NightPlan:
    plan = planned(store, night)
    planning.end(store, "tiny", night, how, "because")
    return plan


def test_the_first_night_begins_with_the_recipe(memory_store: ObjectStore) -> None:
    plan = planned(memory_store, FIRST)
    assert replace(plan, write_id="") == NightPlan(
        name="tiny",
        night=FIRST,
        run_id=f"tiny-{FIRST}",
        number=0,
        due_s=due_s(FIRST),
        began_s=due_s(FIRST) + 5.0,
    )
    assert nights.read_plan(memory_store, "tiny", FIRST) == plan


def test_rows_that_come_after_a_night_that_begins_early_are_the_next_ones(
    memory_store: ObjectStore,
) -> None:
    early = begin(memory_store, FIRST, late_s=-7200.0)
    assert isinstance(early, NightPlan)
    assert early.until_s == due_s(FIRST) - 7200.0
    planning.end(memory_store, "tiny", FIRST, NightEnd.PROMOTED, "because")
    late = planned(memory_store, SECOND)
    assert (late.since_s, late.until_s) == (early.until_s, due_s(SECOND))


def test_a_night_begins_with_the_champion_and_behind_the_last_judged_night(
    memory_store: ObjectStore,
) -> None:
    judged(memory_store, FIRST)
    judged(memory_store, SECOND, NightEnd.REJECTED)
    promotions.create(
        memory_store,
        promotable.gate_decision(1, name="tiny", kind=DecisionKind.PROMOTED),
    )
    plan = planned(memory_store, THIRD)
    assert (plan.number, plan.champion, plan.since_s) == (2, 1, due_s(SECOND))
    assert plan.prompts_of == f"tiny-{SECOND}"
    assert plan.team == promotions.read(memory_store, "tiny", 1).team


def test_a_night_may_begin_with_the_recipe_although_there_is_a_champion(
    memory_store: ObjectStore,
) -> None:
    promotions.create(
        memory_store,
        promotable.gate_decision(1, name="tiny", kind=DecisionKind.PROMOTED),
    )
    plan = planned(memory_store, FIRST, replace(SCHEDULE, begins_with_champion=False))
    assert (plan.champion, plan.team) == (None, {})


@pytest.mark.parametrize("how", [NightEnd.FAILED, NightEnd.CANCELLED, NightEnd.ABANDONED])
def test_the_data_of_a_night_without_a_verdict_is_used_again(
    how: NightEnd, memory_store: ObjectStore
) -> None:
    judged(memory_store, FIRST)
    judged(memory_store, SECOND, how)
    plan = planned(memory_store, THIRD)
    assert (plan.since_s, plan.prompts_of, plan.number) == (due_s(FIRST), f"tiny-{FIRST}", 2)


def test_a_retry_reads_its_plan_whatever_happened_meanwhile(memory_store: ObjectStore) -> None:
    plan = planned(memory_store, FIRST)
    promotions.create(
        memory_store,
        promotable.gate_decision(1, name="tiny", kind=DecisionKind.PROMOTED),
    )
    again = begin(memory_store, FIRST, late_s=1e6)
    assert again == plan


def test_a_night_that_is_over_stays_over(memory_store: ObjectStore) -> None:
    judged(memory_store, FIRST, NightEnd.REJECTED)
    again = begin(memory_store, FIRST)
    assert isinstance(again, NightOutcome)
    assert (again.end, again.reason) == (NightEnd.REJECTED, "because")
    other = planning.end(memory_store, "tiny", FIRST, NightEnd.PROMOTED, "later", 7)
    assert (other.end, other.decision) == (NightEnd.REJECTED, None)


def test_a_late_night_is_skipped_unless_it_catches_up(memory_store: ObjectStore) -> None:
    assert isinstance(begin(memory_store, FIRST, late_s=3600.0), NightPlan)
    reason = skipped(memory_store, SECOND, late_s=3600.5)
    assert reason.startswith("it was due 1.0 h ago, and the limit is 1 h")
    catching_up = replace(SCHEDULE, catches_up=True)
    planning.end(memory_store, "tiny", FIRST, NightEnd.REJECTED, "because")
    assert isinstance(begin(memory_store, THIRD, catching_up, late_s=1e6), NightPlan)


def test_a_night_of_the_far_future_is_refused_and_not_stored(memory_store: ObjectStore) -> None:
    with pytest.raises(
        ConfigError, match=r"^night 20260102-0200 is due in 1\.5 days, .*; correct night_id"
    ):
        begin(memory_store, SECOND, late_s=-1.5 * 86_400)
    assert nights.read_all(memory_store, "tiny").readable == ()
    planned_early = begin(memory_store, SECOND, late_s=-86_400.0)
    assert isinstance(planned_early, NightPlan)
    assert begin(memory_store, SECOND, late_s=-1.5 * 86_400) == planned_early


def test_a_name_that_is_too_long_for_runs_of_nights_is_refused_and_not_stored(
    memory_store: ObjectStore,
) -> None:
    def begin_as(name: str) -> NightPlan | NightOutcome:
        return planning.begin(memory_store, name, FIRST, SCHEDULE, lambda: due_s(FIRST))

    with pytest.raises(ConfigError, match=r"cannot be stored: .* run_id: "):
        begin_as("x" * 87)
    assert nights.names(memory_store) == []
    assert begin_as("x" * 86) == begin_as("x" * 86)


def test_a_night_that_comes_after_a_later_one_is_skipped(memory_store: ObjectStore) -> None:
    judged(memory_store, SECOND)
    assert skipped(memory_store, FIRST).startswith(f"the later night {SECOND} has begun")


def test_a_skipped_later_night_does_not_stand_in_the_way(memory_store: ObjectStore) -> None:
    assert skipped(memory_store, SECOND, late_s=1e6)
    assert isinstance(begin(memory_store, FIRST), NightPlan)


@pytest.mark.parametrize("far", ["99991231-2359", "99999999-9999", "20260103-0201"])
def test_a_night_that_cannot_have_begun_yet_does_not_stand_in_the_way(
    memory_store: ObjectStore, far: str
) -> None:
    plan = planned(memory_store, FIRST)
    nights.create_plan(memory_store, replace(plan, night=far))
    assert far in {night.id for night in nights.read_all(memory_store, "tiny").readable}
    assert isinstance(begin(memory_store, SECOND), NightPlan)


def heartbeat(store: ObjectStore, night: str) -> HeartbeatWriter:
    folder = store.sub(layout.night("tiny", night))
    return HeartbeatWriter(folder, "supervisor", "night", 0, interval_s=0.01)


def test_a_night_is_skipped_while_an_earlier_one_lives(memory_store: ObjectStore) -> None:
    planned(memory_store, FIRST)
    with heartbeat(memory_store, FIRST) as living:

        def pause(seconds: float) -> None:
            before = living.last.beats
            until(lambda: living.last.beats > before + 1)

        assert skipped(memory_store, SECOND, pause=pause) == f"the night {FIRST} still runs"
        with pytest.raises(ConfigError, match=f"night {FIRST} of tiny runs already"):
            begin(memory_store, FIRST, pause=pause)
    assert isinstance(begin(memory_store, FIRST), NightPlan)


def test_a_dead_night_is_abandoned_and_its_run_stopped(memory_store: ObjectStore) -> None:
    planned(memory_store, FIRST)
    run = runs.create_run(memory_store, f"tiny-{FIRST}", {})
    plan = planned(memory_store, SECOND)
    assert plan.since_s is None
    outcome = nights.read_outcome(memory_store, "tiny", FIRST)
    assert outcome is not None
    assert outcome.end is NightEnd.ABANDONED
    stop = runs.read_stop(run)
    assert stop is not None
    assert (stop.state, stop.reason) == ("cancelled", outcome.reason)


def test_a_dead_night_whose_run_had_ended_is_abandoned(memory_store: ObjectStore) -> None:
    planned(memory_store, FIRST)
    run = runs.create_run(memory_store, f"tiny-{FIRST}", {})
    runs.request_stop(run, Stop("completed", "all steps", 1.0))
    planned(memory_store, SECOND)
    assert runs.read_stop(run) == Stop("completed", "all steps", 1.0)


def test_a_dead_night_whose_runs_end_cannot_be_read_is_abandoned(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    planned(memory_store, FIRST)
    run = runs.create_run(memory_store, f"tiny-{FIRST}", {})
    run.put(layout.STOP, b"{")
    planned(memory_store, SECOND)
    outcome = nights.read_outcome(memory_store, "tiny", FIRST)
    assert outcome is not None
    assert outcome.end is NightEnd.ABANDONED
    assert f"the run tiny-{FIRST} is not stopped: the run's end cannot be read" in caplog.text
    assert run.get(layout.STOP) == b"{"


def test_a_dead_night_whose_runs_end_is_on_a_bad_sector_is_abandoned(
    local_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(local_store, FIRST)
    run = runs.create_run(local_store, f"tiny-{FIRST}", {})
    runs.request_stop(run, Stop("completed", "all steps", 1.0))
    fail_reads(monkeypatch, f"tiny-{FIRST}/{layout.STOP}")
    planned(local_store, SECOND)
    outcome = nights.read_outcome(local_store, "tiny", FIRST)
    assert outcome is not None
    assert outcome.end is NightEnd.ABANDONED


def test_a_dead_night_whose_run_is_a_link_is_abandoned(
    local_store: ObjectStore, tmp_path: Path
) -> None:
    planned(local_store, FIRST)
    take_place(tmp_path / "store" / "runs" / f"tiny-{FIRST}", link)
    planned(local_store, SECOND)


def test_nothing_begins_behind_a_night_that_cannot_be_read(memory_store: ObjectStore) -> None:
    memory_store.put(layout.night_plan("tiny", FIRST), b"{}")
    with pytest.raises(CorruptError, match=rf"night {FIRST} of tiny cannot be read: .*to forget"):
        begin(memory_store, SECOND)


def test_nothing_begins_while_the_champion_is_unknown(memory_store: ObjectStore) -> None:
    memory_store.put(layout.promotion("tiny", 1), b"{}")
    with pytest.raises(ConfigError, match="the champion of tiny is not known"):
        begin(memory_store, FIRST)
    assert nights.read_plan(memory_store, "tiny", FIRST) is None


def test_a_night_that_keeps_dying_without_storing_anything_has_failed(
    memory_store: ObjectStore,
) -> None:
    plan = planned(memory_store, FIRST)
    run = runs.create_run(memory_store, plan.run_id, {})
    for _ in range(RESTARTS_MAX):
        assert begin(memory_store, FIRST) == plan
    outcome = begin(memory_store, FIRST)
    assert isinstance(outcome, NightOutcome)
    assert outcome.end is NightEnd.FAILED
    assert "started again 5 times in a row without storing anything new" in outcome.reason
    stop = runs.read_stop(run)
    assert stop is not None
    assert (stop.state, stop.reason) == ("failed", outcome.reason)
    assert begin(memory_store, FIRST) == outcome
    assert planned(memory_store, SECOND).number == 1, "the next night goes on"


@pytest.mark.parametrize(
    "key",
    [
        "runs/tiny-{night}/run.json",
        "runs/tiny-{night}/stop.json",
        "runs/tiny-{night}/shards/00000000.arrow",
        "runs/tiny-{night}/batches/solver/00000001.arrow",
        "runs/tiny-{night}/evals/00000001.arrow",
        "runs/tiny-{night}/weights/solver/00000001/manifest.json",
        "runs/tiny-{night}/checkpoints/solver/00000001/manifest.json",
        "promotions/tiny/outcomes/5f.arrow",
    ],
)
def test_a_night_that_stores_something_new_may_die_again(
    memory_store: ObjectStore, key: str
) -> None:
    plan = planned(memory_store, FIRST)
    for _ in range(RESTARTS_MAX):
        assert begin(memory_store, FIRST) == plan
    memory_store.put(key.format(night=FIRST), b"")
    for _ in range(RESTARTS_MAX):
        assert begin(memory_store, FIRST) == plan
    assert isinstance(begin(memory_store, FIRST), NightOutcome)


def test_heartbeats_and_leases_are_nothing_new(memory_store: ObjectStore) -> None:
    plan = planned(memory_store, FIRST)
    for number in range(RESTARTS_MAX):
        assert begin(memory_store, FIRST) == plan
        memory_store.put(f"runs/{plan.run_id}/leases/00000000.{number:04d}.json", b"{}")
        memory_store.put(f"runs/{plan.run_id}/heartbeats/trainer/t-{number}.json", b"{}")
    assert isinstance(begin(memory_store, FIRST), NightOutcome)


def test_a_start_that_cannot_be_read_is_named_with_what_to_do(memory_store: ObjectStore) -> None:
    planned(memory_store, FIRST)
    key = layout.night_start("tiny", FIRST, 1)
    memory_store.put(key, b"{}")
    with pytest.raises(CorruptError, match=rf"is not known: {key}.*; delete that object"):
        begin(memory_store, FIRST)
    memory_store.delete(key)
    begin(memory_store, FIRST)
    memory_store.put(layout.night_start("tiny", FIRST, 2), memory_store.get(key))
    with pytest.raises(CorruptError, match="holds start 1 of the night"):
        begin(memory_store, FIRST)


def test_a_stray_start_of_the_largest_number_stops_no_further_one(
    memory_store: ObjectStore,
) -> None:
    plan = planned(memory_store, FIRST)
    begin(memory_store, FIRST)
    (first,) = nights.read_starts(memory_store, "tiny", FIRST, RESTARTS_MAX)
    nights.create_start(memory_store, replace(first, number=2**63 - 1))
    assert begin(memory_store, FIRST) == plan
    starts = nights.read_starts(memory_store, "tiny", FIRST, RESTARTS_MAX)
    assert [each.number for each in starts] == [1, 2]


def test_of_two_processes_that_take_up_a_night_one_does(memory_store: ObjectStore) -> None:
    plan = planned(memory_store, FIRST)
    create = nights.create_start

    def late(store: ObjectStore, start: NightStart) -> None:
        create(store, replace(start, write_id="0" * 32))
        create(store, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nights, "create_start", late)
        with pytest.raises(ConfigError, match="was started again by another process"):
            begin(memory_store, FIRST)
    assert begin(memory_store, FIRST) == plan
