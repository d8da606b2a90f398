"""Log-probabilities of given tokens from hidden states, without all logits in memory.

For a token t with hidden state h, head (W, b) and temperature T:

    z = (W h + b) / T     log p(t) = z_t − log Σ_v exp z_v     ∂ log p(t) / ∂ z_v = [v = t] − p(v)

The logits z of one chunk of tokens exist at a time. The forward pass keeps two numbers per token:
max z, and log Σ exp(z − max z). From them the backward pass recomputes p of one chunk, and adds its
part to the gradient of the head. Tokens that fit into one chunk are not computed twice.

Shape legend: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_MAX = 1 << 25
"""Logits [C, V] of a chunk (128 MiB in float32); the peak is two such tensors."""


def token_logprobs(
    hidden_NH: Tensor,
    head: torch.nn.Linear,
    target_N: Tensor,
    temperature_N: Tensor,
    operands: torch.dtype | None = None,
    logits_max: int = LOGITS_MAX,
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(head(h) / temperature) at the target, and the entropy of the softmax.

    Both [N], in nats; the entropy is detached. With `operands` bfloat16, hidden states and the head
    are rounded to it for matrix products; logits and sums are float32 all the same.
    """
    if (
        hidden_NH.dim() != 2
        or target_N.shape != hidden_NH.shape[:1]
        or temperature_N.shape != target_N.shape
    ):
        shapes = [list(tensor.shape) for tensor in (hidden_NH, target_N, temperature_N)]
        raise ValueError(
            f"expected hidden [N, H], targets [N] and temperatures [N], found {shapes}"
        )
    chunk_size = max(1, logits_max // head.weight.shape[0])
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden_NH,
        head.weight,
        head.bias,
        target_N,
        temperature_N,
        head.weight.dtype if operands is None else operands,
        chunk_size,
    )
    return logprobs_N, entropy_N


@dataclass(frozen=True, eq=False)
class _Softmax:
    """The softmax of one chunk: p = exp(shifted_CV − log_sum_C)."""

    shifted_CV: Tensor
    """z − max z"""
    max_C: Tensor
    log_sum_C: Tensor
    entropy_C: Tensor


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature_N: Tensor,
        operands: torch.dtype,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        head_VH = weight_VH.to(operands)
        dtype = torch.promote_types(weight_VH.dtype, torch.float32)
        logprobs_N, entropy_N, max_N, log_sum_N = (
            torch.empty(len(hidden_NH), dtype=dtype, device=hidden_NH.device) for _ in range(4)
        )
        kept_CV: Tensor | None = None
        for chunk in _chunks(len(hidden_NH), chunk_size):
            hidden_CH = hidden_NH[chunk].to(operands)
            softmax = _softmax(_logits(hidden_CH, head_VH, bias_V, temperature_N[chunk]))
            max_N[chunk], log_sum_N[chunk] = softmax.max_C, softmax.log_sum_C
            entropy_N[chunk] = softmax.entropy_C
            at_target_C = softmax.shifted_CV.gather(1, target_N[chunk, None])[:, 0]
            logprobs_N[chunk] = at_target_C - softmax.log_sum_C
            if len(hidden_NH) <= chunk_size and any(ctx.needs_input_grad):
                kept_CV = softmax.shifted_CV
            del softmax  # before the logits of the next chunk
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, target_N, temperature_N, max_N, log_sum_N, kept_CV
        )
        ctx.operands, ctx.chunk_size = operands, chunk_size
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, target_N, temperature_N, *softmax, kept_CV = ctx.saved_tensors
        max_N, log_sum_N = softmax
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head_VH = weight_VH.to(ctx.operands)
        grad_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_VH = torch.zeros_like(weight_VH) if needs_weight else None
        grad_V = torch.zeros_like(bias_V) if needs_bias else None
        for chunk in _chunks(len(hidden_NH), ctx.chunk_size):
            hidden_CH = hidden_NH[chunk].to(ctx.operands)
            if kept_CV is None:
                shifted_CV = _logits(hidden_CH, head_VH, bias_V, temperature_N[chunk])
                shifted_CV.sub_(max_N[chunk, None])
            else:
                shifted_CV = kept_CV.clone()
            # The slope of the loss in the logits before the temperature, in the same memory.
            scale_C = (slope_N[chunk] / temperature_N[chunk])[:, None]
            slope_CV = shifted_CV.sub_(log_sum_N[chunk, None]).exp_().mul_(-scale_C)
            slope_CV.scatter_add_(1, target_N[chunk, None], scale_C)
            if grad_V is not None:
                grad_V += slope_CV.sum(0)
            rounded_CV = slope_CV.to(ctx.operands)
            if grad_NH is not None:
                grad_NH[chunk] = _product(rounded_CV, head_VH)
            if grad_VH is not None:
                _add_product(grad_VH, rounded_CV.T, hidden_CH)
        return grad_NH, grad_VH, grad_V, None, None, None, None


def _chunks(num_tokens: int, chunk_size: int) -> list[slice]:
    return [slice(start, start + chunk_size) for start in range(0, num_tokens, chunk_size)]


def _logits(
    hidden_CH: Tensor, head_VH: Tensor, bias_V: Tensor | None, temperature_C: Tensor
) -> Tensor:
    logits_CV = _product(hidden_CH, head_VH.T)
    if bias_V is not None:
        logits_CV.add_(bias_V)
    return logits_CV.div_(temperature_C[:, None])


def _softmax(logits_CV: Tensor) -> _Softmax:
    """Reduce logits, whose memory is overwritten."""
    max_C = logits_CV.amax(-1)
    shifted_CV = logits_CV.sub_(max_C[:, None])
    exp_CV = shifted_CV.exp()
    sum_C = exp_CV.sum(-1)
    mean_C = exp_CV.mul_(shifted_CV).sum(-1) / sum_C
    log_sum_C = sum_C.log()
    return _Softmax(shifted_CV, max_C, log_sum_C, log_sum_C - mean_C)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; BF16 ones give a float32 product with float32 sums.

    The product of two BF16 numbers is exact in float32: on a CPU the operands are converted, which
    needs no BF16 instructions.
    """
    if left.dtype != torch.bfloat16:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product to `total` in place."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)  # without a tensor for the product
    else:
        total.add_(_product(left, right))
