"""Curators: which prompts are rolled out. Each is a small pure class; `algorithms.Curate` says what it must be."""

import numpy as np

from storage.records.rollouts import Order, Prompt, Shard


class AcceptAll:
    """Every prompt, in the stream's order."""

    needs_shards = False

    def observe(self, order: Order, shard: Shard) -> None:
        """Learns nothing."""

    def accept(self, prompt: Prompt, draw: np.random.Generator) -> bool:
        return True
