"""What is shown of an episode with more tokens than a person reads."""

from dataclasses import replace
from pathlib import Path

import pytest

from deployments.cli.output.episode_tables import FATES_SHOWN, fates_words
from storage.records.batches import Batch, SequenceKey
from storage.run import batches, shards
from storage.store.object_store import ObjectStore
from tasks.episodes import token_view
from tasks.episodes.index import EpisodeIndex
from tasks.episodes.prompt_plays import ANSWER_TOKENS, prompt_plays
from tasks.episodes.selection import Selection
from tasks.episodes.token_decoder import TokenDecoders
from tasks.episodes.token_view import SEQUENCE_TOKENS, Advantages, view
from tasks.reports import episodes_page
from tests.support.runs import builders
from tests.support.runs.small_run import SmallRun


def run_with(name: str, *lengths: int) -> SmallRun:
    """A run with one episode, of sequences with so many sampled tokens."""
    small_run = SmallRun(name)
    play = builders.episode(*(builders.sequence(answer=[40] * length) for length in lengths))
    shards.create(small_run.run, builders.shard(builders.group(play)))
    return small_run


def test_of_an_episode_of_very_many_tokens_the_first_are_viewed() -> None:
    run = run_with("view-many", 90, 200, 50).run
    indexed = EpisodeIndex(run).shard(0)
    episode, played = indexed.shard.groups[0].episodes[0], indexed.episodes[0]
    lengths = [len(sequence.tokens) for sequence in episode.sequences]
    left = 150 - lengths[0] - SEQUENCE_TOKENS
    turns = [*view(episode, played, TokenDecoders(run), Advantages(run), 150)]
    assert [(len(turn.tokens), turn.num_tokens) for turn in turns] == [
        (lengths[0], lengths[0]),
        (left, lengths[1]),
    ]
    whole = [*view(episode, played, TokenDecoders(run), Advantages(run))]
    assert [len(turn.tokens) for turn in whole] == lengths


def test_each_batch_is_read_once_for_the_sequences_of_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_run = run_with("view-turns", 3, 3, 3, 3)
    keys = [SequenceKey(0, 0, 0, sequence) for sequence in range(4)]
    for step in (1, 2):
        rows = [builders.row(key, advantage=step) for key in keys[step - 1 :: 2]]
        batches.create(small_run.run, builders.batch(*rows, step=step))
    read: list[int] = []
    read_batch = batches.read

    def counted(run: ObjectStore, policy: str, step: int) -> Batch:
        read.append(step)
        return read_batch(run, policy, step)

    monkeypatch.setattr(batches, "read", counted)
    monkeypatch.setattr(token_view, "BATCHES_KEPT", 1)
    advantages = Advantages(small_run.run)
    shown = [advantages.of("solver", 1 + key.sequence % 2, key) for key in keys]
    assert [float(each[-1]) for each in shown if each is not None] == [1.0, 2.0, 1.0, 2.0]
    assert read == [1, 2]


def test_the_rows_of_a_batch_are_not_compared_with_each_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    class CountedKey(SequenceKey):
        @property
        def order(self) -> int:  # type: ignore[override]  # counts how often it is read
            nonlocal looks
            looks += 1
            return self[0]

    orders = range(50)
    rows = [
        builders.row(CountedKey(order, 0, sample, 0), advantage=order)
        for sample in range(10)
        for order in orders
    ]
    small_run = SmallRun("view-orders")
    # A batch that is read from the store would have plain keys.
    monkeypatch.setattr(batches, "read", lambda *place: builders.batch(*rows))
    advantages = Advantages(small_run.run)
    shown = [advantages.of("solver", 1, SequenceKey(order, 0, 9, 0)) for order in orders]
    assert [float(each[-1]) for each in shown if each is not None] == [*orders]
    assert looks == len(rows)


def test_of_a_very_long_answer_the_end_is_decoded() -> None:
    run = run_with("answer-long", 1000).run
    (play,) = prompt_plays(EpisodeIndex(run).shards(), Selection(), TokenDecoders(run))
    assert play.answers[0] == "⟨40⟩" * ANSWER_TOKENS


def test_different_fates_of_one_episode_are_named_up_to_a_limit() -> None:
    run = run_with("fates-many", 3, 3).run
    first, second = EpisodeIndex(run).shard(0).episodes[0].sequences
    many = [replace(first, max_version=number) for number in range(10, 10 + FATES_SHOWN + 2)]
    words = fates_words([first, second, *many])
    assert words.startswith("solver v0 waiting: not_ingested (×2); solver v0–10 waiting")
    assert words.endswith("; and 3 more")


def test_the_page_names_the_order_with_an_episode_of_very_many_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_run = run_with("page-episode", 200, 200)
    monkeypatch.setattr(episodes_page, "TOKENS_MAX", 100)
    episodes_page.write_page(small_run.run, "r", Selection(), tmp_path / "page")
    assert (tmp_path / "page/data/shard-0.js").read_text().count('"place"') == 1
    assert "tokens of order 0, and the first 100 of an episode" in caplog.text


def test_the_page_names_the_tokens_that_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small_run = run_with("page-many", 200, 200)
    monkeypatch.setattr(episodes_page, "SHARD_TOKENS_MAX", 100)
    episodes_page.write_page(small_run.run, "r", Selection(), tmp_path / "page")
    shown = (tmp_path / "page/data/shard-0.js").read_text()
    assert shown.count('"place"') == 1
    assert "the page has the first 100 tokens of order 0" in caplog.text
    length = len(shards.read(small_run.run, 0).groups[0].episodes[0].sequences[0].tokens)
    assert f",[{length - 100}]]" in shown
