"""Log-probabilities of given tokens out of hidden states, without holding more logits than a limit.
Pure.

Shape legend: N tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_MAX = 1 << 26
"""Elements of logits [N, V] made at once: 256 MiB in float32. Beyond it they are made twice, chunk
by chunk.
"""

Head = Callable[[Tensor], Tensor]
"""[N, H] → [N, V]"""


def token_logprobs(
    hidden_NH: Tensor,
    head: Head,
    target_N: Tensor,
    temperature_N: Tensor,
    logits_max: int = LOGITS_MAX,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(h) / temperature) at the target, and that distribution's entropy: float32
    [N] each, in nats.

    The entropy is detached. When N·V would exceed `logits_max`, works in chunks whose logits are
    computed again in the backward pass, so that memory is bounded by one chunk.
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
    num_tokens = hidden_NH.shape[0]
    chunk = max(1, logits_max // head(hidden_NH[:1].detach()).shape[1])
    if num_tokens <= chunk:
        return _chunk_logprobs(hidden_NH, head, target_N, temperature_N)
    parts = [
        checkpoint(_chunk_logprobs, hidden, head, target, temperature, use_reentrant=False)
        for hidden, target, temperature in zip(
            torch.split(hidden_NH, chunk),
            torch.split(target_N, chunk),
            torch.split(temperature_N, chunk),
            strict=True,
        )
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat(
        [entropy for _, entropy in parts]
    )


def _chunk_logprobs(
    hidden_NH: Tensor, head: Head, target_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    logits_NV = head(hidden_NH).float().div_(temperature_N[:, None])
    all_NV = F.log_softmax(logits_NV, dim=-1)
    with torch.no_grad():
        entropy_N = -torch.linalg.vecdot(all_NV.exp(), all_NV)
    # nll_loss keeps the backward pass fused, where a gather would fill an [N, V] tensor with zeros.
    return -F.nll_loss(all_NV, target_N, reduction="none"), entropy_N
