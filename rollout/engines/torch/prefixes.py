"""A cache of the keys and values of prompts, valid for one version of the weights.

All samples of a group share one prompt: it is computed once and copied. The number of tokens is
bounded; the least recently used prompt is evicted first.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

PREFIX_TOKENS_MAX = 8192
"""Most prompt tokens in the cache. A token takes 0.1 MB in a 1.7B model, 0.5 kB in a tiny one."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of S tokens."""

    keys: Tensor
    """[layers, kv_heads, S, head_dim]"""
    values: Tensor
    """[layers, kv_heads, S, head_dim]"""


class PrefixCache:
    """Least-recently-used cache of prefixes by prompt."""

    def __init__(self, tokens_max: int = PREFIX_TOKENS_MAX) -> None:
        self._tokens_max = tokens_max
        self._tokens = 0
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

    def __contains__(self, prompt: tuple[int, ...]) -> bool:
        return prompt in self._prefixes

    def get(self, prompt: tuple[int, ...]) -> Prefix | None:
        """Return the prefix of a prompt and mark it as used; None where it is not cached."""
        if (prefix := self._prefixes.get(prompt)) is not None:
            self._prefixes.move_to_end(prompt)
        return prefix

    def put(self, prompt: tuple[int, ...], prefix: Prefix) -> None:
        """Cache a prefix, and evict others until all fit. One above the bound is not cached."""
        if len(prompt) > self._tokens_max or prompt in self._prefixes:
            return
        self._prefixes[prompt] = prefix
        self._tokens += len(prompt)
        while self._tokens > self._tokens_max:
            evicted, _ = self._prefixes.popitem(last=False)
            self._tokens -= len(evicted)

    def clear(self) -> None:
        """Evict everything, since the weights changed."""
        self._prefixes.clear()
        self._tokens = 0
