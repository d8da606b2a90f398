"""Prepare a stored batch for training: check rows, normalize advantages, draw minibatches.

Does not import torch. Shape legend: N loss tokens of a batch, A all its tokens, L tokens of a row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from storage import layout
from storage.errors import CorruptError
from storage.records.batches import Batch, BatchRow
from storage.records.rollouts import LOGPROB_MAX, LOGPROB_MIN
from storage.records.types import Float32, Int64
from trainer.losses.mismatch import NOT_MEASURED

EPS = 1e-5
"""Added to the standard deviation of the advantages, as in published implementations."""


def check_rows(batch: Batch, vocab_size: int, positions: int | None = None) -> None:
    """Raise CorruptError, naming batch, row and reason, when the model cannot train on a row.

    `positions` are the tokens of the model's longest context, None where they are unknown: a
    trainer's memory and time grow faster than a row, of which a small batch may have millions of
    tokens.
    """
    for number, row in enumerate(batch.rows):
        reason = _fault(row, vocab_size, positions)
        if reason:
            key = layout.batch(batch.policy, batch.step)
            raise CorruptError(
                f"row {number} of {key} (sequence {tuple(row.key)}) cannot be trained on: {reason}"
            )


def _fault(row: BatchRow, vocab_size: int, positions: int | None) -> str:
    """Return why the model cannot train on the row, or an empty string."""
    num_tokens = len(row.tokens)
    if num_tokens == 0:
        return "it has no tokens"
    if positions is not None and num_tokens > positions:
        return f"it has {num_tokens} tokens; the model has {positions} positions"
    for name in ("loss_mask", "logprobs", "versions", "advantages"):
        if len(getattr(row, name)) != num_tokens:
            return f"{name} has {len(getattr(row, name))} entries for {num_tokens} tokens"
    if row.loss_mask[0]:
        return "its first token is in the loss mask, but no token precedes it"
    if row.tokens.min() < 0 or row.tokens.max() >= vocab_size:
        return f"a token lies outside the model's vocabulary of {vocab_size}"
    if not np.isfinite(row.advantages).all() or not np.isfinite(row.logprobs).all():
        return "an advantage or log-probability is not a finite number"
    sampled = row.logprobs[row.loss_mask]
    if ((sampled < LOGPROB_MIN) | (sampled > LOGPROB_MAX)).any():
        return (
            f"a log-probability in the loss mask lies outside {LOGPROB_MIN:g} to {LOGPROB_MAX:g}, "
            "those of tokens that can be sampled"
        )
    if not row.temperature > 0:
        return (
            f"its sampling temperature is {row.temperature:g}; set sampling.temperature above 0 "
            "for a trained policy"
        )
    return ""


def regions_of(batch: Batch) -> tuple[str, ...]:
    """Return the regions of the batch's rows, ascending; an unknown one is the empty string."""
    return tuple(sorted({row.region for row in batch.rows}))


def measured_regions(batch: Batch, regions: Sequence[str]) -> list[Int64]:
    """Return for each token of each row the index of its region, [L] each.

    NOT_MEASURED where the version is not the one in training, which is `batch.step` − 1: a
    difference of log-probabilities would be staleness there, and not mismatch.
    """
    index = {region: number for number, region in enumerate(regions)}
    return [
        np.where(row.versions == batch.step - 1, index[row.region], NOT_MEASURED)
        for row in batch.rows
    ]


def batch_advantages(batch: Batch, normalized: bool) -> list[Float32]:
    """Return the advantages [L] of each row, 0 outside its loss mask.

    With `normalized`, they are normalized over the loss tokens of the whole batch.
    """
    masked = [np.where(row.loss_mask, row.advantages, np.float32(0)) for row in batch.rows]
    if not normalized or not masked:
        return masked
    mask_A = np.concatenate([row.loss_mask for row in batch.rows])
    advantages_A = np.concatenate(masked)
    advantages_A[mask_A] = normalize(advantages_A[mask_A])
    return np.split(advantages_A, np.cumsum([len(row.tokens) for row in batch.rows])[:-1])


def normalize(values_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute (x − mean) / (std + 1e-5) over all loss tokens of a batch, in float64.

    Over the whole batch and not a minibatch: the splitting must not change a token's value. The
    divisor of the variance is N, not N − 1: the values are the whole population, and their mean
    square becomes 1 for any N. (The public AstraFlow implementation divides by N − 1: values are
    smaller by the factor √(1 − 1/N), 5e-5 for 10,000 tokens.) A single value, or equal ones,
    become 0.
    """
    if values_N.ndim != 1 or values_N.dtype != np.float32:
        raise ValueError(f"expected float32 [N], found {values_N.dtype} {list(values_N.shape)}")
    if values_N.size == 0:
        return values_N
    wide_N: NDArray[np.float64] = values_N.astype(np.float64)
    normal_N: NDArray[np.float32] = ((wide_N - wide_N.mean()) / (wide_N.std() + EPS)).astype(
        np.float32
    )
    return normal_N


def minibatches(num_rows: int, count: int, seed: int, step: int) -> list[NDArray[np.int64]]:
    """Return the row numbers of each minibatch, shuffled by (seed, step) alone.

    Without a random state, a resumed trainer draws the same minibatches.
    """
    shuffled = np.random.default_rng([seed, step]).permutation(num_rows)
    return [part for part in np.array_split(shuffled, count) if len(part)]
