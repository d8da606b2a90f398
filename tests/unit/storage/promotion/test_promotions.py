"""Promotion logs: decisions that are created once, and damage that hides no other decision."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from storage import layout
from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats.json_objects import seal
from storage.promotion import promotions
from storage.records.promotions import GateVerdict, PromotionDecision, TeamVersion
from storage.store.object_store import ObjectStore
from tests.support.runs.promotable import ROW, gate_decision


def test_a_decision_is_read_back_with_all_of_its_fields(memory_store: ObjectStore) -> None:
    promotions.create(memory_store, gate_decision(1))
    stored = promotions.read(memory_store, "tiny-1.7b", 1)
    assert replace(stored, write_id="") == gate_decision(1)
    body = json.loads(memory_store.get("promotions/tiny-1.7b/00000001.json"))
    assert (body["format"], body["kind"], body["team"]["solver"]["version"]) == (1, "rejected", 40)


def test_a_row_without_numbers_is_read_back(memory_store: ObjectStore) -> None:
    empty = replace(ROW, problems=0, champion=math.inf)
    verdict = GateVerdict(passed=False, reason="", test="t", confidence=0.9, rows=(empty,))
    promotions.create(memory_store, gate_decision(1, gate=verdict))
    assert promotions.read(memory_store, "tiny-1.7b", 1).gate == verdict
    body = json.loads(memory_store.get("promotions/tiny-1.7b/00000001.json"))
    assert body["gate"]["rows"][0]["champion"] == "Infinity"


def test_the_second_writer_of_a_number_loses(memory_store: ObjectStore) -> None:
    promotions.create(memory_store, gate_decision(1))
    with pytest.raises(ConflictError):
        promotions.create(memory_store, gate_decision(1, by="bob"))
    assert promotions.read(memory_store, "tiny-1.7b", 1).by == "ada"


def test_an_absent_decision_is_not_found(memory_store: ObjectStore) -> None:
    with pytest.raises(NotFoundError):
        promotions.read(memory_store, "tiny", 1)
    log = promotions.read_log(memory_store, "tiny")
    assert (log.readable, log.unreadable, log.next_number) == ((), {}, 1)


def test_decisions_are_listed_in_the_order_of_their_numbers(memory_store: ObjectStore) -> None:
    for number in range(1, 13):
        promotions.create(memory_store, gate_decision(number))
    promotions.create(memory_store, gate_decision(1, name="other"))
    log = promotions.read_log(memory_store, "tiny-1.7b")
    assert [each.number for each in log.readable] == list(range(1, 13))
    assert (log.unreadable, log.next_number) == ({}, 13)
    assert promotions.names(memory_store) == ["other", "tiny-1.7b"]


def test_a_damaged_decision_is_reported_and_hides_no_other(memory_store: ObjectStore) -> None:
    promotions.create(memory_store, gate_decision(1))
    promotions.create(memory_store, gate_decision(2))
    memory_store.create("promotions/tiny-1.7b/00000003.json", b"torn")
    log = promotions.read_log(memory_store, "tiny-1.7b")
    assert [each.number for each in log.readable] == [1, 2]
    assert list(log.unreadable) == [3]
    assert log.unreadable[3].startswith("promotions/tiny-1.7b/00000003.json is not JSON")
    assert log.next_number == 4


def test_a_missing_decision_is_reported_and_its_number_is_not_used_again(
    memory_store: ObjectStore,
) -> None:
    for number in (1, 3):
        promotions.create(memory_store, gate_decision(number))
    log = promotions.read_log(memory_store, "tiny-1.7b")
    assert log.unreadable == {
        2: "promotions/tiny-1.7b/00000002.json is missing, and a later decision exists"
    }
    assert log.next_number == 4


def test_a_gap_of_any_length_is_one_entry(memory_store: ObjectStore) -> None:
    """A set of the missing numbers would need more memory than any machine has."""
    promotions.create(memory_store, gate_decision(2))
    memory_store.create("promotions/tiny-1.7b/9223372036854775807.json", b"torn")
    log = promotions.read_log(memory_store, "tiny-1.7b")
    assert log.unreadable == {
        1: "promotions/tiny-1.7b/00000001.json is missing, and a later decision exists",
        2**63
        - 2: "promotions/tiny-1.7b/00000003.json to 9223372036854775806.json are missing, and "
        "a later decision exists",
        2**63 - 1: log.unreadable[2**63 - 1],
    }
    with pytest.raises(ConfigError, match=r"9,223,372,036,854,775,807; .* delete .*775807\.json$"):
        promotions.create(memory_store, gate_decision(log.next_number))


def test_a_gap_ends_with_the_last_missing_number(memory_store: ObjectStore) -> None:
    for number in (1, 2, 5, 6):
        promotions.create(memory_store, gate_decision(number))
    assert list(promotions.read_log(memory_store, "tiny-1.7b").unreadable) == [4]


@pytest.mark.parametrize(
    "foreign",
    [gate_decision(1, name="other"), gate_decision(7)],
    ids=["another name", "another number"],
)
def test_the_copy_of_another_decision_is_unreadable(
    memory_store: ObjectStore, foreign: PromotionDecision
) -> None:
    memory_store.create(layout.promotion("tiny-1.7b", 1), seal(foreign))
    with pytest.raises(CorruptError, match=f"holds decision {foreign.number} of {foreign.name}"):
        promotions.read(memory_store, "tiny-1.7b", 1)
    assert list(promotions.read_log(memory_store, "tiny-1.7b").unreadable) == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "deposed"},
        {"team": {}},
        {"team": {"../x": TeamVersion(run_id="tiny-1", version=1, digest="")}},
        {"team": {f"p{number}": TeamVersion(run_id="a", version=1, digest="") for number in range(101)}},
        {"team": {"solver": TeamVersion(run_id="a/b", version=1, digest="")}},
        {"team": {"solver": TeamVersion(run_id="a", version=-1, digest="")}},
        {"at_s": -1.0},
        {"gate": GateVerdict(passed=True, reason="", test="", confidence=0.9, rows=(ROW,) * 102)},
        {"reason": "x" * 1_000_001},
    ],
    ids=["kind", "no policy", "a path", "policies", "run", "version", "time", "rows", "bytes"],
)  # fmt: skip
def test_a_decision_that_readers_refuse_is_neither_written_nor_read(
    memory_store: ObjectStore, fields: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="the decision cannot be stored"):
        promotions.create(memory_store, gate_decision(1, **fields))
    assert memory_store.list("promotions") == []
    memory_store.create(layout.promotion("tiny-1.7b", 1), seal(gate_decision(1, **fields)))
    assert list(promotions.read_log(memory_store, "tiny-1.7b").unreadable) == [1]


def test_other_keys_are_no_decisions(memory_store: ObjectStore) -> None:
    for key in ("1.json", "00000000.json", "note.txt", "00000002.json/x", "00000001.arrow"):
        memory_store.put(f"promotions/tiny/{key}", b"x")
    assert promotions.read_log(memory_store, "tiny").unreadable == {}
    memory_store.put("promotions/not a name/00000001.json", b"x")
    assert promotions.names(memory_store) == ["tiny"]


def test_an_invalid_name_is_refused_with_the_rule(memory_store: ObjectStore) -> None:
    for name in ("", "../x", "a/b", "a" * 101, ".hidden"):
        with pytest.raises(ConfigError, match="cannot name a promotion log; use up to 100 letters"):
            promotions.read_log(memory_store, name)
