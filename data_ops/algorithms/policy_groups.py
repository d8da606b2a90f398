"""From a shard's groups to the rows of each policy, as pure functions.

    Shard ⊃ Group ──▶ for every policy that owns a token of it:  PolicyGroup ⊃ Row   (masked to that policy)

A sequence goes to every policy that sampled at least one of its tokens, so it may go to several.
This module knows nothing of filters, advantages or staleness: rows leave it with advantage 0.
"""

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.records.batches import BatchRow, LedgerEntry, SequenceKey
from storage.records.rollouts import NOT_SAMPLED, Episode, Group, Prompt, Sequence, Shard

FAILED_EPISODE = "failed_episode"
NOT_FINITE = "not_finite"
UNTRAINABLE = "untrainable"
LOGPROB_MAX = 0.01
"""Rounding may make a log-probability a little larger than 0."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyGroup:
    """All sequences of one prompt in which one policy owns a token: first attempts and retries of
    every sample together.
    """

    policy: str
    prompt: Prompt
    rows: tuple[BatchRow, ...]
    """In the order of their keys; advantages are still 0."""
    refused: tuple[LedgerEntry, ...]
    """Sequences nobody can train on: of failed episodes, with a reward or log-probability that is
    not a finite number, or untrainable otherwise.
    """
    num_failed: int
    """Episodes of the prompt that failed."""

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[G] rewards of `rows`, as the workflow gave them."""
        return np.array([row.reward for row in self.rows], dtype=np.float64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[G] tokens of each row that the policy is trained on."""
        return np.array([np.count_nonzero(row.loss_mask) for row in self.rows], dtype=np.int64)


def route(shard: Shard, policies: Many[str]) -> dict[str, tuple[PolicyGroup, ...]]:
    """Each policy's groups of the shard, in the shard's order; a group in which the policy owns no
    token is left out.
    """
    return {
        policy: tuple(
            routed
            for index, group in enumerate(shard.groups)
            if (routed := route_group(shard.order, index, group, policy)) is not None
        )
        for policy in policies
    }


def route_group(order: int, index: int, group: Group, policy: str) -> PolicyGroup | None:
    """The sequences of one group that `policy` owns a token of; None when there is no such
    sequence.
    """
    rows: list[BatchRow] = []
    refused: list[LedgerEntry] = []
    for number, episode in enumerate(group.episodes):
        for place, sequence in enumerate(episode.sequences):
            own = owned_by(sequence, policy)
            if not own.any():
                continue
            key = SequenceKey(order, index, number, place)
            reason = _refusal(episode, sequence, own)
            if reason:
                refused.append(LedgerEntry(key, "filtered", reason))
            else:
                rows.append(mask_to(sequence, own, key, group.prompt.id))
    if not rows and not refused:
        return None
    num_failed = sum(episode.error is not None for episode in group.episodes)
    return PolicyGroup(
        policy=policy,
        prompt=group.prompt,
        rows=tuple(rows),
        refused=tuple(refused),
        num_failed=num_failed,
    )


def owned_by(sequence: Sequence, policy: str) -> NDArray[np.bool_]:
    """[L] True on the tokens that `policy` sampled."""
    if policy not in sequence.policies:
        return np.zeros(sequence.tokens.shape, dtype=np.bool_)
    return np.asarray(sequence.owners == sequence.policies.index(policy))


def mask_to(
    sequence: Sequence, own: NDArray[np.bool_], key: SequenceKey, prompt_id: str
) -> BatchRow:
    """The sequence as one policy trains on it, `own` [L] marking its tokens: what others sampled is
    context.

    `min_version` is the oldest over all of the policy's tokens, also over those that the workflow
    masked: they are context that an old version chose.
    """
    mask = sequence.loss_mask & own
    return BatchRow(
        key=key,
        prompt_id=prompt_id,
        tokens=sequence.tokens,
        loss_mask=mask,
        logprobs=np.where(mask, sequence.logprobs, np.float32(0)).astype(np.float32, copy=False),
        versions=np.where(mask, sequence.versions, NOT_SAMPLED).astype(np.int32, copy=False),
        advantages=np.zeros(sequence.tokens.shape, dtype=np.float32),
        reward=sequence.reward,
        temperature=sequence.temperature,
        min_version=int(sequence.versions[own].min()),
    )


def _refusal(episode: Episode, sequence: Sequence, own: NDArray[np.bool_]) -> str:
    if episode.error is not None:
        return FAILED_EPISODE
    mask = own & sequence.loss_mask
    logprobs = sequence.logprobs[mask]
    if not math.isfinite(sequence.reward) or not np.isfinite(logprobs).all():
        return NOT_FINITE
    is_greedy = logprobs.size and not sequence.temperature
    return UNTRAINABLE if is_greedy or mask[0] or (logprobs > LOGPROB_MAX).any() else ""
