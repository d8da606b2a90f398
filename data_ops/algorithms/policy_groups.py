"""Route a shard's groups to the policies, as pure functions.

    Shard ⊃ Group ──▶ for every policy that owns a token of it:  PolicyGroup ⊃ BatchRow
                                                                 (masked to that policy)

A sequence goes to every policy that sampled at least one of its tokens, so it may go to several.
Rows have advantage 0 here; filters and advantages come later.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage import layout
from storage.records.batches import BatchRow, LedgerEntry, SequenceKey
from storage.records.rollouts import (
    LOGPROB_MAX,
    LOGPROB_MIN,
    NOT_SAMPLED,
    Episode,
    Group,
    Prompt,
    Sequence,
    Shard,
)

FAILED_EPISODE = "failed_episode"
NOT_FINITE = "not_finite"
UNTRAINABLE = "untrainable"
OUTSIDE_VOCABULARY = "outside_vocabulary"
TOO_LONG = "too_long"


class ModelLimits(NamedTuple):
    """What limits the sequences that a policy's model is trained on; None: unknown."""

    vocab_size: int | None = None
    positions: int | None = None
    """Tokens of the longest context, of the model or of the rollout engine: a trainer's memory and
    time grow with those of a sequence, of which a small shard may have millions.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyGroup:
    """All sequences of one prompt in which one policy owns a token: first attempts and retries of
    all samples.
    """

    policy: str
    prompt: Prompt
    rows: tuple[BatchRow, ...]
    """In the order of their keys; advantages are still 0."""
    refused: tuple[LedgerEntry, ...]
    """Sequences that cannot be trained on, each with its reason: of failed episodes, with a reward
    or log-probability that is not finite, untrainable otherwise, or with a token or a length
    outside the policy's limits.
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


def route(
    shard: Shard, policies: Many[str], limits: Mapping[str, ModelLimits]
) -> dict[str, tuple[PolicyGroup, ...]]:
    """Return each policy's groups of the shard, in the shard's order.

    A group in which the policy owns no token is left out. Sequences are compared with the policy's
    `limits`.
    """
    region = shard.region if layout.NAME.fullmatch(shard.region) else ""
    return {
        policy: tuple(
            routed
            for index, group in enumerate(shard.groups)
            if (
                routed := route_group(
                    shard.order, index, group, policy, limits.get(policy, ModelLimits()), region
                )
            )
            is not None
        )
        for policy in policies
    }


def route_group(
    order: int,
    index: int,
    group: Group,
    policy: str,
    limits: ModelLimits,
    region: str = "",
) -> PolicyGroup | None:
    """Return the sequences of one group in which `policy` owns a token; None for none."""
    rows: list[BatchRow] = []
    refused: list[LedgerEntry] = []
    for number, episode in enumerate(group.episodes):
        for place, sequence in enumerate(episode.sequences):
            owned = owned_by(sequence, policy)
            if not owned.any():
                continue
            key = SequenceKey(order, index, number, place)
            reason = _refusal(episode, sequence, owned, limits)
            if reason:
                refused.append(LedgerEntry(key, "filtered", reason))
            else:
                rows.append(mask_to(sequence, owned, key, group.prompt.id, region))
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
    """Return [L], True on the tokens that `policy` sampled."""
    if policy not in sequence.policies:
        return np.zeros(sequence.tokens.shape, dtype=np.bool_)
    return np.asarray(sequence.owners == sequence.policies.index(policy))


def mask_to(
    sequence: Sequence, owned: NDArray[np.bool_], key: SequenceKey, prompt_id: str, region: str
) -> BatchRow:
    """Return the sequence as one policy trains on it; the tokens that others sampled are context.

    `owned` [L] is True on the policy's tokens. `min_version` is the oldest version over all of
    them, also over those that the workflow masked: they are context that an old version chose.
    """
    mask = sequence.loss_mask & owned
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
        min_version=int(sequence.versions[owned].min()),
        region=region,
    )


def _refusal(
    episode: Episode, sequence: Sequence, owned: NDArray[np.bool_], limits: ModelLimits
) -> str:
    """Return why the policy that owns the tokens `owned` [L] cannot train on the sequence; empty
    when it can.
    """
    if episode.error is not None:
        return FAILED_EPISODE
    mask = owned & sequence.loss_mask
    logprobs = sequence.logprobs[mask]
    if not math.isfinite(sequence.reward) or not np.isfinite(logprobs).all():
        return NOT_FINITE
    if limits.vocab_size is not None and sequence.tokens.max() >= limits.vocab_size:
        return OUTSIDE_VOCABULARY
    if limits.positions is not None and len(sequence.tokens) > limits.positions:
        return TOO_LONG
    is_greedy = logprobs.size and not sequence.temperature
    is_impossible = ((logprobs < LOGPROB_MIN) | (logprobs > LOGPROB_MAX)).any()
    return UNTRAINABLE if is_greedy or mask[0] or is_impossible else ""
