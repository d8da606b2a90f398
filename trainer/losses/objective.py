"""Which loss a recipe asks for, and its constants, fixed once for a whole minibatch.

M2PO's bounds and mask depend on all tokens they are computed over. They are computed over the whole minibatch, never
over a micro-batch: how much fits into memory must not change what is learned. Where a minibatch takes several
micro-batches this costs one more forward pass without gradients. Where it takes one it costs nothing, and is what the
reference implementation does, whose bounds are those of the micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config import LossConfig
from trainer.losses.losses import (
    ClipBounds,
    TokenLoss,
    constant_weights,
    m2po_clip_bounds,
    m2po_filled_bounds,
    m2po_keep,
    masked_ratio,
    ppo_clip,
    sequence_mean_weights,
    token_mean_weights,
)


@dataclass(frozen=True, eq=False)
class Constants:
    """What stays fixed while a minibatch's gradient is summed up: exactly one of the two."""

    bounds: ClipBounds | None = None
    keep_N: Tensor | None = None
    """[N] over the minibatch's loss tokens in the order of its blocks."""

    def part(self, start: int, end: int) -> "Constants":
        """The constants of loss tokens `start` to `end` (exclusive)."""
        return Constants(self.bounds, None if self.keep_N is None else self.keep_N[start:end])


def looks_ahead(loss: LossConfig) -> bool:
    """True when the constants depend on the current log-probabilities of the whole minibatch."""
    return loss.name == "m2po"


def constants(loss: LossConfig, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Constants:
    """The constants of a minibatch with these loss tokens; no gradient flows through them."""
    if loss.name == "ppo_clip":
        return Constants(bounds=ClipBounds(loss.clip_low, loss.clip_high))
    if loss.m2_form == "adaptive_clip":
        return Constants(bounds=m2po_clip_bounds(logprobs_N, behaviour_N, advantages_N, loss.m2_threshold))
    if loss.m2_form == "water_filled":
        return Constants(bounds=m2po_filled_bounds(logprobs_N, behaviour_N, advantages_N, loss.m2_threshold))
    return Constants(keep_N=m2po_keep(logprobs_N, behaviour_N, loss.m2_threshold))


def token_losses(
    loss: LossConfig, fixed: Constants, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
) -> TokenLoss:
    """The loss of each token, unweighted."""
    if fixed.keep_N is not None:
        return masked_ratio(logprobs_N, behaviour_N, advantages_N, fixed.keep_N, loss.dual_clip)
    if fixed.bounds is None:
        raise ValueError("constants hold neither bounds nor a mask")
    return ppo_clip(logprobs_N, behaviour_N, advantages_N, fixed.bounds, loss.dual_clip)


def row_weights(loss: LossConfig, lengths: list[int]) -> list[float]:
    """What each loss token of a row counts in the minibatch's loss, for rows with so many loss tokens each."""
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    if loss.aggregate == "token_mean":
        weights_B = token_mean_weights(lengths_B)
    elif loss.aggregate == "sequence_mean":
        weights_B = sequence_mean_weights(lengths_B)
    elif loss.constant_length is not None:
        weights_B = constant_weights(lengths_B, loss.constant_length)
    else:
        raise ValueError("aggregate: constant needs constant_length")
    return [float(weight) for weight in weights_B]
