"""Built-in curators: which prompts are rolled out (`protocols.Curate`)."""

from typing import ClassVar, Literal

import numpy as np

from data_ops.algorithms.named import Named
from storage.records.rollouts import Order, Prompt, Shard


class AcceptAll(Named):
    """Every prompt, in the stream's order."""

    name: Literal["accept_all"] = "accept_all"

    needs_shards: ClassVar[bool] = False

    def make(self, key: str) -> "AcceptAll":
        """Return the curator."""
        return self

    def observe(self, order: Order, shard: Shard) -> None:
        """Do nothing: the curator has no state."""

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        return True
