"""Weights of the loss tokens of a minibatch, by which token losses are summed to one number.

The loss of a minibatch is Σ weight × token loss. Tokens that a mask drops still count.

Shape legend: B sequences of a minibatch. `lengths_B` int64 [B] are their numbers of loss tokens.
Functions return one weight float32 [B] for all loss tokens of a sequence, 0 where it has none.
"""

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import model_validator

from storage.config_model import Frozen, OnlyWith, Tokens
from storage.records.types import Float32, Int64
from trainer.losses.corrections import CorrectionConfig, NoCorrection


def token_mean(lengths_B: Int64) -> Float32:
    """Weigh every loss token the same: 1 / ΣL (DAPO, arXiv 2503.14476)."""
    _check_lengths(lengths_B)
    total = max(int(lengths_B.sum()), 1)
    return np.where(lengths_B > 0, 1.0 / total, 0.0).astype(np.float32)


def sequence_mean(lengths_B: Int64) -> Float32:
    """Weigh every sequence the same: 1 / (B·L_b) (GRPO, arXiv 2402.03300).

    B counts the sequences that have loss tokens.
    """
    _check_lengths(lengths_B)
    weights_B = 1.0 / (_num_sequences(lengths_B) * np.maximum(lengths_B, 1).astype(np.float64))
    return np.where(lengths_B > 0, weights_B, 0.0).astype(np.float32)


def constant(lengths_B: Int64, constant_length: int) -> Float32:
    """Weigh every loss token 1 / (B·constant_length) (Dr.GRPO, arXiv 2503.20783).

    A long answer then weighs more than a short one, in proportion to its length.
    """
    _check_lengths(lengths_B)
    weight = 1.0 / (_num_sequences(lengths_B) * constant_length)
    return np.where(lengths_B > 0, weight, 0.0).astype(np.float32)


class Aggregated(Frozen):
    """Settings of every loss: the weights with which its token losses are summed."""

    aggregate: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """DAPO, GRPO and Dr.GRPO in turn."""
    constant_length: Annotated[Tokens | None, OnlyWith("aggregate", "constant")] = None
    """Divisor of `aggregate: constant`."""
    correction: CorrectionConfig = NoCorrection()
    """Weights that correct for the mismatch of sampler and trainer, and for staleness."""

    def row_weights(self, lengths: list[int]) -> list[float]:
        """Return for each row the weight of its loss tokens; `lengths` are their numbers."""
        lengths_B = np.array(lengths, dtype=np.int64)
        if self.aggregate == "token_mean":
            weights_B = token_mean(lengths_B)
        elif self.aggregate == "sequence_mean":
            weights_B = sequence_mean(lengths_B)
        else:
            assert self.constant_length is not None, "the validator requires it"
            weights_B = constant(lengths_B, self.constant_length)
        return [float(weight) for weight in weights_B]

    @model_validator(mode="after")
    def _constant_needs_length(self) -> Self:
        if self.aggregate == "constant" and self.constant_length is None:
            raise ValueError("loss.aggregate: constant needs loss.constant_length")
        return self


def _num_sequences(lengths_B: Int64) -> int:
    """Count the sequences that have loss tokens; at least 1."""
    return max(int((lengths_B > 0).sum()), 1)


def _check_lengths(lengths_B: Int64) -> None:
    """Raise ValueError for anything but int64 [B]."""
    if lengths_B.ndim != 1 or lengths_B.dtype != np.int64:
        raise ValueError(
            f"expected int64 lengths [B], found {lengths_B.dtype} {list(lengths_B.shape)}"
        )
