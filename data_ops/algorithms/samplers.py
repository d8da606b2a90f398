"""Built-in samplers: in which order waiting sequences are used (`protocols.Sample`).

Sorting is stable, so samplers compose: of `[a, b]`, b arranges first and a last, and b's order
decides a's ties. Rows come in arrival order, which decides the remaining ties.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from data_ops.algorithms.named import Named
from storage.records.batches import BatchRow


@dataclass(frozen=True, eq=False, kw_only=True)
class Draft:
    """The rows of which a policy's next batch may be made.

    The batch is `replays` followed by as many of `rows` as still fit; it is made as soon as the two
    fill it. Example: `replace(draft, rows=draft.rows[::-1])` is last in, first out.
    """

    policy: str
    step: int
    """The batch to be made; its staleness is counted at version step − 1."""
    size: int
    """Sequences in the batch."""
    rows: tuple[BatchRow, ...]
    """Waiting rows, none of them too stale, the preferred ones first. May be reordered and left
    out, never added to.
    """
    replays: tuple[BatchRow, ...]
    """Rows of earlier batches to be trained on again; empty unless a replay algorithm sets it."""
    trained: Callable[[int], tuple[BatchRow, ...]]
    """`trained(n)`: up to n rows of the newest batches that were no replays there, the newest batch
    first.
    """
    draw: np.random.Generator
    """Seeded by run, policy and step."""


class Edf(Named):
    """Earliest deadline first: the smallest `min_version` first.

    Long generations carry old tokens and are used before they expire, which removes a bias towards
    short, easy prompts.
    """

    name: Literal["edf"] = "edf"

    def make(self, key: str) -> "Edf":
        """Return the sampler."""
        return self

    def arrange(self, draft: Draft) -> Draft:
        return replace(draft, rows=tuple(sorted(draft.rows, key=lambda row: row.min_version)))


class Fifo(Named):
    """First come, first served: the order in which rows arrive."""

    name: Literal["fifo"] = "fifo"

    def make(self, key: str) -> "Fifo":
        """Return the sampler."""
        return self

    def arrange(self, draft: Draft) -> Draft:
        return draft
