"""The nights of a recurring training with their decisions and the roles after each."""

from storage import layout
from storage.store.object_store import ObjectStore
from tasks.recurring import history
from tests.support.runs.week_of_nights import NAME, NIGHTS, write_week


def test_each_night_has_its_plan_its_end_and_its_decision(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    stored = history.read(memory_store, NAME)
    assert [(row.night, row.state) for row in stored.nights] == list(
        zip(NIGHTS, ("promoted", "rejected", "promoted", "skipped", "begun"), strict=True)
    )
    assert [row.decision.number if row.decision else None for row in stored.nights] == [
        *(1, 2, 3),
        None,
        None,
    ]
    gains = [row.gain_row.gain if row.gain_row else None for row in stored.nights]
    assert gains == [0.25, -0.1, 0.05, None, None]


def test_the_roles_after_each_decision_are_those_of_the_log(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    stored = history.read(memory_store, NAME)
    assert [change.roles for change in stored.changes] == [
        {"champion": 1},
        {"champion": 1, "challenger": 2},
        {"champion": 3, "previous": 1},
        {"champion": 4},
    ]
    assert stored.standing.champion is not None
    assert stored.standing.champion.number == 4


def test_what_cannot_be_read_is_named_and_hides_nothing_else(memory_store: ObjectStore) -> None:
    write_week(memory_store)
    memory_store.put(layout.night_plan(NAME, NIGHTS[1]), b"{")
    memory_store.put(layout.promotion(NAME, 2), b"{")
    stored = history.read(memory_store, NAME)
    assert set(stored.unreadable) == {f"night {NIGHTS[1]}", "decision 2"}
    assert [row.night for row in stored.nights] == [NIGHTS[0], *NIGHTS[2:]]
    assert [change.decision.number for change in stored.changes] == [1, 3, 4]


def test_a_decision_that_cannot_be_read_leaves_its_night_without_one(
    memory_store: ObjectStore,
) -> None:
    write_week(memory_store)
    memory_store.put(layout.promotion(NAME, 1), b"{")
    first = history.read(memory_store, NAME).nights[0]
    assert (first.state, first.decision, first.gain_row) == ("promoted", None, None)


def test_a_name_without_anything_has_an_empty_history(memory_store: ObjectStore) -> None:
    stored = history.read(memory_store, "other")
    assert (stored.nights, stored.changes, stored.unreadable) == ((), (), {})
