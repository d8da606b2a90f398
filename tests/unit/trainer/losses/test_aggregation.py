"""Weights of loss tokens against values worked out by hand."""

import numpy as np
import pytest
from pydantic import ValidationError

from trainer.losses.aggregation import Aggregated, constant, sequence_mean, token_mean


def test_token_mean_weighs_all_tokens_equally() -> None:
    assert token_mean(np.array([3, 0, 1])).tolist() == [0.25, 0.0, 0.25]


def test_sequence_mean_weighs_all_sequences_with_tokens_equally() -> None:
    assert sequence_mean(np.array([4, 0, 1])).tolist() == [0.125, 0.0, 0.5]


def test_constant_weights_do_not_depend_on_the_length() -> None:
    assert constant(np.array([4, 0, 1]), constant_length=8).tolist() == [0.0625, 0.0, 0.0625]


def test_a_batch_without_loss_tokens_has_weight_zero() -> None:
    nothing = np.array([0, 0])
    assert token_mean(nothing).tolist() == [0.0, 0.0]
    assert sequence_mean(nothing).tolist() == [0.0, 0.0]
    assert constant(nothing, 8).tolist() == [0.0, 0.0]


def test_lengths_of_another_rank_or_type_are_refused() -> None:
    for lengths in (np.array([1.0]), np.array([[1]]), np.array([1], dtype=np.int32)):
        for weigh in (token_mean, sequence_mean, lambda each: constant(each, 8)):
            with pytest.raises(ValueError, match=r"expected int64 lengths \[B\], found"):
                weigh(lengths)


def test_each_aggregate_has_its_token_weights() -> None:
    lengths = [4, 0, 1]
    assert Aggregated().row_weights(lengths) == pytest.approx([0.2, 0.0, 0.2])
    assert Aggregated(aggregate="token_mean").row_weights(lengths) == pytest.approx([0.2, 0.0, 0.2])
    assert Aggregated(aggregate="sequence_mean").row_weights(lengths) == [0.125, 0.0, 0.5]
    constant_8 = Aggregated(aggregate="constant", constant_length=8)
    assert constant_8.row_weights(lengths) == [0.0625, 0.0, 0.0625]


def test_a_constant_aggregate_requires_its_length() -> None:
    with pytest.raises(ValidationError, match=r"needs loss\.constant_length"):
        Aggregated(aggregate="constant")
