from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from data_ops.algorithms.policy_groups import ModelLimits, route
from storage.records.batches import SequenceKey
from storage.records.rollouts import NOT_SAMPLED, Sequence
from storage.run import shards
from tests.support.runs.builders import episode, group, sequence, shard

BOTH = ("solver", "verifier")


def shared_sequence() -> Sequence:
    """A prompt token, two tokens of the verifier at version 7 and three of the solver at versions
    4, 3 and 5.
    """
    return Sequence(
        tokens=np.array([10, 20, 21, 30, 31, 32], dtype=np.int32),
        loss_mask=np.array([False, True, True, True, False, True]),
        logprobs=np.array([0, -1, -2, -3, -4, -5], dtype=np.float32),
        owners=np.array([NOT_SAMPLED, 1, 1, 0, 0, 0], dtype=np.int8),
        versions=np.array([NOT_SAMPLED, 7, 7, 4, 3, 5], dtype=np.int32),
        policies=BOTH,
        reward=0.5,
        temperature=0.7,
    )


def test_a_shared_sequence_goes_to_each_owner_with_the_tokens_of_others_masked() -> None:
    routed = route(shard(group(episode(shared_sequence()))), BOTH, {})
    (solver,) = routed["solver"][0].rows
    assert solver.tokens.tolist() == [10, 20, 21, 30, 31, 32]
    assert solver.loss_mask.tolist() == [False, False, False, True, False, True]
    assert solver.logprobs.tolist() == [0, 0, 0, -3, 0, -5]
    assert solver.versions.tolist() == [NOT_SAMPLED, NOT_SAMPLED, NOT_SAMPLED, 4, NOT_SAMPLED, 5]
    assert (solver.reward, solver.temperature, solver.replay) == (0.5, 0.7, False)
    assert solver.advantages.tolist() == [0] * 6
    (verifier,) = routed["verifier"][0].rows
    assert verifier.loss_mask.tolist() == [False, True, True, False, False, False]
    assert verifier.logprobs.tolist() == [0, -1, -2, 0, 0, 0]
    assert verifier.versions.tolist() == [NOT_SAMPLED, 7, 7, NOT_SAMPLED, NOT_SAMPLED, NOT_SAMPLED]


def test_the_oldest_version_is_over_all_own_tokens_masked_or_not() -> None:
    routed = route(shard(group(episode(shared_sequence()))), BOTH, {})
    assert routed["solver"][0].rows[0].min_version == 3
    assert routed["verifier"][0].rows[0].min_version == 7


def test_a_group_mixes_first_attempts_and_retries_of_all_samples() -> None:
    first, verdict = sequence(reward=0.0), sequence(policy="verifier", reward=1.0)
    retry = sequence(reward=1.0, starts_episode=False, name="retry")
    routed = route(
        shard(group(episode(first, verdict, retry), episode(sequence(reward=0.25))), order=6),
        BOTH,
        {},
    )
    (solver,), (verifier,) = routed["solver"], routed["verifier"]
    assert [row.key for row in solver.rows] == [(6, 0, 0, 0), (6, 0, 0, 2), (6, 0, 1, 0)]
    assert solver.rewards.tolist() == [0.0, 1.0, 0.25]
    assert [row.key for row in verifier.rows] == [(6, 0, 0, 1)]


def test_keys_and_prompts_name_the_position_in_the_shard() -> None:
    routed = route(shard(group(prompt_id="a"), group(prompt_id="b"), order=3), ["solver"], {})
    assert [(row.key, row.prompt_id) for row in routed["solver"][1].rows] == [
        (SequenceKey(3, 1, 0, 0), "b"),
        (SequenceKey(3, 1, 1, 0), "b"),
    ]


def test_a_policy_without_tokens_has_no_group() -> None:
    routed = route(shard(group(episode(sequence(policies=("solver",))))), BOTH, {})
    assert routed["verifier"] == ()


def test_sequences_of_failed_episodes_are_refused_and_counted() -> None:
    failed = episode(sequence(), error="TimeoutError: timeout after 60 s")
    (solver,) = route(
        shard(group(failed, episode(), episode(error="ValueError: no"))), ["solver"], {}
    )["solver"]
    assert [row.key for row in solver.rows] == [(0, 0, 1, 0)]
    assert solver.refused == (((0, 0, 0, 0), "filtered", "failed_episode"),)
    assert solver.num_failed == 2


