"""Compute stages, cases and the table of the ocean benchmark from its measurements; pure functions.

S3 servers' requests + workers' times ──▶ times of a version, its stages
versions of one format in one setting ──▶ case ──▶ table
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.ocean.link import ADDRESSES, FAR
from storage.records.types import Json

TARGET_S, TARGET_CHANGED = 2.0, 0.01
STAGES = ("publish", "mirror", "wait", "probe", "read")


@dataclass(frozen=True, kw_only=True)
class VersionTimes:
    """Times of one version; `seconds` are those of the slowest worker, `stages` their parts."""

    seconds: float
    stages: Mapping[str, float]
    bytes_crossed: int
    requests: int
    """Requests over the ocean since the start of publishing."""
    connections: int
    """New connections among them."""
    trainer_cpu_s: float
    worker_cpu_s: float
    """CPU seconds of the slowest worker from the end of its poll to the loaded version."""
    busy: float
    """Share of the machine's CPU time that was used."""
    bit_exact: bool


def stages(
    start_s: float, published_s: float, visible_s: float, worker: Mapping[str, float]
) -> dict[str, float]:
    """Split the time until a worker has loaded a version, visible in its region since `visible_s`.

    Example: published 1.0 s after the start, polled at 1.25, noticed at 1.5, loaded at 2.0: publish
    1.0, wait 0.25, probe 0.25, read 0.5. A poll that started before the version was visible has a
    probe and no wait.
    """
    # While the mirror lacks the version, the worker reads it from home.
    visible_s = min(max(visible_s, published_s), worker["noticed_s"])
    polled_s = max(worker["polled_s"], visible_s)
    times = (start_s, published_s, visible_s, polled_s, worker["noticed_s"], worker["loaded_s"])
    return {name: end - start for name, (start, end) in zip(STAGES, pairwise(times), strict=True)}


def over_the_ocean(
    served: Iterable[Sequence[Any]], start_s: float, counted: set[int]
) -> tuple[int, int]:
    """Count the far side's requests since `start_s`, and their connections not in `counted`.

    Adds all connections to `counted`.
    """
    far = [entry for entry in served if entry[3] == ADDRESSES[FAR]]
    requests = [entry for entry in far if entry[1] >= start_s]
    earlier = {entry[2] for entry in far if entry[1] < start_s}
    fresh = {entry[2] for entry in requests} - counted - earlier
    counted |= {entry[2] for entry in far}
    return len(requests), len(fresh)


def mirrored_s(served: Iterable[Sequence[Any]], version: int) -> float:
    """Return the time at which the mirror had a version's manifest; infinity if it does not."""
    end = f"/{version:08d}/manifest.json"
    return min(
        (entry[1] for entry in served if entry[4] == "PUT" and entry[5].endswith(end)),
        default=float("inf"),
    )


def busy(before: Any, after: Any) -> float:
    """Return the used share of the machine's CPU time between two `psutil.cpu_times()`."""
    spent = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("user", "system", "nice", "softirq", "irq", "idle")
    }
    whole = sum(spent.values())
    return float(1 - spent["idle"] / whole) if whole else 0.0


def case(settings: Mapping[str, Any], steps: Sequence[VersionTimes]) -> Json:
    """Return the median step of one format in one setting, and the seconds of every step."""
    median = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
    whole = {
        "seconds": median.seconds,
        "stages": dict(median.stages),
        "every_step_s": [step.seconds for step in steps],
        "bytes_crossed": median.bytes_crossed,
        "requests": median.requests,
        "connections_opened": median.connections,
        "trainer_cpu_s": median.trainer_cpu_s,
        "worker_cpu_s": median.worker_cpu_s,
        "machine_busy": median.busy,
        "bit_exact": all(step.bit_exact for step in steps),
    }
    return dict(settings) | whole


def table(report: Json) -> str:
    """Format the cases as a table."""
    settings, machine = report["settings"], report["machine"]
    lines = [
        f"{settings['model_gb']:g} GB of bf16, {settings['changed']:.2%} changed a step, "
        f"{settings['rtt_ms']:g} ms round trip, "
        f"{settings['gbps']:g} Gbit/s, a poll every {settings['interval_s']:g} s, median of "
        f"{settings['steps']}; "
        f"{machine['cpus']} cores of {machine['cpu']}, load average {machine['load_before']:.1f} "
        "before",
        "",
        f"{'format':8}{'workers':>8}{'mirror':>8}{'seconds':>9} "
        f"={' +'.join(f'{name:>8}' for name in STAGES)}"
        f"{'MB':>9}{'requests':>10}{'new':>5}{'CPU s':>7}{'busy':>6}",
    ]
    for row in report["cases"]:
        parts = " +".join(f"{row['stages'][name]:8.2f}" for name in STAGES)
        lines.append(
            f"{row['format']:8}{row['workers']:8}{'yes' if row['mirror'] else 'no':>8}"
            f"{row['seconds']:9.2f} ={parts}"
            f"{row['bytes_crossed'] / 1e6:9.1f}{row['requests']:10}{row['connections_opened']:5}"
            f"{row['worker_cpu_s']:7.2f}{row['machine_busy']:6.0%}"
        )
    deltas = [row["seconds"] for row in report["cases"] if row["format"] == "delta"]
    if deltas and settings["changed"] <= TARGET_CHANGED:
        met = sum(report["target"]["met"])
        lines += [
            "",
            f"a delta within {TARGET_S:g} s: {met} of {len(deltas)} settings, {min(deltas):.2f} to "
            f"{max(deltas):.2f} s",
        ]
    lines += [
        "",
        "MB, requests and new connections: over the ocean; CPU s: of one worker, from the end of "
        "its poll to the loaded version",
        f"bit exact: {report['bit_exact']}",
    ]
    return "\n".join(lines)
