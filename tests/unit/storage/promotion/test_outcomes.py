"""Outcomes of teams: created once under the digest of their conditions, checked when read."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage.errors import ConfigError, ConflictError, CorruptError, NotFoundError
from storage.formats import arrow_files
from storage.promotion import outcomes
from storage.promotion.outcomes import digest_of
from storage.store.object_store import ObjectStore
from tests.support.runs.promotable import CONDITIONS, PLAYED
from tests.support.stores.damaging_store import damages_first_reads
from tests.support.stores.resealed import rewritten


def test_outcomes_are_read_back_unchanged(memory_store: ObjectStore) -> None:
    outcomes.create(memory_store, "tiny", PLAYED)
    stored = outcomes.read(memory_store, "tiny", CONDITIONS)
    assert (stored.conditions, stored.problems) == (CONDITIONS, ("a", "b", "c"))
    np.testing.assert_array_equal(stored.accuracies, PLAYED.accuracies)
    assert stored.accuracies.dtype == np.float32
    assert (stored.created_s, stored.seconds) == (5.0, 2.5)
    assert memory_store.list() == [
        f"promotions/tiny/outcomes/{digest_of(asdict(CONDITIONS))}.arrow"
    ]


def test_the_second_writer_of_outcomes_loses(memory_store: ObjectStore) -> None:
    outcomes.create(memory_store, "tiny", PLAYED)
    with pytest.raises(ConflictError):
        outcomes.create(memory_store, "tiny", PLAYED)


def test_outcomes_that_were_not_played_are_not_found(memory_store: ObjectStore) -> None:
    outcomes.create(memory_store, "tiny", PLAYED)
    with pytest.raises(NotFoundError):
        outcomes.read(memory_store, "other", CONDITIONS)


@pytest.mark.parametrize(
    "changed",
    [
        {"dataset": "math"}, {"prompts": "5d0d"}, {"samples": 3}, {"seed": 8}, {"weights": {"solver": "sha256:9e"}},
        {"weights": {"verifier": "sha256:9f"}}, {"models": {"solver": "91bf"}}, {"settings": {}},
        {"settings": {"workflow": {"name": "single_turn", "args": {"x": [2.5, 1, None]}}}},
    ],
    ids=str,
)  # fmt: skip
def test_each_condition_is_part_of_the_key(
    memory_store: ObjectStore, changed: dict[str, Any]
) -> None:
    other = replace(CONDITIONS, **changed)
    outcomes.create(memory_store, "tiny", PLAYED)
    with pytest.raises(NotFoundError):
        outcomes.read(memory_store, "tiny", other)
    moved = outcomes.key("tiny", other)
    memory_store.create(moved, memory_store.get(outcomes.key("tiny", CONDITIONS)))
    with pytest.raises(CorruptError, match=f"{moved}: holds the outcomes of other versions"):
        outcomes.read(memory_store, "tiny", other)


def test_the_order_of_names_is_not_part_of_a_digest() -> None:
    assert digest_of({"a": 1, "b": {"c": 2, "d": 3}}) == digest_of({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest_of([1, 2]) != digest_of([2, 1])
    assert digest_of({"a": 1, "é": []}) == (
        "df0a60e76e58385d1a401a17d2e72d0d7ba83b9911e7add64c8a1da959e67281"
    )


def test_damaged_outcomes_are_named_with_what_to_do(memory_store: ObjectStore) -> None:
    key = outcomes.key("tiny", CONDITIONS)
    memory_store.put(key, b"torn")
    with pytest.raises(CorruptError) as caught:
        outcomes.read(memory_store, "tiny", CONDITIONS)
    assert str(caught.value).startswith(
        f"{memory_store.url}/{key}: a team_outcomes file of 4 bytes"
    )
    assert str(caught.value).endswith(
        "put it back from a copy, or delete it to have it played again"
    )


def test_outcomes_that_arrive_damaged_once_are_read_again(memory_store: ObjectStore) -> None:
    outcomes.create(memory_store, "tiny", PLAYED)
    damaging = damages_first_reads(memory_store)
    assert outcomes.read(damaging, "tiny", CONDITIONS).problems == ("a", "b", "c")


@pytest.mark.parametrize("value", [2.0, -0.5, np.inf, -np.inf])
def test_an_outcome_outside_of_its_bounds_is_corrupt(value: float) -> None:
    wrong = np.array([[1, 0], [0, value], [0, 1]], np.float32)
    with pytest.raises(CorruptError, match=r"sample 1 of row 1 is (inf|-inf|2|-0.5); it is in"):
        outcomes.decode(outcomes.encode(replace(PLAYED, accuracies=wrong)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"problems": ("a", "b", "a")}, "the problem 'a' is there twice"),
        ({"problems": (), "accuracies": np.zeros((0, 2), np.float32)}, "0 problems with 2 samples"),
        ({"conditions": replace(CONDITIONS, samples=3)}, "row 0 has 2 outcomes; the header says 3"),
        ({"conditions": replace(CONDITIONS, samples=33_334)}, "3 problems with 33,334 samples"),
        ({"conditions": replace(CONDITIONS, samples=0)}, "not a _Header: samples"),
        ({"conditions": replace(CONDITIONS, seed=-1)}, "not a _Header: seed"),
        ({"conditions": replace(CONDITIONS, weights={"a/b": ""})}, r"not a _Header: weights\.a/b"),
        ({"created_s": -1.0}, "not a _Header: created_s"),
        ({"seconds": np.inf}, "not a _Header: seconds"),
    ],
)
def test_outcomes_that_contradict_themselves_are_corrupt(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(CorruptError, match=message):
        outcomes.decode(outcomes.encode(replace(PLAYED, **changed)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_outcomes_with_a_setting_that_no_digest_has_are_corrupt(
    memory_store: ObjectStore, value: float
) -> None:
    def change(header: dict[str, Any]) -> None:
        header["settings"] = {"engine": {"speed": value}}

    body = rewritten(outcomes.encode(PLAYED), outcomes.SCHEMA, outcomes.KIND, change)
    memory_store.put(outcomes.key("tiny", CONDITIONS), body)
    with pytest.raises(CorruptError, match=r"engine\.speed.* in its settings is -?(nan|inf), "):
        outcomes.read(memory_store, "tiny", CONDITIONS)


def test_rows_of_different_lengths_are_corrupt() -> None:
    header = {**asdict(CONDITIONS), "created_s": 1.0, "seconds": 1.0, "write_id": "0" * 32}
    ragged = arrow_files.list_column(
        [np.zeros(length, np.float32) for length in (2, 1, 3)], pa.list_(pa.float32())
    )
    columns = {"prompt_id": ["a", "b", "c"], "accuracy": ragged.cast(_list_type())}
    body = arrow_files.encode(outcomes.SCHEMA, columns, outcomes.KIND, header)
    with pytest.raises(CorruptError, match="row 1 has 1 outcomes; the header says 2 samples"):
        outcomes.decode(body)


def _list_type() -> Any:
    return outcomes.SCHEMA.field("accuracy").type


def test_an_invalid_name_of_a_log_is_refused(memory_store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="cannot name a promotion log"):
        outcomes.create(memory_store, "../x", PLAYED)


def test_outcomes_have_at_most_as_many_episodes_as_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = outcomes.encode(PLAYED)
    monkeypatch.setattr(outcomes, "EPISODES_MAX", 6)
    assert outcomes.decode(body).problems == ("a", "b", "c")
    monkeypatch.setattr(outcomes, "EPISODES_MAX", 5)
    with pytest.raises(CorruptError, match="at most 5 episodes"):
        outcomes.decode(body)
