"""The contract of a loss: what a train engine calls.

`docs/extending/losses.md` describes it in prose.

    tokens of a minibatch ──prepare──▶ Prepared (constants, no gradient)
                                          │ part(start, end)
    tokens of a micro-batch ──token_losses┴─▶ TokenLoss [N] ──Σ weight × value──▶ gradient

A loss consists of pure functions of tensors. It does not depend on models, batches or devices. The
weights (`aggregation.py`) and what `prepare` returns are constants: a minibatch may be cut into
micro-batches in any way without a change of its gradient.

Shape legend: N loss tokens, from any sequences in any order.
π is the policy that is trained, b the behaviour policy that sampled the token, ρ = π/b the ratio,
A the advantage. All tensors [N] are float32 or float64.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """One loss per token. Example: ρ = 1.5, A = 1, ε_hi = 0.2 → value −1.2, clipped True."""

    values_N: Tensor
    """[N] differentiable in the current log-probabilities, not weighted."""
    clipped_N: Tensor
    """[N] bool; True where a bound or a mask sets the token's gradient to 0."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Constants of one minibatch: `Prepared(scalars={"clip_low": 0.2, "clip_high": 0.2})`."""

    scalars: Mapping[str, float] = field(default_factory=dict)
    """Constants of the whole minibatch by name. The engine publishes the metric `trainer/{name}`:
    the mean over the optimizer steps of a batch."""
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] constants of each loss token by name."""

    def part(self, start: int, end: int) -> Prepared:
        """Return the constants of the loss tokens `start` to `end` (exclusive)."""
        tensors = {name: tensor_N[start:end] for name, tensor_N in self.per_token.items()}
        return Prepared(self.scalars, tensors)


class Loss(Protocol):
    """A policy-gradient loss."""

    @property
    def whole_minibatch(self) -> bool:
        """Whether `prepare` needs the log-probabilities of all loss tokens of a minibatch.

        True: a minibatch of several micro-batches costs one more forward pass without gradients.
        False: the constants of a token depend on that token alone, and `prepare` is called once for
        each micro-batch. A class attribute: `whole_minibatch = True`.
        """

    def prepare(self, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor) -> Prepared:
        """Compute the constants of these loss tokens. `logprobs_N` carries no gradient."""

    def token_losses(
        self, prepared: Prepared, logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor
    ) -> TokenLoss:
        """Compute the loss of each token; `prepared` has the constants of these tokens only."""


def check_prepared(result: object, num_tokens: int) -> Prepared:
    """Return `result` as the constants of `num_tokens` tokens, with floats as scalars.

    Raises:
        TypeError, ValueError: it is something else. One constant of all tokens would be broadcast.
    """
    if not isinstance(result, Prepared):
        raise TypeError(f"it must return a Prepared, not {type(result).__name__}")
    for name, tensor_N in result.per_token.items():
        shape = list(getattr(tensor_N, "shape", ()))
        if shape[:1] != [num_tokens]:
            raise ValueError(
                f"per_token[{name!r}] must be a tensor of shape [{num_tokens}], not "
                f"{type(tensor_N).__name__} {shape}"
            )
    for name, value in result.scalars.items():
        if not hasattr(value, "__float__"):
            raise TypeError(f"scalars[{name!r}] must be a number, not {type(value).__name__}")
    return replace(result, scalars={name: float(value) for name, value in result.scalars.items()})


def check_token_loss(result: object, num_tokens: int) -> TokenLoss:
    """Return `result` as a TokenLoss of `num_tokens` tokens.

    A value of another shape would be broadcast against the weights and train on wrong numbers.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if not isinstance(result, TokenLoss):
        raise TypeError(f"it must return a TokenLoss, not {type(result).__name__}")
    for name in ("values_N", "clipped_N"):
        tensor_N = getattr(result, name)
        shape = list(getattr(tensor_N, "shape", ()))
        if shape != [num_tokens]:
            raise ValueError(
                f"{name} must be a tensor of shape [{num_tokens}], not "
                f"{type(tensor_N).__name__} {shape}"
            )
    if not result.values_N.is_floating_point() or not result.values_N.requires_grad:
        raise ValueError("values_N must be floating-point values with a gradient in logprobs_N")
    return result
