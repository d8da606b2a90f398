import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from storage.errors import CorruptError
from storage.records.rollouts import Episode, FailureKind
from storage.run import shards
from storage.run.shard_checks import storable_episode
from tests.support.runs import builders


def array(values: list[float], kind: type) -> NDArray[Any]:
    return np.array(values, dtype=kind)


def with_sequence(**changes: object) -> Episode:
    """An episode whose row 1 (the second sequence) is a default one with `changes`."""
    good = builders.sequence()
    return builders.episode(good, replace(good, **changes))  # type: ignore[arg-type]  # the tests choose the fields


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tokens": array([1] * 4, np.int32)}, "row 1: loss_mask and tokens differ in length"),
        ({"versions": array([-1] * 6, np.int32)}, "row 1: versions and tokens differ in length"),
        (
            {"owners": array([-1, -1, 0, 0, 2], np.int8)},
            "row 1, token 4: owners name a policy that does not exist",
        ),
        (
            {"loss_mask": array([0, 1, 1, 1, 1], np.bool_)},
            "row 1, token 1: loss_mask is True on a token that was not sampled",
        ),
        (
            {"versions": array([-1, -1, 0, -1, 0], np.int32)},
            "row 1, token 3: versions are negative on a sampled token",
        ),
        (
            {"versions": array([0, -1, 0, 0, 0], np.int32)},
            "row 1, token 0: versions name one on a token that was not sampled",
        ),
        (
            {"logprobs": array([0, -1, -1, -1, -1], np.float32)},
            "row 1, token 1: logprobs are not 0 on a token that was not sampled",
        ),
        ({"tokens": array([11, 12, 40, -1, 2], np.int32)}, "row 1, token 3: tokens are negative"),
        (
            {"policies": ("solver", "solver")},
            "a shard's policy set ['solver', 'solver'] names a policy twice",
        ),
        (
            {"policies": ("solver", "a b")},
            "a shard has the policy 'a b', which is not a valid name",
        ),
        (
            {"policies": tuple(f"p{index}" for index in range(129))},
            "a shard's policy set has 129 policies; it has at most 128",
        ),
        ({"finish_reason": "bored"}, "a shard has the unknown finish reason 'bored'"),
        (
            {"temperature": -1.0},
            "row 1: the temperature is -1; it is 0, or from 1e-12 to 1e+12",
        ),
    ],
)
def test_an_episode_is_refused_before_it_is_stored_as_its_shard_is_when_read(
    changes: dict[str, object], fault: str
) -> None:
    episode = with_sequence(**changes)
    with pytest.raises(CorruptError, match=f"^{re.escape(fault)}$"):
        storable_episode(episode)
    with pytest.raises(CorruptError, match=f"^{re.escape(fault)}$"):
        shards.decode(shards.encode(builders.shard(builders.group(episode))))


@pytest.mark.parametrize(
    ("episode", "fault"),
    [
        (with_sequence(name=3), "row 1: name is of the type int; it must be text"),
        (
            with_sequence(policies=("solver", None)),
            "row 1: a policy is of the type NoneType; it must be text",
        ),
        (
            with_sequence(tokens=array([[1]], np.int32)),
            "row 1: tokens is int32 of the shape (1, 1); it must be int32 [L]",
        ),
        (
            with_sequence(tokens=array([1.5] * 5, np.float64)),
            "row 1: tokens is float64 of the shape (5,); it must be int32 [L]",
        ),
        (
            with_sequence(tokens=array([2**31] * 5, np.int64)),
            "row 1: tokens has a number that is no int32",
        ),
        (
            replace(builders.episode(), failure_kind=FailureKind.TOOL),
            "an episode of a shard has the failure kind tool and no error",
        ),
    ],
)
def test_a_value_that_a_shard_cannot_hold_is_refused(episode: Episode, fault: str) -> None:
    with pytest.raises(CorruptError, match=f"^{re.escape(fault)}$"):
        storable_episode(episode)


def test_an_episode_with_too_many_metrics_is_refused() -> None:
    episode = builders.episode(**{f"turn {turn}": 1.0 for turn in range(1_000)})
    assert storable_episode(episode).metrics == episode.metrics
    metrics = {**episode.metrics, "one too many": 1.0}
    fault = "^1,001 metrics are more than the limit of 1,000; sum up those of turns or tokens$"
    with pytest.raises(CorruptError, match=fault):
        storable_episode(replace(episode, metrics=metrics))


def test_an_episode_that_is_storable_keeps_its_values() -> None:
    lowest = replace(
        builders.sequence(),
        tokens=array([0] * 5, np.int32),
        versions=array([-1, -1, 0, 0, 0], np.int32),
        temperature=0.0,
    )
    episode = storable_episode(builders.episode(builders.sequence(), lowest, final=1.0))
    assert episode.metrics == {"final": 1.0}
    assert [row.tokens.tolist() for row in episode.sequences] == [[11, 12, 40, 41, 2], [0] * 5]
    assert [row.owners.tolist() for row in episode.sequences] == [[-1, -1, 0, 0, 0]] * 2


def test_an_episode_without_sequences_is_storable() -> None:
    failed = builders.episode(error="no shell", failure_kind=FailureKind.TOOL)
    assert storable_episode(failed) == failed
