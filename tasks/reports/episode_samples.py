"""A few episodes of a run, spread over its time, right and wrong, with every token as text: what
the report lets one browse.

Text comes from the tokens, one by one, so that a reader sees what the engine really consumed and
produced.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from storage.errors import UNREADABLE, NotFoundError
from storage.records.rollouts import NOT_SAMPLED, Episode, FailureKind, Sequence, Shard
from storage.run import shards
from storage.store.object_store import ObjectStore
from storage.weights import reader
from tasks.monitoring.training_curves import sample

log = logging.getLogger(__name__)

PHASES = ("early", "middle", "late")
EPISODES_PER_PHASE = 12
ORDERS_PER_PHASE = 4
TOKENS_PER_SEQUENCE_MAX = 600
"""Of a longer sequence the middle is left out."""
TOKENS_MAX = 16_000
"""Of all episodes together; with that the page stays below two megabytes."""
LEFT_OUT = " … "

Decode = Callable[[int], str]
Outcome = Literal["right", "wrong", "mended", "spoiled", "failed"]


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one owner and version."""

    policy: str
    """Who sampled them; empty for prompt, tool and environment tokens."""
    version: int
    tokens: tuple[tuple[str, float], ...]
    """(text, log-probability) of each."""


@dataclass(frozen=True, kw_only=True)
class TurnText:
    """One sequence."""

    name: str
    policies: tuple[str, ...]
    """Who sampled its tokens, in the order of their first one."""
    reward: float
    finish_reason: str
    num_tokens: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class EpisodeSample:
    phase: str
    outcome: Outcome
    """Of the final answer; `mended`: wrong at first, `spoiled`: right at first."""
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


def sample_episodes(run: ObjectStore, num_orders: int, policy: str) -> list[EpisodeSample]:
    """Up to `EPISODES_PER_PHASE` episodes of each third of the run. `policy` names whose tokenizer
    turns tokens to text.
    """
    decode = decoder(run, policy)
    found: list[EpisodeSample] = []
    for phase, numbers in _phases(num_orders):
        picked: list[EpisodeSample] = []
        for number in numbers:
            try:
                picked += _of_shard(shards.read(run, number), phase, decode)
            except (NotFoundError, *UNREADABLE):
                continue
        found += _varied(picked, EPISODES_PER_PHASE)
    return list(_bounded(found))


def decoder(run: ObjectStore, policy: str) -> Decode:
    """One token as text, by the `tokenizer.json` of version 0; token numbers where there is none
    that can be read.
    """
    try:
        files = reader.fetch_files(run, policy, 0)
    except (NotFoundError, *UNREADABLE):
        files = {}
    if "tokenizer.json" in files:
        from tokenizers import Tokenizer

        try:
            light = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # tokenizers has no error of its own: it raises this very class
            log.warning(
                "tokens are shown as numbers: the tokenizer.json of %s cannot be read: %s",
                policy,
                error,
            )
        else:
            return cache(lambda token: str(light.decode([token], skip_special_tokens=False)))
    return lambda token: f"⟨{token}⟩"


def _phases(num_orders: int) -> Iterator[tuple[str, list[int]]]:
    """The first, middle and last third of the orders, a few of each."""
    for index, phase in enumerate(PHASES):
        low, high = num_orders * index // 3, num_orders * (index + 1) // 3
        yield phase, [low + offset for offset in sample(high - low, ORDERS_PER_PHASE)]


def _of_shard(shard: Shard, phase: str, decode: Decode) -> Iterator[EpisodeSample]:
    """Of every group the first episode of each outcome."""
    for index, group in enumerate(shard.groups):
        seen: set[Outcome] = set()
        for number, episode in enumerate(group.episodes):
            outcome = _outcome(episode)
            if outcome in seen:
                continue
            seen.add(outcome)
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
                turns=tuple(_turn(sequence, decode) for sequence in episode.sequences),
            )


def _outcome(episode: Episode) -> Outcome:
    if episode.error is not None:
        return "failed"
    final = episode.metrics.get("final", episode.reward) > 0.5
    first = episode.metrics.get("first_attempt", float(final)) > 0.5
    if final:
        return "right" if first else "mended"
    return "spoiled" if first else "wrong"


def _versions(episode: Episode) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for sequence in episode.sequences:
        for index, policy in enumerate(sequence.policies):
            own = sequence.versions[sequence.owners == index]
            if own.size:
                low, high = found.get(policy, (int(own.min()), int(own.max())))
                found[policy] = (min(low, int(own.min())), max(high, int(own.max())))
    return found


def _turn(sequence: Sequence, decode: Decode) -> TurnText:
    pieces = tuple(_pieces(sequence, decode))
    return TurnText(
        name=sequence.name,
        policies=tuple(dict.fromkeys(piece.policy for piece in pieces if piece.policy)),
        reward=sequence.reward,
        finish_reason=sequence.finish_reason,
        num_tokens=len(sequence.tokens),
        pieces=pieces,
    )


def _pieces(sequence: Sequence, decode: Decode) -> Iterator[Piece]:
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
        if here != before + 1 or _who(sequence, here) != _who(sequence, before):
            owner, version = _who(sequence, before)
            policy = "" if owner == NOT_SAMPLED else sequence.policies[owner]
            tokens = [
                (decode(int(sequence.tokens[at])), float(sequence.logprobs[at]))
                for at in places[start:index]
            ]
            if 0 <= before + 1 < here:
                tokens.append((LEFT_OUT, 0.0))
            yield Piece(policy, version, tuple(tokens))
            start = index


def _who(sequence: Sequence, place: int) -> tuple[int, int]:
    return int(sequence.owners[place]), int(sequence.versions[place])


def _varied(found: list[EpisodeSample], count: int) -> list[EpisodeSample]:
    """At most `count`, the rarer outcomes first in turn, in the order of their orders."""
    kinds: dict[str, list[EpisodeSample]] = {}
    for episode in found:
        kinds.setdefault(episode.outcome, []).append(episode)
    picked: list[EpisodeSample] = []
    while len(picked) < count and any(kinds.values()):
        picked += [waiting.pop(0) for waiting in kinds.values() if waiting]
    return sorted(picked[:count], key=lambda episode: episode.order)


def _bounded(found: list[EpisodeSample]) -> Iterator[EpisodeSample]:
    """As many episodes, from all phases, as fit into TOKENS_MAX."""
    sizes = [
        sum(min(turn.num_tokens, TOKENS_PER_SEQUENCE_MAX) for turn in episode.turns)
        for episode in found
    ]
    share = min(1.0, TOKENS_MAX / max(sum(sizes), 1))
    kept = (
        sample(len(found), max(1, int(len(found) * share)))
        if share < 1.0 and len(found) > 1
        else range(len(found))
    )
    return (found[index] for index in kept)
