from dataclasses import replace

import numpy as np
import pytest

from storage.errors import CorruptError
from storage.records.batches import BatchRow, SequenceKey
from tests.support.runs.builders import batch, row
from trainer.engines.step.minibatches import batch_advantages, check_rows, minibatches


def with_array(name: str, *values: float) -> BatchRow:
    good = row(SequenceKey(7, 2, 5, 1))
    return replace(good, **{name: np.array(values, dtype=getattr(good, name).dtype)})


@pytest.mark.parametrize(
    ("flawed", "reason"),
    [
        (with_array("tokens"), "it has no tokens"),
        (with_array("tokens", 11, 12, 40, 41, 42), "outside the model's vocabulary of 42"),
        (with_array("tokens", 11, 12, 40, -1, 2), "outside the model's vocabulary of 42"),
        (with_array("loss_mask", 1, 0, 1, 1, 1), "no token precedes it"),
        (with_array("logprobs", 0, 0, -1, -1), "logprobs has 4 entries for 5 tokens"),
        (with_array("logprobs", 0, 0, -1, float("-inf"), -1), "not a finite number"),
        (with_array("advantages", 0, 0, 1, 1, float("nan")), "not a finite number"),
        (with_array("logprobs", 0, 0, -1, 0.02, -1), "outside -40 to 0.01"),
        (with_array("logprobs", 0, 0, -1, -40.1, -1), "outside -40 to 0.01"),
        (
            replace(row(SequenceKey(7, 2, 5, 1)), temperature=0.0),
            "set sampling.temperature above 0",
        ),
    ],
)
def test_an_untrainable_row_is_named_with_batch_sequence_and_reason(
    flawed: BatchRow, reason: str
) -> None:
    with pytest.raises(CorruptError) as error:
        check_rows(batch(row(), flawed, step=3), vocab_size=42)
    assert reason in str(error.value)
    assert "row 1 of batches/solver/00000003.arrow (sequence (7, 2, 5, 1))" in str(error.value)


def test_a_valid_batch_passes_up_to_the_last_token_of_the_vocabulary() -> None:
    check_rows(batch(row(answer=(41,))), vocab_size=42)


def test_a_row_is_at_most_as_long_as_the_contexts_of_the_model() -> None:
    # Batches have no other limit on the tokens of a row: 11 kB may hold a hundred thousand.
    long = batch(row(prompt=[1], answer=[2] * 8))
    check_rows(long, vocab_size=42, positions=9)
    with pytest.raises(CorruptError, match="it has 9 tokens; the model has 8 positions"):
        check_rows(long, vocab_size=42, positions=8)


def test_advantages_are_normalised_over_loss_tokens_and_returned_by_row() -> None:
    # Loss tokens have 2, 2, −2, −2: mean 0, deviation 2. Prompt tokens are excluded.
    rows = batch(row(answer=(1, 2), advantage=2.0), row(prompt=(5,), answer=(3, 4), advantage=-2.0))
    first, second = batch_advantages(rows, normalized=True)
    assert first.tolist() == pytest.approx([0, 0, 1, 1], abs=1e-5)
    assert second.tolist() == pytest.approx([0, -1, -1], abs=1e-5)


def test_advantages_without_normalisation_are_zero_outside_the_loss_mask() -> None:
    loud = replace(row(answer=(1, 2)), advantages=np.array([9, 9, 0.5, 0.5], dtype=np.float32))
    assert [each.tolist() for each in batch_advantages(batch(loud), normalized=False)] == [
        [0, 0, 0.5, 0.5]
    ]


def test_minibatches_contain_each_row_once_and_depend_only_on_seed_and_step() -> None:
    parts = minibatches(10, 4, seed=1, step=2)
    assert [len(part) for part in parts] == [3, 3, 2, 2]
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    assert [part.tolist() for part in minibatches(10, 4, seed=1, step=2)] == [
        part.tolist() for part in parts
    ]
    assert [part.tolist() for part in minibatches(10, 4, seed=1, step=3)] != [
        part.tolist() for part in parts
    ]


def test_minibatches_are_parts_of_numpys_permutation_for_the_seed_and_the_step() -> None:
    order = np.random.default_rng([7, 2]).permutation(5).tolist()
    assert order != list(range(5))
    assert [part.tolist() for part in minibatches(5, 2, seed=7, step=2)] == [order[:3], order[3:]]


def test_there_are_never_more_minibatches_than_rows() -> None:
    assert [len(part) for part in minibatches(2, 4, seed=0, step=1)] == [1, 1]
