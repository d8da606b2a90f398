"""Records of rollouts: what is asked for, and what was sampled.

    Prompt ──▶ Order ──▶ Shard ⊃ Group ⊃ Episode ⊃ Sequence

Shape legend: L tokens of one sequence. Frozen records without files or schemas: `run/orders.py` and
`run/shards.py` store them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from storage.records.numbers import Count, UnixTime
from storage.records.types import Bool, Float32, Int8, Int32, Json

NOBODY = -1
"""In `Sequence.owners` and `Sequence.versions`: a prompt, tool or environment token, which nobody
sampled.
"""

FinishReason = Literal["stop", "length", "abort"]


class FailureKind(StrEnum):
    """Cause of a failed episode. `docs/workflows.md` lists the exceptions of each kind."""

    MODEL = "model"
    """The policy's own output: it filled the longest context, or nothing can be made of it."""
    ENVIRONMENT = "environment"
    TOOL = "tool"
    REWARD = "reward"
    """The reward gave no verdict for a reason other than the answer."""
    TIMEOUT = "timeout"
    """A time limit was exceeded: of the episode, of the judge, or one that the workflow set."""
    INFRASTRUCTURE = "infrastructure"
    """The engine, the store, the network, or workers that were lost."""
    WORKFLOW_BUG = "workflow_bug"
    """Any other error: the workflow's code or its settings."""


NOT_RECORDED = "not_recorded"
"""Stands for the kind in counts of failed episodes whose shard has none."""


@dataclass(frozen=True)
class Prompt:
    """One problem. Example:
    `Prompt("chained_addition/train/17", {"question": "7+8-3=?", "answer": "12"})`.
    """

    id: str
    """Unique within the run's prompt source."""
    fields: Json
    """At least `question`; whatever else the source's columns hold (`answer`, tests, …)."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The unit of rollout work. Example:
    `Order(0, (prompt,), samples_per_prompt=8, seed=0, seen=(), cursor={"next": 1})`.
    """

    number: Count
    """0, 1, 2, … without gaps."""
    prompts: tuple[Prompt, ...]
    samples_per_prompt: Count
    """Episodes of each prompt: the size of a group."""
    seed: Count
    """Every random number of the order's episodes derives from it."""
    seen: tuple[Count, ...]
    """Orders whose shards the dataflow took in since it wrote the order before: curators fold over
    these, in this order.
    """
    cursor: Json
    """Where the prompt source stands after this order; a restarted dataflow goes on from the newest
    order's cursor.
    """
    created_s: UnixTime = 0.0
    """Unix time, seconds; a hint for reports."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequence:
    """The tokens of one model context. A prompt of two tokens and an answer of three, sampled by
    policy 0 at version 4:

    tokens    [11, 12, 40, 41,  2]      owners   [-1, -1, 0, 0, 0]
    loss_mask [ F,  F,  T,  T,  T]      versions [-1, -1, 4, 4, 4]
    """

    tokens: Int32
    """[L] exactly what the engine consumed and produced."""
    loss_mask: Bool
    """[L] True on tokens that may be trained on; only ever True where `owners` is a policy."""
    logprobs: Float32
    """[L] natural log-probability under the sampling distribution (after temperature, top-k,
    top-p); 0 where nobody sampled.
    """
    owners: Int8
    """[L] index into `policies` of the policy that sampled the token, or NOBODY."""
    versions: Int32
    """[L] weights version that sampled the token, or NOBODY."""
    policies: tuple[str, ...]
    """Names that `owners` indexes."""
    reward: float
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same."""
    starts_episode: bool = False
    """True on the first sequence of its episode."""
    name: str = ""
    """The workflow's word for this context: `attempt`, `verdict`, `retry`, …"""
    finish_reason: FinishReason = "stop"
    """How the last generation in the sequence ended."""

    def min_version(self, policy: str) -> int:
        """The oldest version that sampled a token of `policy` here; raises ValueError when it owns
        none.
        """
        own = self.owners == self.policies.index(policy)
        return int(self.versions[own].min())


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One execution of a workflow on a prompt. A failed one has `error`, and usually no sequences."""

    sequences: tuple[Sequence, ...]
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the workflow measured. Math workflows set `first_attempt` and `final` to 1.0 or 0.0
    (correct or not).
    """
    error: str | None = None
    """`Class: message` of the exception, or `timeout after 60 s`; None for a success."""
    failure_kind: FailureKind | None = None
    """Kind of `error`; None for a success, and in shards that were stored without it."""
    seconds: float = 0.0
    """Wall-clock time from start to end."""


def failures_by_kind(episodes: Iterable[Episode]) -> Counter[str]:
    """Count failed episodes by kind; those without one count as NOT_RECORDED."""
    return Counter(
        episode.failure_kind or NOT_RECORDED for episode in episodes if episode.error is not None
    )


@dataclass(frozen=True)
class Group:
    """All episodes of one prompt."""

    prompt: Prompt
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The result of one order."""

    order: int
    attempt: int
    """Lease attempt under which it was made."""
    worker: str
    region: str
    groups: tuple[Group, ...]
    """One for each prompt of the order, in the order's order."""
    weights: Mapping[str, Mapping[int, str]]
    """policy → version → digest of the tensors the worker held, for every version that sampled a
    token of the shard.
    """
    started_s: float
    finished_s: float
    """Unix times by the worker's clock; for reports, never for correctness."""
