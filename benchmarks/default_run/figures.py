"""Compute CPU shares, wall-clock and shard delays of a run from its samples; pure functions.

stack's pids + heartbeats' pids ──▶ component of a process
heartbeats' `seconds` ────────────▶ wall-clock of each member
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.default_run import process_cpu
from benchmarks.default_run.process_cpu import Series
from deployments.stack.state import MLFLOW, SERVER
from storage.records.batches import Batch
from storage.records.control import Heartbeat

LIVE_VIEW = "live view"
OF_KIND: Mapping[str, str] = {
    "supervisor": "supervisor",
    "dataflow": "dataflow",
    "trainer": "trainers",
    "trainer_node": "trainers",
    "rollout": "rollout workers",
    "evaluation": "evaluation",
    "mirror": "mirrors",
    "base_model": "base model",
}
CONTROL_PLANE = (
    "Prefect server",
    "Prefect workers",
    "MLflow server",
    "supervisor",
    "dataflow",
    process_cpu.OTHER,
)


@dataclass(frozen=True)
class Latency:
    """Seconds from a finished shard to the first batch that lists it."""

    p50_s: float
    p99_s: float
    max_s: float
    num_shards: int


def latency(finished_s: Mapping[int, float], made: Sequence[Batch]) -> Latency | None:
    """Compute the latency of all shards that a batch lists; None when there are none.

    `finished_s`: order → end of its rollout.
    """
    first: dict[int, float] = {}
    for batch in sorted(made, key=lambda batch: batch.created_s):
        for order in batch.shards:
            first.setdefault(order, batch.created_s)
    waits = [
        created_s - finished_s[order] for order, created_s in first.items() if order in finished_s
    ]
    if not waits:
        return None
    return Latency(
        float(np.quantile(waits, 0.5)), float(np.quantile(waits, 0.99)), max(waits), len(waits)
    )


def window(made: Sequence[Batch], last_versions_s: Sequence[float]) -> tuple[float, float]:
    """Return (start, end) in Unix seconds: the first batch, the last version of any policy."""
    return min(batch.created_s for batch in made), max(last_versions_s)


def wall_clock(beats: Sequence[Heartbeat], start_s: float, end_s: float) -> dict[str, float]:
    """Return the seconds of one attempt in each of its components between two times."""
    names = sorted({name for beat in beats for name in beat.seconds if name != "cpu"})
    if not beats:
        return {}

    def series(name: str) -> Series:
        return [
            (beats[0].started_s, 0.0),
            *((beat.beat_s, beat.seconds.get(name, 0.0)) for beat in beats),
        ]

    return {name: process_cpu.between(series(name), start_s, end_s) for name in names}


def control_plane_share(cpu_s: Mapping[str, float]) -> float:
    """Return the control plane's share of the CPU time of all components."""
    whole = sum(cpu_s.values())
    return sum(cpu_s.get(name, 0.0) for name in CONTROL_PLANE) / whole if whole else 0.0


def wall_clocks(
    beats: Mapping[tuple[str, float], Sequence[Heartbeat]], start_s: float, end_s: float
) -> dict[str, dict[str, float]]:
    """Return member → component → seconds between two times, summed over its attempts."""
    members: dict[str, dict[str, float]] = {}
    for (member, _), of_attempt in sorted(beats.items()):
        totals = members.setdefault(member, {})
        for name, seconds in wall_clock(of_attempt, start_s, end_s).items():
            totals[name] = totals.get(name, 0.0) + seconds
    return {member: totals for member, totals in members.items() if any(totals.values())}


def names_of(
    stack_processes: Mapping[str, int], beats: Sequence[Heartbeat], live_view: int
) -> dict[int, str]:
    """Return pid → component for the stack's processes and for members, by their heartbeats."""
    names = dict.fromkeys(stack_processes.values(), "Prefect workers")
    names |= {
        stack_processes[process]: name
        for process, name in ((SERVER, "Prefect server"), (MLFLOW, "MLflow server"))
        if process in stack_processes
    }
    names |= {beat.pid: OF_KIND[beat.kind] for beat in beats}
    return names | {live_view: LIVE_VIEW}
