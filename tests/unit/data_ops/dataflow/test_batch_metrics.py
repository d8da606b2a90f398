import numpy as np
import pytest

from data_ops.dataflow.batch_metrics import IngestMetrics, batch_metrics
from data_ops.dataflow.shard_ingest import IngestedGroups, IngestedShard
from storage.records.batches import SequenceKey
from storage.records.rollouts import FailureKind, Group
from tests.support.runs.builders import batch, entry, episode, group, row, shard


def groups(*rewards: float, num_groups: int = 2, num_groups_kept: int = 1) -> IngestedGroups:
    return IngestedGroups(
        rewards=np.array(rewards), num_groups=num_groups, num_groups_kept=num_groups_kept
    )


def ingested(*played: Group) -> IngestedShard:
    return IngestedShard.of(shard(*played), {})


def test_the_reward_is_the_mean_over_every_sequence_before_filtering() -> None:
    sums = IngestMetrics()
    sums.add(groups(1.0, 1.0, 0.0), ingested())
    sums.add(groups(0.0), ingested())
    assert sums.metrics()["dataflow/reward/mean"] == 0.5
    assert sums.metrics()["dataflow/groups_kept_share"] == 0.5


def test_accuracy_is_the_mean_over_episodes_that_measured_it() -> None:
    sums = IngestMetrics()
    right, wrong = episode(first_attempt=0.0, final=1.0), episode(first_attempt=0.0, final=0.0)
    sums.add(
        groups(1.0),
        ingested(group(right, right, wrong, episode(error="ValueError: no", final=1.0))),
    )
    metrics = sums.metrics()
    assert metrics["dataflow/accuracy/first_attempt"] == 0.0
    assert metrics["dataflow/accuracy/final"] == pytest.approx(2 / 3)
    assert metrics["dataflow/episodes_failed_share"] == 0.25


def test_failed_episodes_are_counted_by_kind() -> None:
    sums = IngestMetrics()
    timeout = episode(error="timeout after 60 s", failure_kind=FailureKind.TIMEOUT)
    broken = episode(error="ToolFailedError: no shell", failure_kind=FailureKind.TOOL)
    sums.add(groups(1.0), ingested(group(episode(), episode(), timeout, timeout)))
    sums.add(groups(1.0), ingested(group(episode(), broken, timeout, episode(error="old"))))
    kinds = {
        "dataflow/failed_share/timeout": 3 / 8,
        "dataflow/failed_share/tool": 1 / 8,
        "dataflow/failed_share/not_recorded": 1 / 8,
    }
    assert {name: v for name, v in sums.metrics().items() if "failed_share/" in name} == kinds
    assert sums.metrics()["dataflow/episodes_failed_share"] == 5 / 8
    sums.clear()
    restarted = IngestMetrics(sums.metrics())
    for later in (sums, restarted):
        later.add(groups(1.0), ingested(group(episode(), timeout)))
        assert {name: v for name, v in later.metrics().items() if "failed_share/" in name} == {
            "dataflow/failed_share/timeout": 0.5,
            "dataflow/failed_share/tool": 0.0,
            "dataflow/failed_share/not_recorded": 0.0,
        }


def test_a_workflow_that_measures_no_accuracy_has_none() -> None:
    sums = IngestMetrics()
    sums.add(groups(1.0), ingested(group(episode())))
    assert not any(name.startswith("dataflow/accuracy") for name in sums.metrics())


def test_a_batch_without_new_shards_repeats_the_last_values() -> None:
    sums = IngestMetrics()
    sums.add(groups(1.0), ingested())
    sums.clear()
    assert sums.metrics()["dataflow/reward/mean"] == 1.0
    sums.add(groups(0.25), ingested())
    assert sums.metrics()["dataflow/reward/mean"] == 0.25


def test_a_restart_reads_the_last_values_from_the_newest_batch() -> None:
    sums = IngestMetrics(
        {
            "dataflow/reward/mean": 0.5,
            "dataflow/accuracy/final": 0.75,
            "dataflow/waiting": 3.0,
            "dataflow/accuracy/of_a_stranger": 1.0,
            "dataflow/failed_share/of_a_stranger": 1.0,
        }
    )
    assert sums.metrics() == {"dataflow/reward/mean": 0.5, "dataflow/accuracy/final": 0.75}


def test_rows_and_ledger_are_counted() -> None:
    rows = [
        row(SequenceKey(1, 0, 0, 0), version=4, reward=1.0),
        row(SequenceKey(2, 0, 0, 0), version=2, reward=0.0, answer=(7,)),
        row(SequenceKey(0, 0, 0, 0), version=0, reward=0.5, replay=True, answer=(7, 8)),
    ]
    new_batch = batch(
        *rows,
        step=6,
        ledger=(
            entry(SequenceKey(0, 0, 1, 0)),
            entry(SequenceKey(0, 0, 2, 0)),
            entry(SequenceKey(0, 0, 3, 0), "expired", "max_staleness"),
        ),
        waiting=(SequenceKey(3, 0, 0, 0),),
    )
    metrics = batch_metrics(new_batch, {1: 100.0, 2: 104.0}, now_s=110.0)
    assert metrics == {
        "dataflow/reward/batch_mean": 0.5,
        "dataflow/length/mean": 2.0,
        "dataflow/filtered": 2.0,
        "dataflow/expired": 1.0,
        "dataflow/waiting": 1.0,
        "dataflow/replayed": 1.0,
        # batch 6 is trained at version 5: staleness 1 and 3; the replay does not count
        "dataflow/staleness/mean": 2.0,
        "dataflow/staleness/max": 3.0,
        "dataflow/staleness/p90": pytest.approx(2.8),
        "dataflow/shard_to_batch_s/min": 6.0,
        "dataflow/shard_to_batch_s/p50": 8.0,
        "dataflow/shard_to_batch_s/max": 10.0,
    }


def test_a_worker_with_a_fast_clock_gives_no_negative_latency() -> None:
    assert batch_metrics(batch(), {0: 120.0}, now_s=110.0)["dataflow/shard_to_batch_s/max"] == 0.0


def test_rows_of_an_order_with_an_unknown_worker_have_no_latency() -> None:
    """As after a restart: the shard was ingested by an earlier dataflow."""
    assert not any("shard_to_batch_s" in name for name in batch_metrics(batch(), {}, now_s=110.0))
    two = batch(row(SequenceKey(1, 0, 0, 0)), row(SequenceKey(2, 0, 0, 0)))
    assert batch_metrics(two, {2: 104.0}, now_s=110.0)["dataflow/shard_to_batch_s/max"] == 6.0
