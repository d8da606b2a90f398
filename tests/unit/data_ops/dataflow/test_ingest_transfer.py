"""Transfer of an ingested shard to another process as bytes, with all fields that the dataflow
uses.
"""

import pickle
import pickletools
from dataclasses import fields

import numpy as np
import pytest

from data_ops.config import DataConfig
from data_ops.dataflow.ingest_transfer import IngestedShards, decode, encode
from data_ops.dataflow.shard_ingest import EpisodeOutcome, IngestedShard, ingest_shard
from storage import layout
from storage.errors import CorruptError
from storage.records.batches import BatchRow
from storage.run import shards
from storage.store.object_store import ObjectStore
from tests.support.runs.builders import episode, group, sequence, shard

CONFIG = DataConfig.model_validate(
    {"prompts": {"builtin": "chained_addition"}, "samples_per_prompt": 2}
)


def ingested(run: ObjectStore) -> IngestedShard:
    """Two policies; a kept group, a filtered group, a failed episode, and a metric that is NaN."""
    verdict = sequence((11, 40), (50,), policy="verifier", reward=0.25, starts_episode=False)
    played = shard(
        group(episode(sequence(reward=1.0), verdict, final=1.0), episode(sequence(reward=0.0))),
        group(episode(), episode(), prompt_id="equal"),
        group(episode(error="KeyError: 'answer'", final=float("nan")), episode()),
        order=4,
    )
    shards.create(run, played)
    return ingest_shard(run, 4, CONFIG, ["solver", "verifier"], {})


def same_row(item: BatchRow, other: BatchRow) -> bool:
    for field in fields(BatchRow):
        left, right = getattr(item, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            if left.dtype != right.dtype or left.tobytes() != right.tobytes():
                return False
        elif left != right:
            return False
    return True


def test_an_ingested_shard_is_read_back_bit_for_bit_without_the_shard(
    memory_store: ObjectStore,
) -> None:
    before = ingested(memory_store)
    after = decode(encode(before))
    assert (after.order, after.problem, after.num_groups) == (4, "", 3)
    sampled = [len(each.tokens) - 2 for group in before.shard.groups for play in group.episodes for each in play.sequences] if before.shard else []  # fmt: skip
    assert after.num_sampled == before.num_sampled == sum(sampled) > 0
    assert after.finished_s == before.finished_s == 1700000001.5
    assert after.shard is None
    assert after.episodes[0] == EpisodeOutcome(None, None, {"final": 1.0})
    assert [each.error for each in after.episodes] == [None] * 4 + ["KeyError: 'answer'", None]
    assert np.isnan(after.episodes[4].metrics["final"])
    assert list(after.policies) == ["solver", "verifier"]
    for policy, groups in before.policies.items():
        crossed = after.policies[policy]
        assert len(crossed.rows) == len(groups.rows)
        assert all(map(same_row, crossed.rows, groups.rows))
        assert crossed.entries == groups.entries
        assert crossed.rewards.tolist() == groups.rewards.tolist()
        assert crossed.num_groups == groups.num_groups
        assert crossed.num_groups_kept == groups.num_groups_kept
    assert [entry.reason for entry in after.policies["solver"].entries] == ["zero_advantage"] * 3
    assert [row.key for row in after.policies["solver"].rows] == [(4, 0, 0, 0), (4, 0, 1, 0)]


def test_an_unreadable_shard_is_transferred_with_its_error(memory_store: ObjectStore) -> None:
    memory_store.create(layout.shard(5), b"torn")
    after = decode(encode(ingest_shard(memory_store, 5, CONFIG, ["solver"], {})))
    assert "shards/00000005.arrow" in after.problem
    assert (after.order, dict(after.policies), after.episodes) == (5, {}, ())


def test_a_pickled_result_has_only_bytes_and_one_function_name(
    memory_store: ObjectStore,
) -> None:
    before = ingested(memory_store)
    body = pickle.dumps(IngestedShards([before], 0.5))
    operations = [(code.name, argument) for code, argument, _ in pickletools.genops(body)]
    assert [name for name, _ in operations].count("STACK_GLOBAL") == 1
    assert {"data_ops.dataflow.ingest_transfer", "_transferred"} <= {
        argument for _, argument in operations if isinstance(argument, str)
    }
    (after,) = pickle.loads(body).shards
    assert after.policies["solver"].entries == before.policies["solver"].entries


def test_bytes_changed_in_transfer_are_refused(memory_store: ObjectStore) -> None:
    files = encode(ingested(memory_store))
    body = bytearray(files["solver.arrow"])
    body[len(body) // 2] ^= 1
    with pytest.raises(CorruptError):
        decode({**files, "solver.arrow": bytes(body)})
