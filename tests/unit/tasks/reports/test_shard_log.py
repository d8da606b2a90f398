from dataclasses import replace

import pytest

from storage.run import quarantine
from tasks.reports.shard_log import PlayedShard, ShardLog, by_worker, read_shard_log, throughput
from tests.support.runs.small_run import SmallRun


def played(
    order: int, start_s: float, end_s: float, tokens: int, region: str = "us-east"
) -> PlayedShard:
    return PlayedShard(
        order=order,
        worker=f"rollout-{region}-0",
        region=region,
        started_s=start_s,
        finished_s=end_s,
        tokens=tokens,
        episodes=8,
        failed={},
        newest={"solver": 0},
        sequences={"solver": 8},
    )


def test_the_log_counts_sampled_tokens_and_skips_orders_without_a_readable_shard() -> None:
    small_run = SmallRun("shard-log")
    for number in range(3):
        small_run.order(number)
    small_run.shard(0)
    small_run.run.put("shards/00000002.arrow", b"damage")
    (only,) = read_shard_log(small_run.run).played
    assert (only.order, only.worker, only.tokens, only.episodes, only.failed) == (
        0,
        "rollout-us-east-0",
        6,
        2,
        {},
    )
    assert only.newest == {"solver": 0}
    assert only.finished_s - only.started_s == 1.5
    assert only.sequences == {"solver": 2}


def test_a_shard_in_quarantine_and_the_shard_of_such_an_order_are_left_out() -> None:
    small_run = SmallRun("shard-log-quarantine")
    for number in range(4):
        small_run.shard(number)
    quarantine.quarantine_object(small_run.run, "shards/00000001.arrow", "damage")
    quarantine.quarantine_object(small_run.run, "orders/00000002.json", "damage")
    log = read_shard_log(small_run.run)
    assert [shard.order for shard in log.played] == [0, 3]
    assert log.sequences("solver") == {0: 2, 3: 2}
    assert log.sequences("verifier") == {}


def test_a_later_log_reads_new_shards_alone() -> None:
    small_run = SmallRun("shard-log-again")
    small_run.shard(0)
    known = read_shard_log(small_run.run)
    small_run.run.put("shards/00000000.arrow", b"never read again")
    small_run.shard(1)
    assert [shard.order for shard in read_shard_log(small_run.run, known).played] == [0, 1]


def test_tokens_are_spread_evenly_over_the_time_of_their_order() -> None:
    log = ShardLog((played(0, 100, 102, 40), played(1, 101, 103, 20)))
    minutes, rates = throughput(log, start_s=100, buckets=3)
    assert minutes == pytest.approx([0.5 / 60, 1.5 / 60, 2.5 / 60])
    assert rates["us-east"] == pytest.approx([20.0, 30.0, 10.0])


def test_lanes_contain_the_orders_of_each_worker_by_their_start() -> None:
    late, early = played(0, 5, 6, 1), played(1, 2, 3, 1)
    other = replace(played(2, 0, 1, 1, "eu-west"))
    assert by_worker([late, early, other]) == {
        "rollout-eu-west-0": [other],
        "rollout-us-east-0": [early, late],
    }


def test_an_empty_log_gives_an_empty_plot() -> None:
    assert throughput(ShardLog(()), 0.0) == ([], {})
