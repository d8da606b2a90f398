"""The limits of a policy's model, and sequences outside of them."""

import json

import pytest

from data_ops.algorithms.policy_groups import ModelLimits
from data_ops.config import PolicyData
from data_ops.dataflow.model_limits import RunLimits, read_limits
from storage.errors import CorruptError, NotFoundError
from storage.records.batches import SequenceKey
from storage.run import batches, orders, shards
from storage.store.object_store import ObjectStore
from storage.verify.verify import verify
from storage.weights import publisher
from tasks.recipes.run_terms import run_terms
from tests.support.runs.builders import episode, group, sequence, shard, tensors
from tests.support.runs.dataflow_world import MAX_TOKENS, world


def publish(run: ObjectStore, policy: str, config: object) -> None:
    publisher.publish(
        run, policy, 0, tensors(0), extra_files={"config.json": json.dumps(config).encode()}
    )


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 84}, 84),
        ({"vocab_size": 7, "text_config": {"vocab_size": 84}}, 84),
        ({"vocab_size": "84"}, None),
        ({"vocab_size": True}, None),
        ({}, None),
    ],
)
def test_the_size_of_a_multimodal_config_is_that_of_its_text_model(
    memory_store: ObjectStore, config: object, size: int | None
) -> None:
    publish(memory_store, "solver", config)
    assert read_limits(memory_store, "solver").vocab_size == size


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 7, "text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": 4.0}}, 256),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "full": {"factor": 8, "original_max_position_embeddings": 16, "x": None}
                },
            },
            128,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": 0.5}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": True}}, 64),
        ({"max_position_embeddings": 10**30}, 2**31),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": 10**30}}, 2**31),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": 1e308}}, 2**31),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": float("nan")}}, 64),
        ({"max_position_embeddings": "64"}, None),
        ({"max_position_embeddings": True}, None),
        ({}, None),
    ],
)
def test_the_positions_of_a_model_are_those_of_its_scaled_rotations(
    memory_store: ObjectStore, config: object, positions: int | None
) -> None:
    publish(memory_store, "solver", config)
    assert read_limits(memory_store, "solver").positions == positions


def test_weights_without_a_config_have_no_known_size(memory_store: ObjectStore) -> None:
    publisher.publish(memory_store, "solver", 0, tensors(0))
    assert read_limits(memory_store, "solver") == ModelLimits()
    with pytest.raises(NotFoundError):
        read_limits(memory_store, "verifier")


def test_a_size_is_read_once_when_version_0_exists(memory_store: ObjectStore) -> None:
    sizes = RunLimits(memory_store, ["solver"], max_tokens=16)
    assert sizes.read() == {"solver": ModelLimits(None, 16)}
    publish(memory_store, "solver", {"vocab_size": 84})
    assert sizes.read() == {"solver": ModelLimits(84, 16)}
    for key in memory_store.list("weights"):
        memory_store.delete(key)
    assert sizes.read() == {"solver": ModelLimits(84, 16)}


@pytest.mark.parametrize(("max_tokens", "longest"), [(63, 63), (64, 64), (65, 64)])
def test_the_longest_sequence_is_that_of_the_engine_or_of_the_model(
    memory_store: ObjectStore, max_tokens: int, longest: int
) -> None:
    publish(memory_store, "solver", {"vocab_size": 84, "max_position_embeddings": 64})
    limits = RunLimits(memory_store, ["solver"], max_tokens)
    assert limits.read() == {"solver": ModelLimits(84, longest)}


def test_an_unreadable_config_is_logged_and_disables_the_check(
    memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    publish(memory_store, "solver", [1])
    with pytest.raises(CorruptError, match="is a JSON list where an object belongs"):
        read_limits(memory_store, "solver")
    limits = RunLimits(memory_store, ["solver"], max_tokens=16)
    assert limits.read() == {"solver": ModelLimits(None, 16)}
    assert "the vocabulary size of solver and the length of its contexts are unknown" in caplog.text


def test_a_sequence_longer_than_the_engines_contexts_is_filtered(memory_store: ObjectStore) -> None:
    simulation = world(
        memory_store, {"solver": PolicyData(batch_size=4, steps=1)}, samples_per_prompt=3
    )
    run = simulation.run
    dataflow = simulation.dataflow()
    dataflow.round()
    longest = (40,) * (MAX_TOKENS - 2)
    shards.create(
        run,
        shard(
            *(
                group(
                    episode(sequence((11, 12), longest, reward=1.0)),
                    episode(sequence((11, 12), (*longest, 2), reward=0.5)),
                    episode(sequence((11, 12), (40, 2), reward=0.0)),
                    prompt_id=prompt.id,
                )
                for prompt in orders.read(run, 0).prompts
            ),
            weights={"solver": {0: simulation.digests["solver"][0]}},
        ),
    )
    dataflow.round()
    batch = batches.read(run, "solver", 1)
    assert [len(row.tokens) for row in batch.rows] == [MAX_TOKENS, 4] * 2
    assert {(entry.key, entry.reason) for entry in batch.ledger} == {
        (SequenceKey(0, 0, 1, 0), "too_long"),
        (SequenceKey(0, 1, 1, 0), "too_long"),
    }
    assert verify(run, run_terms(run)).violations == ()


def test_a_sequence_with_a_token_beyond_the_vocabulary_is_filtered(
    memory_store: ObjectStore,
) -> None:
    simulation = world(
        memory_store, {"solver": PolicyData(batch_size=3, steps=1)}, samples_per_prompt=2
    )
    run = memory_store.sub("runs/r")
    for key in run.list("weights"):
        run.delete(key)
    publish(run, "solver", {"vocab_size": 41})
    dataflow = simulation.dataflow()
    dataflow.round()
    first, second = orders.read(run, 0).prompts
    shards.create(
        run,
        shard(
            group(
                episode(sequence((40, 12), (40, 0, 2), reward=1.0)),
                episode(sequence((11, 12), (40, 41, 2), reward=0.0)),  # a sampled token beyond it
                prompt_id=first.id,
            ),
            group(
                episode(sequence((41, 12), (40, 2), reward=1.0)),  # a prompt token beyond it
                episode(sequence((11, 12), (40, 2), reward=0.0)),
                episode(sequence((11, 12), (39, 2), reward=1.0)),
                prompt_id=second.id,
            ),
            weights={"solver": {0: "sha256:00"}},
        ),
    )
    dataflow.round()
    (assembly,) = dataflow._assemblies
    reasons = {entry.key: entry.reason for entry in assembly.ledger.entries}
    assert reasons == {
        SequenceKey(0, 0, 0, 0): "zero_advantage",  # the only row of its group
        SequenceKey(0, 0, 1, 0): "outside_vocabulary",
        SequenceKey(0, 1, 0, 0): "outside_vocabulary",
    }
    assert {row.key for row in assembly.ledger.waiting} == {
        SequenceKey(0, 1, 1, 0),
        SequenceKey(0, 1, 2, 0),
    }
    assert all(violation.invariant != 6 for violation in verify(run, run_terms(run)).violations)
