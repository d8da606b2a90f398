"""Log-probabilities of given tokens from hidden states, with a limit on the logits in memory.

Shape legend: N tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_MAX = 1 << 26
"""Logits [N, V] computed at once (256 MiB in float32); more are computed twice, in chunks."""

Head = Callable[[Tensor], Tensor]
"""[N, H] → [N, V]"""


def token_logprobs(
    hidden_NH: Tensor,
    head: Head,
    target_N: Tensor,
    temperature_N: Tensor,
    logits_max: int = LOGITS_MAX,
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(head(h) / temperature) at the target, and the entropy of the softmax.

    Both float32 [N], in nats; the entropy is detached. When N·V exceeds `logits_max`, the logits
    are computed in chunks, again in the backward pass, so that memory is bounded by one chunk.
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
    chunk_size = max(1, logits_max // head(hidden_NH[:1].detach()).shape[1])
    if num_tokens <= chunk_size:
        return _chunk_logprobs(hidden_NH, head, target_N, temperature_N)
    parts = [
        checkpoint(_chunk_logprobs, hidden_CH, head, target_C, temperature_C, use_reentrant=False)
        for hidden_CH, target_C, temperature_C in zip(
            torch.split(hidden_NH, chunk_size),
            torch.split(target_N, chunk_size),
            torch.split(temperature_N, chunk_size),
            strict=True,
        )
    ]
    logprobs_N = torch.cat([logprobs_C for logprobs_C, _ in parts])
    entropy_N = torch.cat([entropy_C for _, entropy_C in parts])
    return logprobs_N, entropy_N


def _chunk_logprobs(
    hidden_CH: Tensor, head: Head, target_C: Tensor, temperature_C: Tensor
) -> tuple[Tensor, Tensor]:
    logits_CV = head(hidden_CH).float().div_(temperature_C[:, None])
    logprobs_CV = F.log_softmax(logits_CV, dim=-1)
    with torch.no_grad():
        entropy_C = -torch.linalg.vecdot(logprobs_CV.exp(), logprobs_CV)
    # nll_loss has a fused backward pass; that of a gather fills a [C, V] tensor with zeros.
    return -F.nll_loss(logprobs_CV, target_C, reduction="none"), entropy_C
