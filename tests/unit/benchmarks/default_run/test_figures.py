from typing import get_args

import pytest

from benchmarks.default_run import figures
from benchmarks.default_run.figures import Latency
from storage.records.batches import Batch
from storage.records.control import Heartbeat
from storage.records.progress import ServiceKind
from tests.support.runs import builders


def batch(step: int, created_s: float, shards: tuple[int, ...], policy: str = "solver") -> Batch:
    return Batch(
        policy=policy,
        step=step,
        rows=(),
        ledger=(),
        waiting=(),
        shards=shards,
        closed_below=0,
        closed=(),
        created_s=created_s,
    )


def beat(
    beat_s: float, beats: int = 1, kind: str = "trainer", pid: int = 7, **seconds: float
) -> Heartbeat:
    return builders.heartbeat(
        kind, "member", beats=beats, beat_s=beat_s, started_s=100.0, pid=pid, seconds=seconds
    )  # type: ignore[arg-type]  # a literal


def test_a_shard_waits_until_the_first_batch_that_lists_it() -> None:
    new_batch = [batch(2, 14.0, (2,)), batch(1, 12.0, (0, 1)), batch(1, 11.0, (1,), "verifier")]
    result = figures.latency({0: 10.0, 1: 10.5, 2: 10.0, 3: 10.0}, new_batch)
    # 0 waits 2 s for the solver's first batch, 1 waits 0.5 s for the verifier's, 2 waits 4 s, 3 is
    # in no batch
    assert result == Latency(p50_s=2.0, p99_s=pytest.approx(3.96), max_s=4.0, num_shards=3)


def test_a_run_without_shards_in_its_batches_has_no_latency() -> None:
    assert figures.latency({0: 1.0}, [batch(1, 2.0, ())]) is None


def test_the_window_reaches_from_the_first_batch_to_the_last_version_of_any_policy() -> None:
    assert figures.window([batch(2, 8.0, ()), batch(1, 5.0, (), "verifier")], [20.0, 30.0]) == (
        5.0,
        30.0,
    )


def test_wall_clock_time_counts_only_the_window() -> None:
    said = [beat(110.0, wait=10.0), beat(120.0, wait=12.0, step=8.0, cpu=50.0)]
    result = figures.wall_clock(said, 115.0, 125.0)
    assert result == {"wait": pytest.approx(1.0), "step": pytest.approx(4.0)}


def test_the_wall_clock_time_of_a_member_is_the_sum_over_its_attempts() -> None:
    beats = {
        ("dataflow", 100.0): [beat(110.0, wait=4.0)],
        ("dataflow", 200.0): [beat(210.0, wait=3.0, store=1.0)],
    }
    assert figures.wall_clocks(beats, 0.0, 300.0) == {"dataflow": {"wait": 7.0, "store": 1.0}}


def test_a_member_idle_during_the_window_is_not_shown() -> None:
    assert figures.wall_clocks({("base-model", 100.0): [beat(110.0, wait=4.0)]}, 150.0, 300.0) == {}


def test_the_control_plane_is_everything_except_rollout_training_and_evaluation() -> None:
    cpu_s = {
        "Prefect server": 3.0,
        "dataflow": 2.0,
        "other": 1.0,
        "rollout workers": 40.0,
        "trainers": 14.0,
    }
    assert figures.control_plane_share(cpu_s) == pytest.approx(0.1)
    assert figures.control_plane_share({}) == 0.0


def test_a_flow_is_named_by_its_heartbeat_although_its_pool_has_a_worker() -> None:
    names = figures.names_of(
        {"prefect-server": 1, "mlflow": 2, "worker-control": 3}, [beat(0.0, pid=9)], 4
    )
    assert names == {
        1: "Prefect server",
        2: "MLflow server",
        3: "Prefect workers",
        9: "trainers",
        4: figures.LIVE_VIEW,
    }


def test_each_kind_of_heartbeat_has_a_component() -> None:
    assert set(figures.OF_KIND) == set(get_args(ServiceKind))
