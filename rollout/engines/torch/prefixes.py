"""Prompts that were computed already: their keys and values, for as long as the weights stay the
same.

All samples of a group share one prompt, so it is computed once and copied. Bounded by tokens; the
least recently used go first. Knows nothing of slots or requests.
"""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

PREFIX_TOKENS_MAX = 8192
"""Prompt tokens kept. One token of a 1.7B model takes about 0.1 MB, of a tiny one 0.5 kB."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """What S tokens leave behind in the cache."""

    keys: Tensor
    """[layers, kv_heads, S, head_dim]"""
    values: Tensor
    """[layers, kv_heads, S, head_dim]"""


class PrefixCache:
    def __init__(self, tokens_max: int = PREFIX_TOKENS_MAX) -> None:
        self._tokens_max = tokens_max
        self._tokens = 0
        self._held: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

    def __contains__(self, prompt: tuple[int, ...]) -> bool:
        return prompt in self._held

    def get(self, prompt: tuple[int, ...]) -> Prefix | None:
        if (found := self._held.get(prompt)) is not None:
            self._held.move_to_end(prompt)
        return found

    def put(self, prompt: tuple[int, ...], prefix: Prefix) -> None:
        """Keep `prefix`, dropping the least recently used others until all fit; one above the bound
        is not kept.
        """
        if len(prompt) > self._tokens_max or prompt in self._held:
            return
        self._held[prompt] = prefix
        self._tokens += len(prompt)
        while self._tokens > self._tokens_max:
            dropped, _ = self._held.popitem(last=False)
            self._tokens -= len(dropped)

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        self._held.clear()
        self._tokens = 0
