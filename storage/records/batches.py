"""Records of batches: the sequences that one policy trains on in one step, and the fate of all
others.

    Sequence ──▶ Batch ⊃ Row, Entry

Shape legend: L tokens of one sequence. `run/batches.py` stores them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from storage.records.types import Bool, Float32, Int32

Fate = Literal["trained", "replayed", "filtered", "expired", "waiting"]
"""What became of a sequence for one policy. `waiting` is not final; a batch lists what still waits
after it.
"""


class SequenceKey(NamedTuple):
    """Where a sequence stands in the run: its provenance. Example: order 7, prompt 2 of it, sample
    5, second sequence.
    """

    order: int
    group: int
    episode: int
    sequence: int


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchRow:
    """One sequence of a batch, already masked to the batch's policy."""

    key: SequenceKey
    prompt_id: str
    tokens: Int32
    """[L]"""
    loss_mask: Bool
    """[L] True on the policy's own tokens that are trained on."""
    logprobs: Float32
    """[L] behaviour log-probabilities; 0 where `loss_mask` is False."""
    versions: Int32
    """[L] version that sampled the token; NOBODY where `loss_mask` is False."""
    advantages: Float32
    """[L] 0 where `loss_mask` is False."""
    reward: float
    temperature: float
    min_version: int
    """Oldest version over the policy's own tokens."""
    replay: bool = False
    """A replay algorithm asked for the sequence again."""


class LedgerEntry(NamedTuple):
    """A line of the books: what became of one sequence for one policy. Example:
    `Entry(key, "filtered", "zero_advantage")`.
    """

    key: SequenceKey
    fate: Fate
    reason: str
    """Of `filtered`: the filter's name, or the dataflow's own `failed_episode`, `not_finite`,
    `outside_vocabulary`, `untrainable`, `partial_group`, `no_trained_token` or `unreadable_shard`.
    Of `expired`: `max_staleness`. Never empty.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """What one policy trains on in one step, and the books since the batch before."""

    policy: str
    step: int
    """1, 2, 3, …: batch n turns version n−1 into version n."""
    rows: tuple[BatchRow, ...]
    ledger: tuple[LedgerEntry, ...]
    """Final fates since the batch before, other than `trained` and `replayed` (those are the rows).
    """
    waiting: tuple[SequenceKey, ...]
    """What still waits after this batch, in arrival order: with `closed_below` and `closed` all a
    restart needs.
    """
    shards: tuple[int, ...]
    """Orders taken in for this policy since the batch before, in the order they were taken in."""
    closed_below: int
    """Every order below this one has been taken in."""
    closed: tuple[int, ...]
    """Orders at or above `closed_below` that have been taken in too."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`dataflow/…` metrics of this batch."""
    created_s: float = 0.0
