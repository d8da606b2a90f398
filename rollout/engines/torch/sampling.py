"""Drawing one token for each row of a batch, with the exact log-probability of what was drawn.

Randomness is counter-based: the uniform number for a token is a hash of the request's seed and the
token's index in the answer (SplitMix64; Steele, Lea, Flood 2014,
https://doi.org/10.1145/2714064.2660195). No generator state is shared, so a request's tokens do not
depend on its neighbours.

Shapes: B rows, V vocabulary. Pure functions; they know nothing of requests or models.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the bits of `value` mod 2⁶⁴: torch has no arithmetic on uint64, and wraps on
    int64.
    """
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


COUNTER_STEP = _signed(_GAMMA)
"""What a request's counter grows by with every token, modulo 2⁶⁴."""


def first_counter(seed: int) -> int:
    """The counter (int64) of a request's first token. Seeds are hashed, so that neighbouring seeds
    share no numbers.
    """
    z = (seed + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return _signed((z ^ (z >> 31)) + _GAMMA)


def uniform(counters: Tensor) -> Tensor:
    """SplitMix64's output for `counters` [B] int64 as float64 in [0, 1) with 53 random bits."""
    z = counters ^ _shifted(counters, 30)
    z.mul_(_signed(_FIRST))
    z ^= _shifted(z, 27)
    z.mul_(_signed(_SECOND))
    z ^= _shifted(z, 31)
    return _shifted(z, 11).double().mul_(2.0**-53)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """The logical right shift; torch's own keeps the sign."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def draw(logits: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverting the distribution function: tokens [B] int64, log-probabilities
    [B] float32.

    `logits` [B, V] are final (temperature applied, −inf where excluded); `numbers` [B] float64 in
    [0, 1).
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    # float64: summing 150,000 probabilities in float32 would shift the boundaries between tokens.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    targets = numbers[:, None] * cumulative[:, -1:]
    # right=True takes the first token whose sum exceeds the target, so one of probability 0 is
    # never drawn. NaN logits find no token at all; the clamp keeps the lookup in bounds, and the
    # log-probability says NaN.
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log_()


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`logits` [B, V] with −inf outside each row's top-k, then top-p, set. `top_k` [B] int64 (0:
    off), `top_p` [B] (1: off).

    Top-p counts probability after top-k has been applied; the token that reaches `top_p` is kept.
    Among equals the smaller token id goes first.
    """
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    beyond_k = (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    probabilities = torch.softmax(
        ordered.masked_fill(beyond_k, -torch.inf), dim=-1, dtype=torch.float32
    )
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    excluded = beyond_k | ((before >= top_p[:, None]) & (top_p[:, None] < 1))
    return logits.masked_fill(torch.empty_like(excluded).scatter_(-1, order, excluded), -torch.inf)
