"""One episode with its tokens: text, owner, version, probability, mask and advantage of each.

The shard has all but the advantages, which are in the batches that trained on the sequence.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from storage.errors import UNREADABLE, NotFoundError
from storage.records.batches import Batch, SequenceKey
from storage.records.rollouts import NOT_SAMPLED, Episode, Sequence
from storage.records.types import Float32
from storage.run import batches
from storage.store.object_store import ObjectStore
from tasks.episodes.index import PlayedEpisode, PlayedSequence
from tasks.episodes.token_decoder import TokenDecoders

log = logging.getLogger(__name__)

BATCHES_KEPT = 16
TOKENS_MAX = 2**18
"""Tokens of one episode that are viewed; a small shard may have millions."""
SEQUENCE_TOKENS = 8
"""As many tokens, a sequence counts in addition to its own."""


@dataclass(frozen=True, slots=True)
class ViewedToken:
    """One token. Example: `ViewedToken("12", 40, "solver", 3, -0.5, True, 1.2)`."""

    text: str
    """Decoded alone; stored text, which may contain control characters."""
    token: int
    owner: str
    """The policy that sampled it; empty for prompt, tool and environment tokens."""
    version: int
    logprob: float
    is_in_loss: bool
    """Whether it may be trained on."""
    advantage: float | None
    """None where it was not trained on."""


@dataclass(frozen=True, kw_only=True)
class ViewedSequence:
    """One sequence with its tokens and its fate for each policy that sampled in it."""

    place: int
    name: str
    reward: float
    temperature: float
    finish_reason: str
    played: tuple[PlayedSequence, ...]
    num_tokens: int
    tokens: tuple[ViewedToken, ...]
    """The first ones, where the limit of the episode ends."""


class Advantages:
    """Advantages of trained sequences, from their batches. A few batches are kept, and all
    advantages of the order that is viewed: its sequences may be in any number of batches, in turn.
    """

    def __init__(self, run: ObjectStore) -> None:
        self._run = run
        self._batches: dict[tuple[str, int], dict[int, dict[SequenceKey, Float32]]] = {}
        """(policy, step) → order → sequence → advantages."""
        self._order = -1
        self._of_order: dict[tuple[str, int], dict[SequenceKey, Float32]] = {}

    def of(self, policy: str, step: int, key: SequenceKey) -> Float32 | None:
        """Return the advantages [L] of the sequence in a batch; None where that has none."""
        if key.order != self._order:
            self._order, self._of_order = key.order, {}
        place = policy, step
        if place not in self._of_order:
            self._of_order[place] = {
                each: advantages.copy()  # a view would keep those of the whole batch
                for each, advantages in self._batch(policy, step).get(key.order, {}).items()
            }
        return self._of_order[place].get(key)

    def _batch(self, policy: str, step: int) -> dict[int, dict[SequenceKey, Float32]]:
        place = policy, step
        if place not in self._batches:
            while len(self._batches) >= BATCHES_KEPT:
                del self._batches[next(iter(self._batches))]
            self._batches[place] = self._read(policy, step)
        return self._batches[place]

    def _read(self, policy: str, step: int) -> dict[int, dict[SequenceKey, Float32]]:
        try:
            batch: Batch = batches.read(self._run, policy, step)
        except (NotFoundError, *UNREADABLE) as error:
            log.warning("no advantages are shown of batch %d of %s: %s", step, policy, error)
            return {}
        by_order: dict[int, dict[SequenceKey, Float32]] = defaultdict(dict)
        for row in batch.rows:
            if not row.replay:
                by_order[row.key.order][row.key] = row.advantages
        return by_order


def view(
    episode: Episode,
    played: PlayedEpisode,
    decoders: TokenDecoders,
    advantages: Advantages,
    tokens_max: int = TOKENS_MAX,
) -> Iterator[ViewedSequence]:
    """Yield the sequences of an episode with their tokens, up to about `tokens_max`."""
    played_at: dict[int, list[PlayedSequence]] = defaultdict(list)
    for each in played.sequences:
        played_at[each.place].append(each)
    left = tokens_max
    for place, sequence in enumerate(episode.sequences):
        if left <= 0:
            return
        yield _sequence(
            SequenceKey(played.order, played.group, played.episode, place),
            sequence,
            tuple(played_at[place]),
            decoders,
            advantages,
            left,
        )
        left -= SEQUENCE_TOKENS + len(sequence.tokens)


def _sequence(
    key: SequenceKey,
    sequence: Sequence,
    played: tuple[PlayedSequence, ...],
    decoders: TokenDecoders,
    advantages: Advantages,
    tokens_max: int,
) -> ViewedSequence:
    values = np.full(len(sequence.tokens), np.nan, dtype=np.float32)
    for each in played:
        found = advantages.of(each.policy, each.fate.batch, key) if _is_trained(each) else None
        if found is not None and len(found) == len(values):
            own = sequence.loss_mask & (sequence.owners == sequence.policies.index(each.policy))
            values[own] = found[own]
    decode = decoders.of(played[0].policy if played else "").token
    tokens = zip(
        *(
            values_of[:tokens_max].tolist()
            for values_of in (
                sequence.tokens,
                sequence.owners,
                sequence.versions,
                sequence.logprobs,
                sequence.loss_mask,
                values,
            )
        ),
        strict=True,
    )
    return ViewedSequence(
        place=key.sequence,
        name=sequence.name,
        reward=sequence.reward,
        temperature=sequence.temperature,
        finish_reason=sequence.finish_reason,
        played=played,
        num_tokens=len(sequence.tokens),
        tokens=tuple(
            ViewedToken(
                decode(token),
                token,
                "" if owner == NOT_SAMPLED else sequence.policies[owner],
                version,
                logprob,
                mask,
                None if np.isnan(advantage) else advantage,
            )
            for token, owner, version, logprob, mask, advantage in tokens
        ),
    )


def _is_trained(played: PlayedSequence) -> bool:
    return played.fate.fate == "trained"
