"""The static key-value cache of a continuous batch: one slot per running sequence, allocated once.

    keys     [layers, slots, kv_heads, head_dim, max_tokens]
    values   [layers, slots, kv_heads, max_tokens, head_dim]

Keys are stored transposed: the products with queries then read memory sequentially, which halves
their time on a CPU. Slots in use form a dense prefix 0 … N−1, so that a decode step works on plain
slices. Values beyond a sequence's length are those of others, and finite; attention masks them
out. Only where products with absurdly large ones overflow, a request fails, and `clear` follows.

Shapes: N sequences decoded together, K kv_heads, G query heads for each of them, S tokens of a
prompt, D head_dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.engines.torch.architecture import Architecture


class KVCache:
    """Keys and values of all slots."""

    def __init__(
        self,
        architecture: Architecture,
        slots: int,
        max_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        a = architecture
        # Zeros, not empty: see `clear`.
        self.keys = torch.zeros(
            (a.layers, slots, a.kv_heads, a.head_dim, max_tokens), device=device, dtype=dtype
        )
        self.values = torch.zeros(
            (a.layers, slots, a.kv_heads, max_tokens, a.head_dim), device=device, dtype=dtype
        )
        self._slots, self._tokens = (
            torch.arange(slots, device=device),
            torch.arange(max_tokens, device=device),
        )
        self._visible = torch.zeros((), device=device, dtype=dtype)
        self._hidden = torch.full((), -torch.inf, device=device, dtype=dtype)
        self._scale = a.head_dim**-0.5

    def mask(self, positions: Tensor, longest: int) -> Tensor:
        """Return the additive mask [N·K, 1, longest] by which slot i attends up to positions[i]."""
        heads = self.keys.shape[2]
        last = positions[:, None].expand(-1, heads).reshape(-1, 1, 1)
        return torch.where(self._tokens[:longest] > last, self._hidden, self._visible)

    def write(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token of each sequence, `keys` and `values` [N, K, D], at `positions` [N]."""
        slots = self._slots[: len(positions)]
        self.keys[layer].permute(0, 3, 1, 2).index_put_((slots, positions), keys)
        self.values[layer].permute(0, 2, 1, 3).index_put_((slots, positions), values)

    def attend(self, layer: int, queries: Tensor, mask: Tensor) -> Tensor:
        """Attend from one token of each sequence, `queries` [N, K·G, D], to its context.

        Returns [N, K·G·D].
        The query heads that share a key head are the rows of one product, so no key is copied.
        """
        products, longest = mask.shape[0], mask.shape[2]
        width = queries.shape[-1]
        keys = self.keys[layer].flatten(0, 1)[:products, :, :longest]
        values = self.values[layer].flatten(0, 1)[:products, :longest]
        scores = torch.baddbmm(mask, queries.reshape(products, -1, width), keys, alpha=self._scale)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(len(queries), -1)

    def fill(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Copy a prompt's `keys` and `values` [layers, K, S, D] to the start of `slot`."""
        length = keys.shape[2]
        self.keys[:, slot, :, :, :length].copy_(keys.transpose(-1, -2))
        self.values[:, slot, :, :length].copy_(values)

    def clear(self, slot: int) -> None:
        """Overwrite `slot` with zeros: a NaN of a sequence that has left would pass through the
        mask of the next one, as 0 · NaN is NaN.
        """
        self.keys[:, slot].zero_()
        self.values[:, slot].zero_()

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of each source slot to the target slot at its index."""
        self.keys[:, targets, :, :, :length] = self.keys[:, sources, :, :, :length]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]
