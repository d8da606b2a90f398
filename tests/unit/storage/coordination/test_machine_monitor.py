"""The measurement of a service's machine, and its way into the heartbeat."""

import json
import threading
from typing import Any

import psutil
import pytest

from storage.coordination import heartbeats, machine_monitor
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.coordination.machine_monitor import MachineMonitor, measured
from storage.errors import CorruptError
from storage.machine import gpus
from storage.machine.gpus import GpuReading
from storage.records.machine_use import GpuUse, MachineUse
from storage.store.object_store import ObjectStore
from tests.support.patience import PATIENCE_S
from tests.support.runs import builders

USE = MachineUse(
    cpu_percent=37.5,
    memory_bytes=2.0,
    memory_total_bytes=8.0,
    gpus=(
        GpuUse(memory_bytes=1.0, memory_total_bytes=4.0, utilization_percent=97.0),
        GpuUse(memory_bytes=0.0, memory_total_bytes=4.0),
    ),
)
KEY = "heartbeats/rollout/w.json"


@pytest.fixture
def stored() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(
        heartbeats.encode(builders.heartbeat("rollout", "w", machine=USE))
    )
    return fields


def parsed(fields: dict[str, Any]) -> MachineUse | None:
    return heartbeats.parse(json.dumps(fields).encode(), KEY).machine


def test_a_measurement_of_this_machine_is_within_its_bounds() -> None:
    use = measured()
    assert 0 <= use.cpu_percent <= 100
    assert 0 < use.memory_bytes < use.memory_total_bytes == psutil.virtual_memory().total


def test_readings_out_of_bounds_are_measured_as_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat with another number would be unreadable as a whole."""
    readings = [GpuReading(-1.0, 1e300, 101.0), *[GpuReading(1.0, 2.0, None)] * 99]
    monkeypatch.setattr(gpus, "in_use", lambda: tuple(readings))
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 100.1)
    use = measured()
    assert use.cpu_percent == 100.0
    assert len(use.gpus) == 64
    assert use.gpus[0] == GpuUse(
        memory_bytes=0.0, memory_total_bytes=2.0**53, utilization_percent=100.0
    )
    body = heartbeats.encode(builders.heartbeat("rollout", "w", machine=use))
    assert heartbeats.parse(body, KEY).machine == use


def test_a_measurement_is_read_back_unchanged(stored: dict[str, Any]) -> None:
    assert parsed(stored) == USE


def test_a_heartbeat_of_an_earlier_release_has_no_measurement(stored: dict[str, Any]) -> None:
    del stored["machine"]
    assert parsed(stored) is None


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_percent": 100.5},
        {"cpu_percent": -1},
        {"cpu_percent": "NaN"},
        {"memory_bytes": -1},
        {"memory_total_bytes": 2**54},
        {"gpus": [{"memory_bytes": 1, "memory_total_bytes": 1}] * 65},
        {"gpus": [{"memory_bytes": 1, "memory_total_bytes": 1, "utilization_percent": 101}]},
    ],
)
def test_a_measurement_out_of_bounds_is_unreadable(
    stored: dict[str, Any], change: dict[str, Any]
) -> None:
    stored["machine"] |= change
    with pytest.raises(CorruptError, match="machine"):
        parsed(stored)


def test_the_heartbeat_has_the_last_measurement(memory_store: ObjectStore) -> None:
    uses = iter([None, USE])
    with HeartbeatWriter(
        memory_store, "rollout", "w", 0, 3600.0, machine=lambda: next(uses)
    ) as writer:
        assert heartbeats.parse(memory_store.get(KEY), KEY).machine is None
        writer.update(note="still the same")
    assert heartbeats.parse(memory_store.get(KEY), KEY).machine == USE


def test_a_monitor_measures_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Semaphore(0)

    def measure() -> MachineUse:
        done.release()
        return USE

    monkeypatch.setattr(machine_monitor, "measured", measure)
    with MachineMonitor(interval_s=0.001) as monitor:
        for _ in range(3):
            assert done.acquire(timeout=PATIENCE_S)
        assert monitor.last() == USE
        # nvidia-smi may hang: that must not keep the process alive
        assert {thread.name: thread.daemon for thread in threading.enumerate()}["machine-monitor"]
    assert "machine-monitor" not in {thread.name for thread in threading.enumerate()}


def test_a_machine_that_cannot_be_measured_is_logged_and_has_no_measurement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = threading.Event()

    def fail() -> MachineUse:
        tried.set()
        raise PermissionError("no /proc")

    monkeypatch.setattr(machine_monitor, "measured", fail)
    with MachineMonitor(interval_s=0.001) as monitor:
        assert tried.wait(PATIENCE_S)
    assert monitor.last() is None
    assert caplog.text.count("this machine is not measured: no /proc") == 1
