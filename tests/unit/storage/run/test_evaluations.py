from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from storage.errors import ConflictError, CorruptError
from storage.run import evaluations
from storage.run.evaluations import Accuracy, Evaluation
from storage.store.object_store import open_store
from tests.support.stores.damaging_store import damages_first_reads
from tests.support.stores.hiding_store import hides


def evaluation(step: int, workflow: str = "actor_and_verify") -> Evaluation:
    """Four problems: the first attempt right, corrected by the team, wrong, and a failed episode."""
    return Evaluation(
        versions={"solver": step, "verifier": step},
        dataset="chained_addition",
        workflow=workflow,
        rows=("a", "b", "c", "d"),
        first_attempt=np.array([1, 0, 0, np.nan], np.float32),
        final=np.array([1, 1, 0, np.nan], np.float32),
        created_s=5.0,
        seconds=2.5,
    )


def test_an_evaluation_is_read_back_unchanged() -> None:
    run = open_store("memory://evals-roundtrip")
    evaluations.create(run, evaluation(20))
    back = evaluations.read(run, {"verifier": 20, "solver": 20})
    assert (back.versions, back.dataset, back.workflow) == (
        {"solver": 20, "verifier": 20},
        "chained_addition",
        "actor_and_verify",
    )
    assert back.rows == ("a", "b", "c", "d")
    np.testing.assert_array_equal(back.first_attempt, np.array([1, 0, 0, np.nan], np.float32))
    np.testing.assert_array_equal(back.final, np.array([1, 1, 0, np.nan], np.float32))
    assert (back.created_s, back.seconds) == (5.0, 2.5)


def test_an_episode_of_a_team_scores_the_solver_first_and_a_failure_as_wrong() -> None:
    assert evaluations.scores(evaluation(20)) == (
        Accuracy("single_turn", 0.25, 4),
        Accuracy("actor_and_verify", 0.5, 4),
    )


def test_an_episode_of_one_policy_has_one_score() -> None:
    assert evaluations.scores(evaluation(20, "single_turn")) == (Accuracy("single_turn", 0.25, 4),)


def test_the_second_evaluation_of_the_same_versions_loses() -> None:
    run = open_store("memory://evals-twice")
    evaluations.create(run, evaluation(20))
    with pytest.raises(ConflictError):
        evaluations.create(run, evaluation(20))


def test_evaluations_are_listed_in_the_order_of_their_versions() -> None:
    run = open_store("memory://evals-order")
    for step in (100, 0, 20):
        evaluations.create(run, evaluation(step))
    assert [item.versions["solver"] for item in evaluations.read_all(run).readable] == [0, 20, 100]
    assert evaluations.exists(run, {"solver": 20, "verifier": 20})
    assert not evaluations.exists(run, {"solver": 40, "verifier": 40})
    assert evaluations.keys(run, start_after=evaluations.keys(run)[0]) == [
        "evals/solver-00000020_verifier-00000020.arrow",
        "evals/solver-00000100_verifier-00000100.arrow",
    ]


def test_invalid_bytes_are_corrupt_and_named() -> None:
    run = open_store("memory://evals-corrupt")
    run.put("evals/solver-00000000.arrow", b"not arrow")
    with pytest.raises(
        CorruptError, match=r"^evals/solver-00000000\.arrow: a evaluation file of 9 bytes"
    ):
        evaluations.read(run, {"solver": 0})


def crafted(old: bytes, new: bytes) -> bytes:
    """An evaluation in which `old` is replaced by `new`, of the same length, with a correct digest."""
    body = evaluations.encode(evaluation(20)).replace(old, new)
    digits: bytes = pa.ipc.open_file(body).schema.metadata[b"astraflow.digest"]
    return body.replace(digits, xxhash.xxh3_128_hexdigest(body.replace(digits, b"0" * 32)).encode())


@pytest.mark.parametrize(
    ("start", "sentence"),
    [(b'?"versions"', "is not JSON"), (b'{"versionz"', "is not a _Header: versions")],
)
def test_an_invalid_header_is_corrupt(start: bytes, sentence: str) -> None:
    with pytest.raises(CorruptError, match=f"the header of an evaluation {sentence}"):
        evaluations.decode(crafted(b'{"versions"', start))


