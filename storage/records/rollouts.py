"""Records of rollouts: orders, and the sequences that workers sampled for them.

    Prompt ──▶ Order ──▶ Shard ⊃ Group ⊃ Episode ⊃ Sequence

Shape legend: L tokens of one sequence. `run/orders.py` and `run/shards.py` store these records.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np

from storage.records.numbers import Count, UnixTime
from storage.records.types import Bool, Float32, Int8, Int32, Json

LOGPROB_MAX = 0.01
"""Rounding may make a log-probability a little larger than 0."""
LOGPROB_MIN = -40.0
"""No sampler draws a less likely token: those of a vocabulary of 2^18 have a probability of 1e-12
together. A ratio of more than e^40 may overflow the norm of the gradient in float32, and a trainer
then skips the whole optimizer step.
"""
NOT_SAMPLED = -1
"""In `Sequence.owners` and `Sequence.versions`: a prompt, tool or environment token."""

POLICIES_MAX = 128
"""Policies of one sequence, which `Sequence.owners` index: it is of int8."""
FinishReason = Literal["stop", "length", "abort"]
KEPT_EPISODES_MAX = 200
"""Episodes that are kept of one evaluation."""


class FailureKind(StrEnum):
    """Cause of a failed episode. The exceptions of each are in `docs/extending/workflows.md`."""

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
    """The columns of the prompt source: `question`, and any others (`answer`, tests, …)."""


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
    """Orders whose shards were ingested after the previous order was written, in that sequence.
    Curators fold over them.
    """
    cursor: Json
    """Position of the prompt source after this order. A restarted dataflow resumes from the newest
    order's cursor.
    """
    tokens: Count = 0
    """Tokens that the policies sampled in the shards of all orders in `seen`, of this order and of
    those before it.
    """
    created_s: UnixTime = 0.0
    """Unix time, seconds; used in reports only."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequence:
    """The tokens of one model context.

    Example: a prompt of two tokens and an answer of three, sampled by policy 0 at version 4.

    tokens    [11, 12, 40, 41,  2]      owners   [-1, -1, 0, 0, 0]
    loss_mask [ F,  F,  T,  T,  T]      versions [-1, -1, 4, 4, 4]
    """

    tokens: Int32
    """[L] token ids as the engine consumed and produced them."""
    loss_mask: Bool
    """[L] True on tokens that may be trained on; False wherever `owners` is NOT_SAMPLED."""
    logprobs: Float32
    """[L] natural log-probability under the sampling distribution (after temperature, top-k,
    top-p); 0 where `owners` is NOT_SAMPLED.
    """
    owners: Int8
    """[L] index into `policies` of the policy that sampled the token, or NOT_SAMPLED."""
    versions: Int32
    """[L] weights version that sampled the token, or NOT_SAMPLED."""
    policies: tuple[str, ...]
    """Names that `owners` indexes; at most POLICIES_MAX."""
    reward: float
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same value."""
    starts_episode: bool = False
    """True on the first sequence of its episode."""
    name: str = ""
    """The workflow's name of this context: `attempt`, `verdict`, `retry`, …"""
    finish_reason: FinishReason = "stop"
    """Why the last generation in the sequence ended."""

    def min_version(self, policy: str) -> int:
        """Return the oldest version of `policy` that sampled a token here; ValueError for none."""
        is_own = self.owners == self.policies.index(policy)
        return int(self.versions[is_own].min())

    def sampled_by(self) -> Iterator[tuple[str, Bool]]:
        """Yield each policy that sampled a token here, and where: a mask [L]."""
        num_tokens = np.bincount(self.owners.astype(np.uint8))  # 255: NOT_SAMPLED
        for index in np.flatnonzero(num_tokens[: len(self.policies)]).tolist():
            yield self.policies[index], self.owners == index


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One execution of a workflow on one prompt. A failed one has `error`, usually no sequences."""

    sequences: tuple[Sequence, ...]
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements of the workflow. Math workflows set `first_attempt` and `final` to 1.0 (correct)
    or 0.0.
    """
    error: str | None = None
    """`Class: message` of the exception, or `timeout after 60 s`; None for a success."""
    failure_kind: FailureKind | None = None
    """Kind of `error`; None for a success, and in shards that were stored without it."""
    seconds: float = 0.0
    """Wall-clock time from start to end."""


class EpisodeEnd(Protocol):
    """How an episode ended: an `Episode`, or what is kept of one."""

    @property
    def error(self) -> str | None: ...
    @property
    def failure_kind(self) -> FailureKind | None: ...


def failures_by_kind(episodes: Iterable[EpisodeEnd]) -> Counter[str]:
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
    """Lease attempt under which the worker produced it."""
    worker: str
    region: str
    groups: tuple[Group, ...]
    """One for each prompt of the order, in the same sequence."""
    weights: Mapping[str, Mapping[int, str]]
    """policy → version → digest of the loaded weights, for every version that sampled a token here.
    """
    started_s: float
    finished_s: float
    """Unix times by the worker's clock; used in reports only."""

    @property
    def num_sampled(self) -> int:
        """Tokens that a policy sampled, in all sequences."""
        return sum(
            int((sequence.owners != NOT_SAMPLED).sum())
            for group in self.groups
            for episode in group.episodes
            for sequence in episode.sequences
        )