def test_a_group_of_only_failed_episodes_is_in_the_ledger() -> None:
    failed = episode(sequence(), error="TimeoutError: timeout after 60 s")
    (solver,) = route(shard(group(failed, failed)), ["solver"], {})["solver"]
    assert solver.rows == ()
    assert [entry.key for entry in solver.refused] == [(0, 0, 0, 0), (0, 0, 1, 0)]
    assert solver.num_failed == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    bad_reward, bad_logprob = sequence(reward=value), sequence(logprob=value)
    (solver,) = route(
        shard(group(episode(bad_reward), episode(bad_logprob), episode())), ["solver"], {}
    )["solver"]
    assert [entry.reason for entry in solver.refused] == ["not_finite", "not_finite"]
    assert len(solver.rows) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": np.array([0, 0, -1, 0.011, -1], dtype=np.float32)},
        {"logprobs": np.array([0, 0, -1, -40.001, -1], dtype=np.float32)},
        {"logprobs": np.array([0, 0, -1, -3e38, -1], dtype=np.float32)},
        {"temperature": 0.0},
        {
            "loss_mask": np.ones(5, dtype=np.bool_),
            "owners": np.zeros(5, dtype=np.int8),
            "versions": np.full(5, 3, dtype=np.int32),
        },
    ],
    ids=["above 0", "below -40", "lowest float", "greedy", "a first token"],
)
def test_an_unusable_sequence_is_dropped_and_the_others_are_kept(
    change: dict[str, Any],
) -> None:
    bad = replace(sequence(), **change)
    (solver,) = route(shard(group(episode(bad), episode())), ["solver"], {})["solver"]
    assert [tuple(entry) for entry in solver.refused] == [((0, 0, 0, 0), "filtered", "untrainable")]
    assert [row.key for row in solver.rows] == [(0, 0, 1, 0)]


def test_log_probabilities_in_bounds_and_a_greedy_context_are_kept() -> None:
    rounded = replace(sequence(), logprobs=np.array([0, 0, -40, 0.009, -1], dtype=np.float32))
    context = replace(sequence(), temperature=0.0, loss_mask=np.zeros(5, dtype=np.bool_))
    (solver,) = route(shard(group(episode(rounded), episode(context))), ["solver"], {})["solver"]
    assert (len(solver.rows), solver.refused) == (2, ())


def test_a_masked_log_probability_may_have_any_value() -> None:
    masked = replace(sequence(logprob=float("-inf")), loss_mask=np.zeros(5, dtype=np.bool_))
    (solver,) = route(shard(group(episode(masked))), ["solver"], {})["solver"]
    assert solver.rows[0].logprobs.tolist() == [0, 0, 0, 0, 0]


def test_lengths_count_the_tokens_that_are_trained_on() -> None:
    (solver,) = route(
        shard(group(episode(shared_sequence()), episode(sequence()))), ["solver"], {}
    )["solver"]
    assert solver.lengths.tolist() == [2, 3]


def test_a_token_outside_the_vocabulary_of_a_policy_is_refused_for_this_policy_only() -> None:
    both = sequence((11, 12), (40, 41, 2))
    owners = np.array([-1, -1, 0, 0, 1], dtype=np.int8)
    played = shard(group(episode(replace(both, owners=owners))))
    routed = route(
        played, ["solver", "verifier"], {"solver": ModelLimits(41), "verifier": ModelLimits(42)}
    )
    ((solver,), (verifier,)) = routed["solver"], routed["verifier"]
    assert [tuple(entry) for entry in solver.refused] == [
        ((0, 0, 0, 0), "filtered", "outside_vocabulary")
    ]
    assert [row.key for row in verifier.rows] == [(0, 0, 0, 0)]
    assert verifier.refused == ()


def test_a_sequence_that_is_longer_than_the_contexts_of_a_model_is_refused() -> None:
    """A shard of a few kB may have one of a million tokens, which ends the trainer."""
    short, long = sequence((11, 12), (40, 2)), sequence((11, 12), (40,) * 500_000)
    played = shard(group(episode(short), episode(long)))
    assert len(shards.encode(played)) < 100_000
    (routed,) = route(played, ["solver"], {"solver": ModelLimits(positions=4)})["solver"]
    assert [row.key for row in routed.rows] == [(0, 0, 0, 0)]
    assert [tuple(entry) for entry in routed.refused] == [((0, 0, 1, 0), "filtered", "too_long")]


@pytest.mark.parametrize(("region", "stored"), [("us-east", "us-east"), ("", ""), ("a/b", "")])
def test_rows_have_the_region_of_their_shard_if_it_is_a_name(region: str, stored: str) -> None:
    (routed,) = route(replace(shard(), region=region), ["solver"], {})["solver"]
    assert [row.region for row in routed.rows] == [stored, stored]
