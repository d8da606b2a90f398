"""The static key-value cache of a continuous batch: one slot per running sequence, allocated once.

    keys, values   [layers, slots, kv_heads, max_tokens, head_dim]

Slots in use form a dense prefix 0 … n−1, so that a decode step works on plain slices. What lies beyond a sequence's length is
garbage that attention masks out. Knows nothing of requests or sampling.

Shapes: N sequences decoded together, K kv_heads, S tokens of a prompt, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.architecture import Architecture


class KVCache:
    def __init__(
        self, architecture: Architecture, slots: int, max_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (architecture.layers, slots, architecture.kv_heads, max_tokens, architecture.head_dim)
        # Zeros, not empty: a NaN in unwritten memory would pass through the mask, as 0 · NaN is NaN.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        heads = slots * architecture.kv_heads
        self._row_of_head = (torch.arange(heads, device=device) * max_tokens).view(slots, architecture.kv_heads)

    def rows(self, positions: Tensor) -> Tensor:
        """Flat rows [N·K] at which slot i's token of position `positions[i]` stands; the same for every layer."""
        return (self._row_of_head[: len(positions)] + positions[:, None]).flatten()

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token of each of N sequences, `keys` and `values` [N, K, D], at `rows`."""
        width = keys.shape[-1]
        self.keys[layer].view(-1, width).index_copy_(0, rows, keys.reshape(-1, width))
        self.values[layer].view(-1, width).index_copy_(0, rows, values.reshape(-1, width))

    def fill(self, slots: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Copy a prompt's `keys` and `values` [layers, K, S, D] to the start of each of `slots`."""
        length = keys.shape[2]
        self.keys[:, slots, :, :length] = keys[:, None]
        self.values[:, slots, :, :length] = values[:, None]

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of each source slot to the target slot at the same place of the list."""
        self.keys[:, targets, :, :length] = self.keys[:, sources, :, :length]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]
