from dataclasses import replace

import numpy as np

from storage.records.rollouts import FailureKind
from storage.run import shards
from tasks.episodes.token_decoder import TokenDecoder
from tasks.reports.episode_samples import (
    LEFT_OUT,
    SHARD_TOKENS_MAX,
    TOKENS_MAX,
    TOKENS_PER_SEQUENCE_MAX,
    Piece,
    _of_shard,
    sample_episodes,
)
from tests.support.runs import builders
from tests.support.runs.small_run import SmallRun


def test_tokens_are_grouped_by_policy_and_version() -> None:
    small_run = SmallRun("episodes-pieces")
    attempt = builders.sequence(prompt=(11, 12), answer=(40, 41, 2), version=3)
    attempt = replace(attempt, versions=np.array([-1, -1, 3, 3, 4], dtype=np.int32))
    verdict = builders.sequence(
        prompt=(11,), answer=(50,), policy="verifier", version=2, name="verdict", reward=0.0
    )
    play = builders.episode(attempt, verdict, reward=0.0, first_attempt=0.0, final=0.0)
    shards.create(small_run.run, builders.shard(builders.group(play)))
    (result,) = sample_episodes(small_run.run, [0], "solver")
    assert (result.outcome, result.question, result.answer, result.place) == (
        "wrong",
        "7+8-3=?",
        "12",
        "order 0 · prompt 0 · sample 0",
    )
    assert result.versions == {"solver": (3, 4), "verifier": (2, 2)}
    first, second = result.turns
    assert (first.name, first.policies, first.reward) == ("attempt", ("solver",), 1.0)
    assert first.pieces == (
        Piece("", -1, (("⟨11⟩", 0.0), ("⟨12⟩", 0.0))),
        Piece("solver", 3, (("⟨40⟩", -0.5), ("⟨41⟩", -0.5))),
        Piece("solver", 4, (("⟨2⟩", -0.5),)),
    )
    assert (second.name, second.policies, second.reward) == ("verdict", ("verifier",), 0.0)


def test_tokens_are_decoded_by_the_tokenizer_of_their_policy() -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"7": 11, "+": 12, "=": 40, "1": 41, "5": 2}, unk_token="="))
    small_run = SmallRun("episodes-text")
    small_run.version("solver", 0, {"tokenizer.json": words.to_str().encode()})
    shards.create(small_run.run, builders.shard(builders.group(builders.episode())))
    (result,) = sample_episodes(small_run.run, [0], "solver")
    assert "".join(text for piece in result.turns[0].pieces for text, _ in piece.tokens) == "7+=15"


def test_each_outcome_of_a_group_is_shown_once() -> None:
    plays = [
        builders.episode(first_attempt=first, final=final, reward=final)
        for first, final in [(1.0, 1.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)]
    ]
    plays.append(builders.episode(error="timeout after 60 s", failure_kind=FailureKind.TIMEOUT))
    small_run = SmallRun("episodes-outcomes")
    shards.create(small_run.run, builders.shard(builders.group(*plays)))
    result = sample_episodes(small_run.run, [0], "solver")
    assert sorted(item.outcome for item in result) == [
        "failed",
        "mended",
        "right",
        "spoiled",
        "wrong",
    ]
    failed = next(item for item in result if item.outcome == "failed")
    assert (failed.error, failed.failure_kind) == ("timeout after 60 s", FailureKind.TIMEOUT)


def test_episodes_come_from_the_whole_run() -> None:
    small_run = SmallRun("episodes-phases")
    for number in range(9):
        small_run.shard(number)
    phases = {item.order: item.phase for item in sample_episodes(small_run.run, range(9), "solver")}
    assert phases[0] == "early"
    assert phases[4] == "middle"
    assert phases[8] == "late"


def test_the_middle_of_a_long_sequence_is_omitted() -> None:
    small_run = SmallRun("episodes-long")
    long = builders.sequence(answer=(7,) * 5000)
    shards.create(small_run.run, builders.shard(builders.group(builders.episode(long))))
    (result,) = sample_episodes(small_run.run, [0], "solver")
    texts = [text for piece in result.turns[0].pieces for text, _ in piece.tokens]
    assert len(texts) == TOKENS_PER_SEQUENCE_MAX + 1
    assert texts.count(LEFT_OUT) == 1
    assert result.turns[0].num_tokens == 5002


def test_a_run_without_orders_has_no_episodes() -> None:
    assert sample_episodes(SmallRun("episodes-none").run, [], "solver") == []


def test_of_an_episode_of_very_many_tokens_the_first_sequences_are_shown() -> None:
    small_run = SmallRun("episodes-large")
    play = builders.episode(*[builders.sequence(answer=[40] * 5_000)] * 100)
    shards.create(small_run.run, builders.shard(builders.group(play)))
    (result,) = sample_episodes(small_run.run, [0], "solver")
    assert len(result.turns) == 1 + TOKENS_MAX // (1 + TOKENS_PER_SEQUENCE_MAX)


def test_of_a_shard_of_very_many_tokens_the_first_episodes_are_decoded() -> None:
    small_run = SmallRun("episodes-many")
    play = builders.episode(*[builders.sequence(answer=[40] * 600)] * 20)
    shards.create(small_run.run, builders.shard(*[builders.group(play)] * 40))
    decoded = [*_of_shard(shards.read(small_run.run, 0), "early", TokenDecoder(small_run.run, ""))]
    shown = len(decoded) * 20 * TOKENS_PER_SEQUENCE_MAX
    assert 0 <= shown - SHARD_TOKENS_MAX < 20 * TOKENS_PER_SEQUENCE_MAX
