"""A sample of a run's episodes for the report: spread over the run, of all outcomes.

Each token is decoded alone, so that a reader sees what the engine consumed and produced.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal

from storage.errors import UNREADABLE, NotFoundError
from storage.records.rollouts import NOT_SAMPLED, Episode, FailureKind, Sequence, Shard
from storage.run import shards
from storage.store.object_store import ObjectStore
from tasks.episodes.token_decoder import TokenDecoder
from tasks.monitoring.training_curves import sample

PHASES = ("early", "middle", "late")
EPISODES_PER_PHASE = 12
ORDERS_PER_PHASE = 4
TOKENS_PER_SEQUENCE_MAX = 600
"""Tokens shown of one sequence; the middle of a longer one is left out."""
TOKENS_MAX = 16_000
"""Tokens shown of all episodes together; the page then is smaller than two megabytes."""
SHARD_TOKENS_MAX = 2**18
"""Tokens of one shard that are decoded before episodes are chosen; a small shard may have millions.
"""
LEFT_OUT = " … "

Outcome = Literal["right", "wrong", "mended", "spoiled", "failed"]


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one owner and version."""

    policy: str
    """The policy that sampled them; empty for prompt, tool and environment tokens."""
    version: int
    tokens: tuple[tuple[str, float], ...]
    """(text, log-probability) of each."""


@dataclass(frozen=True, kw_only=True)
class TurnText:
    """One sequence as text."""

    name: str
    policies: tuple[str, ...]
    """The policies that sampled its tokens, in the order of their first tokens."""
    reward: float
    finish_reason: str
    num_tokens: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class EpisodeSample:
    phase: str
    outcome: Outcome
    """Of the final answer; `mended`: the first attempt was wrong, `spoiled`: it was right."""
    order: int
    place: str
    """`order 7 · prompt 2 · sample 5`."""
    worker: str
    prompt_id: str
    question: str
    answer: str
    reward: float
    metrics: Mapping[str, float]
    error: str | None
    failure_kind: FailureKind | None
    seconds: float
    versions: Mapping[str, tuple[int, int]]
    """policy → oldest and newest version that sampled a token."""
    turns: tuple[TurnText, ...]


def sample_episodes(run: ObjectStore, orders: Many[int], policy: str) -> list[EpisodeSample]:
    """Sample up to `EPISODES_PER_PHASE` episodes of each third of the run.

    Args:
        orders: orders with a shard, ascending.
        policy: its tokenizer decodes the tokens.
    """
    decoder = TokenDecoder(run, policy)
    samples: list[EpisodeSample] = []
    for phase, numbers in _phases(orders):
        candidates: list[EpisodeSample] = []
        for number in numbers:
            try:
                candidates += _of_shard(shards.read(run, number), phase, decoder)
            except (NotFoundError, *UNREADABLE):
                continue
        samples += _varied(candidates, EPISODES_PER_PHASE)
    return list(_bounded(samples))


def answering_policy(samples: Iterable[EpisodeSample]) -> str:
    """Return the policy that sampled the first answer in most of the episodes; empty for none."""
    first = Counter(sample.turns[0].policies[0] for sample in samples if _is_answered(sample))
    return first.most_common(1)[0][0] if first else ""


def _is_answered(sample: EpisodeSample) -> bool:
    return bool(sample.turns and sample.turns[0].policies)


