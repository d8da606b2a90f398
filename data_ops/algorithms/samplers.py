"""Samplers: in which order waiting sequences are used. Each is pure; `protocols.Sample` is the
contract.

Sorting is stable, so samplers compose: of `[a, b]`, b arranges first and a last, and b's order
stands wherever a sees a tie. Rows come in arrival order, which therefore decides every tie that is
left.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from data_ops.algorithms.named import Named
from storage.records.batches import BatchRow


@dataclass(frozen=True, eq=False, kw_only=True)
class Draft:
    """What a policy's next batch may be made of. Example: `replace(draft, rows=draft.rows[::-1])`
    is last in, first out.

    The batch is `replays` followed by as many of `rows` as still fit; it is made as soon as the two
    fill it.
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
    """Rows of earlier batches that are asked for again; empty unless a replay algorithm puts them
    here.
    """
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