def test_an_evaluation_of_other_versions_than_in_its_key_is_corrupt() -> None:
    run = open_store("memory://evals-misplaced")
    run.put("evals/solver-00000040_verifier-00000040.arrow", evaluations.encode(evaluation(20)))
    with pytest.raises(
        CorruptError, match=r"^evals/solver-00000040_.*arrow holds the evaluation of .*'solver': 20"
    ):
        evaluations.read(run, {"solver": 40, "verifier": 40})


def test_an_evaluation_of_no_policy_is_corrupt() -> None:
    run = open_store("memory://evals-of-none")
    run.put("evals/.arrow", evaluations.encode(replace(evaluation(20), versions={})))
    found = evaluations.read_all(run)
    assert found.readable == ()
    assert "versions" in found.unreadable["evals/.arrow"]


def test_an_evaluation_that_arrives_damaged_once_is_read_again() -> None:
    run = open_store("memory://evals-damaged")
    evaluations.create(run, evaluation(20))
    assert evaluations.read(damages_first_reads(run), {"solver": 20, "verifier": 20}).rows == (
        "a",
        "b",
        "c",
        "d",
    )


def test_an_evaluation_with_an_invalid_policy_name_is_corrupt() -> None:
    run = open_store("memory://evals-names")
    run.put("evals/solver-00000020.arrow", crafted(b'"solver"', b'"so/ver"'))
    with pytest.raises(
        CorruptError, match=r"^evals/solver-00000020\.arrow: 'so/ver' cannot name a policy"
    ):
        evaluations.read(run, {"solver": 20})


@pytest.mark.parametrize("value", [2.0, -0.5, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("column", ["first_attempt", "final"])
def test_an_outcome_other_than_right_wrong_or_failed_is_corrupt(column: str, value: float) -> None:
    values = np.array([1, 0, value, np.nan], np.float32)
    changed: dict[str, Any] = {column: values}
    with pytest.raises(CorruptError, match=f"{column} of row 2 is"):
        evaluations.decode(evaluations.encode(replace(evaluation(20), **changed)))


@pytest.mark.parametrize(
    "change",
    [
        {"created_s": np.nan},
        {"created_s": 1e300},
        {"created_s": -1.0},
        {"seconds": np.inf},
        {"versions": {"solver": -1}},
    ],
)
def test_an_evaluation_with_an_extreme_number_in_its_header_is_corrupt(
    change: dict[str, Any],
) -> None:
    with pytest.raises(
        CorruptError, match=f"the header of an evaluation is not a _Header: {next(iter(change))}"
    ):
        evaluations.decode(evaluations.encode(replace(evaluation(20), **change)))


def test_an_evaluation_that_is_listed_and_not_found_is_unreadable() -> None:
    run = open_store("memory://evals-hidden")
    evaluations.create(run, evaluation(20))
    evaluations.create(run, evaluation(40))
    hidden = evaluations.key(evaluation(20))
    seen = evaluations.read_all(hides(run, hidden))
    assert [each.versions["solver"] for each in seen.readable] == [40]
    assert "there is no object" in seen.unreadable[hidden]


def test_unreadable_evaluations_are_listed_with_their_reason_beside_the_others() -> None:
    run = open_store("memory://evals-look")
    evaluations.create(run, evaluation(20))
    torn, moved = (
        "evals/solver-00000000_verifier-00000000.arrow",
        "evals/solver-00000040_verifier-00000040.arrow",
    )
    run.put(torn, b"not arrow")
    run.put(moved, run.get("evals/solver-00000020_verifier-00000020.arrow"))
    seen = evaluations.read_all(run)
    assert [item.versions["solver"] for item in seen.readable] == [20]
    assert list(seen.unreadable) == [torn, moved]
    assert "a evaluation file of 9 bytes" in seen.unreadable[torn]
    assert (
        seen.unreadable[moved]
        == f"{moved} holds the evaluation of {{'solver': 20, 'verifier': 20}}"
    )


def test_very_long_names_are_cut_when_an_evaluation_is_read() -> None:
    long = replace(evaluation(1), dataset="d" * 100_000, workflow="w" * 100_000)
    read = evaluations.decode(evaluations.encode(long))
    assert (read.dataset, read.workflow) == ("d" * 1_000, "w" * 1_000)


def test_names_with_line_ends_are_one_line_when_an_evaluation_is_read() -> None:
    written = replace(evaluation(1), dataset="sums\r\ntest", workflow="a)\n  verify: fine\u2028")
    read = evaluations.decode(evaluations.encode(written))
    assert (read.dataset, read.workflow) == ("sums test", "a)   verify: fine")
