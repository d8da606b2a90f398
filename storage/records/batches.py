"""Records of batches: the sequences of one training step, and the fates of all other sequences.

    Sequence ──▶ Batch ⊃ BatchRow, LedgerEntry

Shape legend: L tokens of one sequence. `run/batches.py` stores these records.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from storage.records.types import Bool, Float32, Int32

Fate = Literal["trained", "replayed", "filtered", "expired", "waiting"]
"""The state of a sequence for one policy. All but `waiting` are final; a batch lists the sequences
that wait after it.
"""


class SequenceKey(NamedTuple):
    """The provenance of a sequence: its order, and indices in it.

    Example: order 7, its third prompt, sixth sample, second sequence: `SequenceKey(7, 2, 5, 1)`.
    """

    order: int
    group: int
    episode: int
    sequence: int

    def __hash__(self) -> int:
        # That of a tuple of integers has no secret: thousands of stored keys could share one. So a
        # plain tuple is not found in a set of keys.
        return hash(b"%d %d %d %d" % self)


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchRow:
    """One sequence of a batch, masked to the batch's policy. Its arrays become read-only: data
    algorithms of users get rows that are stored later.
    """

    key: SequenceKey
    prompt_id: str
    tokens: Int32
    """[L]"""
    loss_mask: Bool
    """[L] True on the policy's tokens that are trained on."""
    logprobs: Float32
    """[L] behaviour log-probabilities; 0 where `loss_mask` is False."""
    versions: Int32
    """[L] version that sampled the token; NOT_SAMPLED where `loss_mask` is False."""
    advantages: Float32
    """[L] 0 where `loss_mask` is False."""
    reward: float
    temperature: float
    min_version: int
    """Oldest version that sampled a token of the policy, masked tokens included."""
    replay: bool = False
    """True if a replay algorithm selected the sequence again."""
    region: str = ""
    """Region whose worker sampled the sequence; empty in batches of releases without it."""

    def __post_init__(self) -> None:
        for array in (self.tokens, self.loss_mask, self.logprobs, self.versions, self.advantages):
            array.setflags(write=False)


class LedgerEntry(NamedTuple):
    """An entry of the ledger: the final fate of one sequence for one policy.

    Example: `LedgerEntry(key, "filtered", "zero_advantage")`.
    """

    key: SequenceKey
    fate: Fate
    reason: str
    """Never empty. Of `filtered`: the name of the filter, or of the dataflow's checks
    `failed_episode`, `not_finite`, `outside_vocabulary`, `too_long`, `untrainable`,
    `partial_group`, `no_trained_token`, `unreadable_shard`. Of `expired`: `max_staleness`.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """The sequences of one training step of a policy, and the ledger since the batch before."""

    policy: str
    step: int
    """1, 2, 3, …: batch n turns version n−1 into version n."""
    rows: tuple[BatchRow, ...]
    ledger: tuple[LedgerEntry, ...]
    """Final fates since the batch before, except `trained` and `replayed`, which are the rows."""
    waiting: tuple[SequenceKey, ...]
    """Sequences that wait after this batch, in arrival order. A restarted dataflow needs this,
    `closed_below` and `closed`.
    """
    shards: tuple[int, ...]
    """Orders ingested for this policy since the batch before, in that sequence."""
    closed_below: int
    """All orders below this one are ingested."""
    closed: tuple[int, ...]
    """Ingested orders at or above `closed_below`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`dataflow/…` metrics of this batch."""
    created_s: float = 0.0
