"""Nights: plans and outcomes that are created once, and damage that hides no other night."""

import json
from dataclasses import replace
from typing import Any

import pytest

from storage.errors import ConfigError, ConflictError, CorruptError
from storage.formats.json_objects import seal
from storage.promotion import nights
from storage.promotion.nights import Night
from storage.records.nights import NightEnd, NightOutcome, NightPlan
from storage.records.promotions import TeamVersion
from storage.store.object_store import ObjectStore

PLAN = NightPlan(
    name="tiny",
    night="20260102-0200",
    run_id="tiny-20260102-0200",
    number=1,
    due_s=1_767_319_200.0,
    began_s=1_767_319_203.5,
    champion=3,
    team={"solver": TeamVersion(run_id="tiny-1", version=40, digest="sha256:9f")},
    since_s=1_767_232_800.0,
    prompts_of="tiny-20260101-0200",
    write_id="1" * 32,
)
OUTCOME = NightOutcome(
    name="tiny",
    night="20260102-0200",
    end=NightEnd.PROMOTED,
    reason="better",
    ended_s=1_767_322_800.0,
    decision=4,
    write_id="2" * 32,
)


def test_a_night_is_read_back_with_all_of_its_fields(memory_store: ObjectStore) -> None:
    nights.create_plan(memory_store, PLAN)
    assert nights.read_night(memory_store, "tiny", PLAN.night) == Night(PLAN.night, PLAN, None)
    nights.create_outcome(memory_store, OUTCOME)
    assert nights.read_night(memory_store, "tiny", PLAN.night) == Night(PLAN.night, PLAN, OUTCOME)
    body = json.loads(memory_store.get("nights/tiny/20260102-0200/outcome.json"))
    assert (body["format"], body["end"]) == (1, "promoted")


def test_an_absent_night_has_neither_plan_nor_outcome(memory_store: ObjectStore) -> None:
    assert nights.read_night(memory_store, "tiny", "20260102-0200") == Night(
        "20260102-0200", None, None
    )
    assert nights.read_all(memory_store, "tiny") == nights.Nights("tiny", (), {})


def test_the_second_writer_loses(memory_store: ObjectStore) -> None:
    nights.create_plan(memory_store, PLAN)
    nights.create_outcome(memory_store, OUTCOME)
    with pytest.raises(ConflictError):
        nights.create_plan(memory_store, replace(PLAN, number=2))
    with pytest.raises(ConflictError):
        nights.create_outcome(memory_store, replace(OUTCOME, end=NightEnd.FAILED))


def test_nights_are_listed_in_the_order_of_time(memory_store: ObjectStore) -> None:
    for night in ("20260110-0200", "20251231-2300", "20260102-0200"):
        nights.create_plan(memory_store, replace(PLAN, night=night))
    nights.create_outcome(memory_store, replace(OUTCOME, night="20260103-0200"))
    nights.create_plan(memory_store, replace(PLAN, name="other"))
    stored = nights.read_all(memory_store, "tiny")
    assert [(each.id, each.plan is not None) for each in stored.readable] == [
        ("20251231-2300", True),
        ("20260102-0200", True),
        ("20260103-0200", False),
        ("20260110-0200", True),
    ]
    assert nights.names(memory_store) == ["other", "tiny"]


def test_a_damaged_night_is_named_and_hides_no_other(memory_store: ObjectStore) -> None:
    nights.create_plan(memory_store, PLAN)
    memory_store.put("nights/tiny/20260103-0200/plan.json", b"{")
    stored = nights.read_all(memory_store, "tiny")
    assert [each.id for each in stored.readable] == [PLAN.night]
    assert "nights/tiny/20260103-0200/plan.json" in stored.unreadable["20260103-0200"]


@pytest.mark.parametrize("folder", ["20260102-0200.bak", "old-20260102-0200", "notes"])
def test_a_folder_whose_name_is_no_due_time_is_not_a_night(
    folder: str, memory_store: ObjectStore
) -> None:
    nights.create_plan(memory_store, PLAN)
    memory_store.put(f"nights/tiny/{folder}/plan.json", seal(PLAN))
    stored = nights.read_all(memory_store, "tiny")
    assert [each.id for each in stored.readable] == [PLAN.night]
    assert stored.unreadable == {}


@pytest.mark.parametrize(("name", "night"), [("other", PLAN.night), ("tiny", "20260109-0200")])
def test_a_record_of_another_night_is_corrupt(
    name: str, night: str, memory_store: ObjectStore
) -> None:
    memory_store.put(f"nights/{name}/{night}/plan.json", seal(PLAN))
    with pytest.raises(CorruptError, match="holds the night 20260102-0200 of tiny"):
        nights.read_plan(memory_store, name, night)


def test_a_record_that_is_too_large_is_not_parsed(memory_store: ObjectStore) -> None:
    memory_store.put("nights/tiny/a/plan.json", b" " * (nights.BYTES_MAX + 1))
    with pytest.raises(CorruptError, match="has 1,000,001 bytes"):
        nights.read_plan(memory_store, "tiny", "a")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run_id": "x" * 101}, "run_id: .* is not a run id"),
        ({"due_s": 1e12}, "due_s: Input should be less than or equal to"),
        ({"prompts_of": "a/b"}, "prompts_of: .* is not a run id"),
    ],
)
def test_a_plan_that_could_not_be_read_back_is_not_written(
    change: dict[str, Any], words: str, memory_store: ObjectStore
) -> None:
    with pytest.raises(
        ConfigError, match=f"night 20260102-0200 of tiny cannot be stored: .*{words}"
    ):
        nights.create_plan(memory_store, replace(PLAN, **change))
    with pytest.raises(ConfigError, match="ended_s: Input should be greater than"):
        nights.create_outcome(memory_store, replace(OUTCOME, ended_s=-1.0))
    assert list(memory_store.list("nights/")) == []


@pytest.mark.parametrize("name", ["", "../tiny", "a/b", "x" * 101])
def test_an_invalid_name_is_refused(name: str, memory_store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="cannot name a recurring training"):
        nights.read_all(memory_store, name)
    with pytest.raises(ConfigError, match="cannot name a night"):
        nights.read_plan(memory_store, "tiny", name)
