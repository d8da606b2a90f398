import math
import re
from dataclasses import replace
from itertools import product

import pytest

from storage.errors import ConfigError
from tasks.episodes.index import PlayedEpisode, PlayedSequence
from tasks.episodes.selection import Interval, Selection
from tasks.episodes.sequence_fates import SequenceFate

SOLVER = PlayedSequence(
    place=0,
    name="attempt",
    policy="solver",
    tokens=3,
    min_version=3,
    max_version=5,
    reward=1.0,
    fate=SequenceFate("trained", "", 7, ()),
)
VERIFIER = replace(
    SOLVER,
    policy="verifier",
    min_version=9,
    max_version=9,
    fate=SequenceFate("filtered", "zero_advantage", 4, (6,)),
)
EPISODE = PlayedEpisode(
    order=7,
    group=2,
    episode=5,
    prompt_id="math/train/17[a]",
    region="us-east",
    worker="w",
    reward=0.5,
    failure="",
    seconds=1.0,
    sequences=(SOLVER, VERIFIER),
)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("<0.5", [-1, 0.49], [0.5, 1]),
        ("<=0.5", [0.5], [0.51]),
        (">3", [4, 3.001], [3, 2]),
        (">= 3", [3], [2.9]),
        ("=1", [1], [0, 2]),
        ("0", [0], [-1e-9, 1]),
        ("3-7", [3, 5, 7], [2, 8]),
        ("-1..-0.5", [-1, -0.5], [0, -2]),
        ("1e-3", [0.001], [0.002]),
    ],
)
def test_conditions_on_a_number(text: str, inside: list[float], outside: list[float]) -> None:
    interval = Interval.parse(text, "--reward")
    assert all(interval.overlaps(value, value) for value in inside)
    assert not any(interval.overlaps(value, value) for value in [*outside, math.nan])


@pytest.mark.parametrize("text", ["", "x", "<", "1,5", "7-3", "<1 2", "nan", "<inf", "0x1"])
def test_what_is_no_condition_is_refused_by_the_name_of_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--version .* is no condition on a number"):
        Interval.parse(text, "--version")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "solver"},
        {"version": "4"},
        {"version": "<4"},
        {"version": ">8"},
        {"policy": "solver", "version": "5-6"},
        {"reward": "0.5"},
        {"failure": "none"},
        {"region": "us-east"},
        {"prompt": "math/train/17[a]"},
        {"prompt": "math/*[a]"},
        {"fate": "trained"},
        {"fate": "trained:7"},
        {"fate": "filtered:zero_advantage"},
        {"fate": "filtered:4"},
        {"fate": "replayed"},
        {"fate": "replayed:6"},
        {"policy": "verifier", "fate": "filtered"},
    ],
    ids=str,
)
def test_an_episode_that_meets_the_conditions_is_selected(options: dict[str, str]) -> None:
    assert Selection.parse(**options).matches(EPISODE)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "judge"},
        {"version": "6-8"},
        {"policy": "solver", "version": "9"},
        {"policy": "verifier", "version": "<9"},
        {"reward": ">0.5"},
        {"failure": "any"},
        {"failure": "timeout"},
        {"region": "us"},
        {"prompt": "math/train/17a"},
        {"prompt": "math/train/17"},
        {"prompt": "*b"},
        {"fate": "expired"},
        {"fate": "trained:4"},
        {"fate": "filtered:7"},
        {"fate": "replayed:7"},
        {"policy": "verifier", "fate": "trained"},
        {"policy": "solver", "fate": "replayed"},
    ],
    ids=str,
)
def test_an_episode_that_misses_a_condition_is_not_selected(options: dict[str, str]) -> None:
    assert not Selection.parse(**options).matches(EPISODE)


def test_failures_are_selected_by_their_kind() -> None:
    failed = replace(EPISODE, failure="timeout", sequences=())
    assert Selection.parse(failure="any").matches(failed)
    assert Selection.parse(failure="timeout").matches(failed)
    assert not Selection.parse(failure="none").matches(failed)
    assert not Selection.parse(failure="tool").matches(failed)
    assert not Selection.parse(policy="solver").matches(failed)


@pytest.mark.parametrize("option", ["failure", "fate"])
def test_an_unknown_word_is_refused_with_the_known_ones(option: str) -> None:
    with pytest.raises(ConfigError, match=f"--{option} 'lost' is none of .*(timeout|trained)"):
        Selection.parse(**{option: "lost"})


def test_a_pattern_matches_as_the_regular_expression_of_it_does() -> None:
    texts = ["".join(letters) for size in range(5) for letters in product("ab", repeat=size)]
    patterns = ["".join(letters) for size in range(5) for letters in product("ab*", repeat=size)]
    for pattern in filter(None, patterns):
        expected = re.compile(".*".join(pattern.split("*")))
        for text in texts:
            found = Selection(prompt=pattern).matches(replace(EPISODE, prompt_id=text))
            assert found == bool(expected.fullmatch(text)), (text, pattern)


def test_a_long_id_is_compared_with_a_pattern_at_once() -> None:
    long = replace(EPISODE, prompt_id="a" * 2_000_000)
    assert not Selection(prompt="*a*a*a*b").matches(long)
    assert not Selection(prompt="*a*ab*").matches(long)
    assert Selection(prompt="*a*a*a*a").matches(long)
