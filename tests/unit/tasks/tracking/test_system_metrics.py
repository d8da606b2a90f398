"""System metrics in MLflow: of each machine of the run, under MLflow's own names."""

from typing import Any

import pytest

from storage.records.control import Heartbeat, ServiceState
from storage.records.machine_use import GpuUse, MachineUse
from tasks.tracking import system_metrics
from tasks.tracking.mlflow_sync import Tracker
from tasks.tracking.system_metrics import machine_points
from tests.support.runs import builders
from tests.support.runs.small_run import RUN_ID, SmallRun

NOW_S = 1000.0


def use(cpu: float, *gpus: GpuUse) -> MachineUse:
    return MachineUse(cpu_percent=cpu, memory_bytes=2e9, memory_total_bytes=8e9, gpus=gpus)


def beat(member: str, host: str, machine: MachineUse | None, **changes: Any) -> Heartbeat:
    fields: dict[str, Any] = {"beat_s": NOW_S, "host": host, "machine": machine, **changes}
    return builders.heartbeat("rollout", member, **fields)


def values(*beats: Heartbeat) -> dict[str, float]:
    points = machine_points(beats, 7, NOW_S, 20.0)
    assert {(point.step, point.time_s) for point in points} <= {(7, NOW_S)}
    assert len({point.key for point in points}) == len(points)
    return {point.key: point.value for point in points}


def test_a_machine_has_the_metrics_of_its_cpu_memory_and_gpus() -> None:
    gpus = (
        GpuUse(memory_bytes=4e9, memory_total_bytes=16e9, utilization_percent=97.0),
        GpuUse(memory_bytes=0.0, memory_total_bytes=0.0),
    )
    assert values(beat("a", "node-1", use(37.5, *gpus))) == {
        "system/node-1/cpu_utilization_percentage": 37.5,
        "system/node-1/system_memory_usage_megabytes": 2000.0,
        "system/node-1/system_memory_usage_percentage": 25.0,
        "system/node-1/gpu_0_utilization_percentage": 97.0,
        "system/node-1/gpu_0_memory_usage_megabytes": 4000.0,
        "system/node-1/gpu_0_memory_usage_percentage": 25.0,
        "system/node-1/gpu_1_memory_usage_megabytes": 0.0,
    }


def test_each_machine_has_one_curve_of_the_first_of_its_services() -> None:
    found = values(
        beat("a", "x", None), beat("b", "x", use(1)), beat("c", "x", use(2)), beat("d", "y", use(3))
    )
    assert {name: value for name, value in found.items() if "cpu" in name} == {
        "system/x/cpu_utilization_percentage": 1,
        "system/y/cpu_utilization_percentage": 3,
    }


@pytest.mark.parametrize(
    ("changes", "is_shown"),
    [
        ({"beat_s": NOW_S - 20}, True),
        ({"beat_s": NOW_S - 20.5}, False),
        ({"state": ServiceState.DONE}, False),
    ],
)
def test_a_machine_without_a_fresh_heartbeat_has_no_metrics(
    changes: dict[str, Any], is_shown: bool
) -> None:
    assert bool(values(beat("a", "x", use(1), **changes))) is is_shown


def test_the_name_of_a_machine_is_part_of_a_metrics_name() -> None:
    names = {name.split("/")[1] for name in values(beat("a", "a/b\x1b é" + "h" * 99, use(1)))}
    assert names == {("a_b___" + "h" * 99)[:60]}


def test_the_number_of_machines_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_metrics, "MACHINES_MAX", 2)
    found = values(*(beat(name, name, use(1)) for name in "cab"))
    assert {name.split("/")[1] for name in found} == {"a", "b"}


REFUSED = ("", ".", "..")
"""Parts of a name that MLflow refuses, with the whole request."""


@pytest.mark.filterwarnings("ignore")  # MLflow's own imports and database layer warn
def test_a_sync_logs_the_use_of_machines_to_the_parent(uri: str) -> None:
    from mlflow.tracking import MlflowClient

    small_run = SmallRun("system-metrics")
    for policy in small_run.config.policies:
        small_run.version(policy, 0, {"config.json": b"{}"})
    seen = beat("b", "node-1", use(37.5), versions={"solver": 3})
    for each in (seen, *(beat(f"a{place}", host, use(1)) for place, host in enumerate(REFUSED))):
        builders.put_heartbeat(small_run.run, each)
    assert Tracker(small_run.run, RUN_ID, small_run.config, uri, clock=lambda: NOW_S).sync()
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("astraflow")
    (parent,) = [
        run
        for run in client.search_runs([experiment.experiment_id])
        if "astraflow.policy" not in run.data.tags
    ]
    history = client.get_metric_history(
        parent.info.run_id, "system/node-1/cpu_utilization_percentage"
    )
    assert [(point.value, point.step, point.timestamp) for point in history] == [(37.5, 3, 10**6)]
