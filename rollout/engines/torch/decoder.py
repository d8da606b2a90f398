"""Forward passes of a Qwen3-, Qwen2- or Llama-style decoder: prefill and one decode step.

    prefill  tokens [P, S] ──▶ keys and values of the prompts
    decode   tokens [N]    ──▶ logits, the cache extended in place

Written for few operations per step: a tiny model on a CPU spends its time between kernels.

Shapes: P prompts, S their padded length, N sequences decoded together, H heads, K kv_heads, D
head_dim, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engines.torch.architecture import Architecture
from rollout.engines.torch.decoder_weights import DecoderWeights, LayerWeights
from rollout.engines.torch.kv_cache import KVCache
from rollout.engines.torch.rope import rotate, rotation_tables

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [M, H, D], keys [M, K, D], values [M, K, D]) → attention [M, H·D], for M tokens.
"""


class Decoder:
    """The forward passes. Weights are arguments, so that they can change between two calls."""

    def __init__(
        self, architecture: Architecture, max_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.architecture = architecture
        self._eps = torch.tensor([architecture.norm_eps], device=device)
        self._cosines, self._sines = rotation_tables(
            architecture.rope, architecture.head_dim, max_tokens, device=device, dtype=dtype
        )

    def prefill(self, weights: DecoderWeights, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values, both [layers, P, K, S, D], of right-padded `tokens` [P, S].

        Values at the padding are undefined; the causal mask hides them from the real tokens.
        """
        a = self.architecture
        prompts, length = tokens.shape
        shape = (a.layers, prompts, a.kv_heads, length, a.head_dim)
        all_keys, all_values = self._cosines.new_empty(shape), self._cosines.new_empty(shape)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            all_keys[layer] = keys.view(prompts, length, a.kv_heads, a.head_dim).transpose(1, 2)
            all_values[layer] = values.reshape(prompts, length, a.kv_heads, a.head_dim).transpose(
                1, 2
            )
            mixed = F.scaled_dot_product_attention(
                queries.view(prompts, length, a.heads, a.head_dim).transpose(1, 2),
                all_keys[layer],
                all_values[layer],
                is_causal=True,
                enable_gqa=True,
            )
            return mixed.transpose(1, 2).reshape(prompts * length, a.heads * a.head_dim)

        positions = torch.arange(length, device=tokens.device).repeat(prompts)
        self._layers(weights, tokens.flatten(), positions, attend)
        return all_keys, all_values

    def decode(
        self,
        weights: DecoderWeights,
        cache: KVCache,
        tokens: Tensor,
        positions: Tensor,
        longest: int,
    ) -> Tensor:
        """Append token i of `tokens` [N] to slot i at `positions[i]`; return the logits [N, V].

        `longest` is the largest position plus 1: attention reads only this part of the cache.
        """
        mask = cache.mask(positions, longest)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(layer, positions, keys, values)
            return cache.attend(layer, queries, mask)

        return self._logits(weights, self._layers(weights, tokens, positions, attend))

    def _layers(
        self, weights: DecoderWeights, tokens: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Return the residual stream [M, hidden] after the last layer, of tokens [M]."""
        cosines, sines = (
            self._cosines.index_select(0, positions),
            self._sines.index_select(0, positions),
        )
        x = weights.embedding.index_select(0, tokens)
        for number, layer in enumerate(weights.layers):
            queries, keys, values = self._project(layer, x, cosines, sines)
            mixed = attend(number, queries, keys, values)
            if layer.output_bias is not None:
                x = x + layer.output_bias
            x = torch.addmm(x, mixed, layer.output)
            x = self._mlp(layer, x)
        return x

    def _project(
        self, layer: LayerWeights, x: Tensor, cosines: Tensor, sines: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        a = self.architecture
        flat = _linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = flat.view(-1, a.heads + 2 * a.kv_heads, a.head_dim)
        turned = heads[:, : a.heads + a.kv_heads]
        if layer.qk_norm is not None:
            turned = self._norm(turned, layer.qk_norm)
        turned = rotate(turned, cosines, sines)
        return turned[:, : a.heads], turned[:, a.heads :], heads[:, a.heads + a.kv_heads :]

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        inner = self.architecture.intermediate
        gate_up = torch.mm(self._norm(x, layer.mlp_norm), layer.gate_up)
        return torch.addmm(x, F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:]), layer.down)

    def _logits(self, weights: DecoderWeights, x: Tensor) -> Tensor:
        return torch.mm(self._norm(x, weights.norm), weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply RMSNorm over the last dimension, in float32: x · weight / √(mean x² + ε).

        Takes half the time of `F.rms_norm` on a CPU.
        """
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight).to(x.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
