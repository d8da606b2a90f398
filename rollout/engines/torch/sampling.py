"""Draw one token for each row of a batch, with its exact log-probability. Pure functions.

Random numbers are counter-based: the uniform number of a token is a hash of the request's seed and
the token's index in the answer (SplitMix64; Steele, Lea, Flood 2014,
https://doi.org/10.1145/2714064.2660195). No generator state is shared, so a request's tokens do not
depend on the other requests.

Shape suffixes: B rows, V vocabulary.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Return the int64 with the bits of `value` mod 2⁶⁴, since torch has no uint64 arithmetic."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


COUNTER_STEP = _signed(_GAMMA)
"""Increment of a request's counter per token, modulo 2⁶⁴."""


def first_counter(seed: int) -> int:
    """Return the counter (int64) of a request's first token.

    Seeds are hashed, so that neighbouring seeds share no numbers.
    """
    z = (seed + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return _signed((z ^ (z >> 31)) + _GAMMA)


def uniform(counters_B: Tensor) -> Tensor:
    """Hash counters (int64) by SplitMix64 to float64 in [0, 1) with 53 random bits; [B]."""
    z = counters_B ^ _shifted(counters_B, 30)
    z.mul_(_signed(_FIRST))
    z ^= _shifted(z, 27)
    z.mul_(_signed(_SECOND))
    z ^= _shifted(z, 31)
    return _shifted(z, 11).double().mul_(2.0**-53)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right logically; torch's operator keeps the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def draw(logits_BV: Tensor, numbers_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits_BV: final logits: temperature applied, −inf where excluded.
        numbers_B: float64 in [0, 1).

    Returns:
        Tokens [B] int64 and their log-probabilities [B] float32.
    """
    probs_BV = torch.softmax(logits_BV, dim=-1, dtype=torch.float32)
    # float64: summing 150,000 probabilities in float32 would shift the boundaries between tokens.
    cumulative_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    targets_B1 = numbers_B[:, None] * cumulative_BV[:, -1:]
    # right=True takes the first token whose sum exceeds the target, so a token of probability 0 is
    # never drawn. With NaN logits no sum does: the clamp keeps the index in bounds, and the
    # log-probability is NaN.
    tokens_B1 = torch.searchsorted(cumulative_BV, targets_B1, right=True)
    tokens_B1.clamp_(max=logits_BV.shape[-1] - 1)
    return tokens_B1[:, 0], probs_BV.gather(-1, tokens_B1)[:, 0].log_()


def truncate(logits_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Return logits [B, V] with −inf outside each row's top-k, then top-p, set.

    Top-p counts probability after top-k has been applied; the token that reaches it is kept. Among
    equal logits the smaller token id comes first.

    Args:
        top_k_B: int64; 0: off.
        top_p_B: 1: off.
    """
    sorted_BV, order_BV = torch.sort(logits_BV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    beyond_k_BV = (rank_V >= top_k_B[:, None]) & (top_k_B[:, None] > 0)
    probs_BV = torch.softmax(
        sorted_BV.masked_fill(beyond_k_BV, -torch.inf), dim=-1, dtype=torch.float32
    )
    before_BV = probs_BV.cumsum(-1, dtype=torch.float64) - probs_BV
    excluded_BV = beyond_k_BV | ((before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1))
    by_token_BV = torch.empty_like(excluded_BV).scatter_(-1, order_BV, excluded_BV)
    return logits_BV.masked_fill(by_token_BV, -torch.inf)
