"""What the machines of a run have in use, as metrics under MLflow's own names.

    heartbeats ──▶ system/{host}/cpu_utilization_percentage, …

Services measure their machines (`machine_monitor.py`), so they need no access to MLflow.
"""

import re
from collections.abc import Iterable, Iterator

from storage.records.control import Heartbeat
from storage.records.machine_use import MachineUse
from tasks.monitoring.status import is_alive
from tasks.tracking.mlflow_client import Point

MACHINES_MAX = 100
"""Machines of a run that have metrics: the first ones by name."""
HOST_MAX = 60
"""Characters of a machine's name."""
_NOT_IN_HOST = re.compile(r"[^A-Za-z0-9_.-]")
_MB = 1e6


def machine_points(
    beats: Iterable[Heartbeat], step: int, now_s: float, limit_s: float
) -> list[Point]:
    """Return the metrics of each machine with a fresh heartbeat: of one of them, if it has several.

    Args:
        step: of the points.
        limit_s: age after which a heartbeat is not fresh.
    """
    of_host: dict[str, MachineUse] = {}
    for beat in beats:
        if beat.machine is not None and is_alive(beat, now_s, limit_s):
            of_host.setdefault(_NOT_IN_HOST.sub("_", beat.host)[:HOST_MAX], beat.machine)
    return [
        Point(f"system/{host}/{name}", value, step, now_s)
        for host in sorted(of_host)[:MACHINES_MAX]
        for name, value in _metrics(of_host[host])
    ]


def _metrics(use: MachineUse) -> Iterator[tuple[str, float]]:
    yield "cpu_utilization_percentage", use.cpu_percent
    yield from _memory("system", use.memory_bytes, use.memory_total_bytes)
    for number, gpu in enumerate(use.gpus):
        if gpu.utilization_percent is not None:
            yield f"gpu_{number}_utilization_percentage", gpu.utilization_percent
        yield from _memory(f"gpu_{number}", gpu.memory_bytes, gpu.memory_total_bytes)


def _memory(what: str, used: float, total: float) -> Iterator[tuple[str, float]]:
    yield f"{what}_memory_usage_megabytes", used / _MB
    if total > 0:
        yield f"{what}_memory_usage_percentage", min(100 * used / total, 100.0)