def _phases(orders: Many[int]) -> Iterator[tuple[str, list[int]]]:
    """Phase and a few order numbers of each third of the orders."""
    for index, phase in enumerate(PHASES):
        part = orders[len(orders) * index // 3 : len(orders) * (index + 1) // 3]
        yield phase, [part[place] for place in sample(len(part), ORDERS_PER_PHASE)]


def _of_shard(shard: Shard, phase: str, decoder: TokenDecoder) -> Iterator[EpisodeSample]:
    """The first episode of each outcome, of every group, up to SHARD_TOKENS_MAX."""
    num_tokens = 0
    for index, group in enumerate(shard.groups):
        outcomes: set[Outcome] = set()
        for number, episode in enumerate(group.episodes):
            outcome = _outcome(episode)
            if outcome in outcomes:
                continue
            outcomes.add(outcome)
            turns = tuple(_turns(episode, decoder))
            yield EpisodeSample(
                phase=phase,
                outcome=outcome,
                order=shard.order,
                place=f"order {shard.order} · prompt {index} · sample {number}",
                worker=shard.worker,
                prompt_id=group.prompt.id,
                question=str(group.prompt.fields.get("question", "")),
                answer=str(group.prompt.fields.get("answer", "")),
                reward=episode.reward,
                metrics=dict(episode.metrics),
                error=episode.error,
                failure_kind=episode.failure_kind,
                seconds=episode.seconds,
                versions=_versions(episode),
                turns=turns,
            )
            num_tokens += sum(_num_shown(turn.num_tokens) for turn in turns)
            if num_tokens > SHARD_TOKENS_MAX:
                return


def _outcome(episode: Episode) -> Outcome:
    if episode.error is not None:
        return "failed"
    final = episode.metrics.get("final", episode.reward) > 0.5
    first = episode.metrics.get("first_attempt", float(final)) > 0.5
    if final:
        return "right" if first else "mended"
    return "spoiled" if first else "wrong"


def _versions(episode: Episode) -> dict[str, tuple[int, int]]:
    ranges: dict[str, tuple[int, int]] = {}
    for sequence in episode.sequences:
        for policy, is_own in sequence.sampled_by():
            versions = sequence.versions[is_own]
            first, last = int(versions.min()), int(versions.max())
            low, high = ranges.get(policy, (first, last))
            ranges[policy] = (min(low, first), max(high, last))
    return ranges


def _turns(episode: Episode, decoder: TokenDecoder) -> Iterator[TurnText]:
    """The first sequences of the episode, with about TOKENS_MAX tokens together."""
    num_tokens = 0
    for sequence in episode.sequences:
        yield _turn(sequence, decoder)
        num_tokens += 1 + _num_shown(len(sequence.tokens))
        if num_tokens > TOKENS_MAX:
            return


def _num_shown(num_tokens: int) -> int:
    return min(num_tokens, TOKENS_PER_SEQUENCE_MAX)


def _turn(sequence: Sequence, decoder: TokenDecoder) -> TurnText:
    pieces = tuple(_pieces(sequence, decoder))
    return TurnText(
        name=sequence.name,
        policies=tuple(dict.fromkeys(piece.policy for piece in pieces if piece.policy)),
        reward=sequence.reward,
        finish_reason=sequence.finish_reason,
        num_tokens=len(sequence.tokens),
        pieces=pieces,
    )


def _pieces(sequence: Sequence, decoder: TokenDecoder) -> Iterator[Piece]:
    """Runs of tokens with the same owner and version; the middle of a long sequence left out."""
    length = len(sequence.tokens)
    head = tail = length
    if length > TOKENS_PER_SEQUENCE_MAX:
        head, tail = TOKENS_PER_SEQUENCE_MAX // 2, length - TOKENS_PER_SEQUENCE_MAX // 2
    places = [*range(head), *range(tail, length)]
    start = 0
    for index in range(1, len(places) + 1):
        before = places[index - 1]
        here = places[index] if index < len(places) else -1
        if here != before + 1 or _owner_and_version(sequence, here) != _owner_and_version(
            sequence, before
        ):
            owner, version = _owner_and_version(sequence, before)
            policy = "" if owner == NOT_SAMPLED else sequence.policies[owner]
            tokens = [
                (decoder.token(int(sequence.tokens[at])), float(sequence.logprobs[at]))
                for at in places[start:index]
            ]
            if 0 <= before + 1 < here:
                tokens.append((LEFT_OUT, 0.0))
            yield Piece(policy, version, tuple(tokens))
            start = index


def _owner_and_version(sequence: Sequence, place: int) -> tuple[int, int]:
    return int(sequence.owners[place]), int(sequence.versions[place])


def _varied(samples: list[EpisodeSample], count: int) -> list[EpisodeSample]:
    """At most `count` episodes, of each outcome in turn, sorted by order."""
    by_outcome: dict[str, list[EpisodeSample]] = {}
    for episode in samples:
        by_outcome.setdefault(episode.outcome, []).append(episode)
    chosen: list[EpisodeSample] = []
    while len(chosen) < count and any(by_outcome.values()):
        chosen += [episodes.pop(0) for episodes in by_outcome.values() if episodes]
    return sorted(chosen[:count], key=lambda episode: episode.order)


def _bounded(samples: list[EpisodeSample]) -> Iterator[EpisodeSample]:
    """Evenly spread episodes with at most about TOKENS_MAX tokens together."""
    num_tokens = sum(_num_shown(turn.num_tokens) for episode in samples for turn in episode.turns)
    share = min(1.0, TOKENS_MAX / max(num_tokens, 1))
    indices = (
        sample(len(samples), max(1, int(len(samples) * share)))
        if share < 1.0 and len(samples) > 1
        else range(len(samples))
    )
    return (samples[index] for index in indices)
