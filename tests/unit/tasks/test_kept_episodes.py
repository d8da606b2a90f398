"""Which episodes an evaluation keeps, and what happens to those of an interrupted one."""

import random
from collections.abc import Sequence

import pytest

from storage.errors import ConfigError
from storage.records.rollouts import Group
from storage.run import evaluation_samples
from storage.store.object_store import ObjectStore
from tasks import kept_episodes
from tasks.kept_episodes import keep, selected
from tests.support.runs import builders

VERSIONS = {"solver": 0}


def groups(number: int, tokens: int = 5) -> list[Group]:
    """Groups of one episode with one sequence of `tokens` tokens."""
    answer = (40,) * (tokens - 2)
    episode = builders.episode(builders.sequence((11, 12), answer))
    return [builders.group(episode, prompt_id=f"test/{index}") for index in range(number)]


def ids(kept: Sequence[Group]) -> list[str]:
    return [group.prompt.id for group in kept]


def test_the_same_problems_are_kept_in_whatever_order_they_were_played() -> None:
    played = groups(50)
    shuffled = played.copy()
    random.Random(7).shuffle(shuffled)
    kept = ids(selected(played, 8))
    assert len(kept) == 8
    assert kept == sorted(kept, key=lambda each: int(each.split("/")[1]))  # as they were played
    assert set(ids(selected(shuffled, 8))) == set(kept)
    assert kept != ids(played[:8])


def test_a_larger_number_keeps_the_problems_of_a_smaller_one() -> None:
    played = groups(50)
    assert set(ids(selected(played, 8))) < set(ids(selected(played, 9)))
    assert ids(selected(played, 50)) == ids(selected(played, 200)) == ids(played)
    assert selected(played, 0) == ()


def test_the_kept_problems_are_those_with_the_lowest_digests() -> None:
    """With another choice, evaluations of this and of an earlier release would not compare."""
    assert ids(selected(groups(50), 3)) == ["test/17", "test/38", "test/40"]


@pytest.mark.parametrize(("limit", "number"), [(15, 3), (14, 2), (4, 0)])
def test_episodes_beyond_the_tokens_of_a_sample_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int, number: int
) -> None:
    monkeypatch.setattr(kept_episodes, "TOKENS_MAX", limit)
    assert ids(selected(groups(50), 3)) == ids(selected(groups(50), number))
    assert ("of 3 episodes of the evaluation are kept" in caplog.text) is (number < 3)


def test_the_episodes_of_an_interrupted_evaluation_are_kept(memory_store: ObjectStore) -> None:
    assert keep(memory_store, VERSIONS, groups(4), 3) == 3
    first = memory_store.get("eval_samples/solver-00000000.arrow")
    assert keep(memory_store, VERSIONS, groups(4, tokens=9), 2) == 3
    assert memory_store.get("eval_samples/solver-00000000.arrow") == first


def test_damaged_episodes_of_an_earlier_try_are_logged_and_stop_nothing(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    memory_store.put("eval_samples/solver-00000000.arrow", b"torn")
    assert keep(memory_store, VERSIONS, groups(4), 2) == 2
    assert "the episodes of an earlier try are damaged: eval_samples/solver-0" in caplog.text


def test_no_object_is_written_for_no_episodes(memory_store: ObjectStore) -> None:
    assert keep(memory_store, VERSIONS, groups(4), 0) == 0
    assert keep(memory_store, VERSIONS, [], 3) == 0
    assert memory_store.list() == []


def test_episodes_that_cannot_be_stored_are_logged_and_stop_nothing(
    memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise ConfigError("the disk is full")

    monkeypatch.setattr(evaluation_samples, "create", refuse)
    assert keep(memory_store, VERSIONS, groups(4), 3) == 0
    assert "no episode of the evaluation is kept: the disk is full" in caplog.text
