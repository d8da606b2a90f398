"""Figures of the ocean from what its processes told: a step and its stages, a case, the table.
Pure: nothing is run, read or printed here.

    S3 servers' requests + workers' times ──▶ Step, its stages      steps of one format in one setting ──▶ case ──▶ table
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
    """One version on its way to all workers. `seconds` are those of the slowest, `stages` their
    parts.
    """

    seconds: float
    stages: Mapping[str, float]
    bytes_crossed: int
    requests: int
    """Over the ocean, from publishing on."""
    connections: int
    """Of these requests', the connections that were new."""
    trainer_cpu_s: float
    worker_cpu_s: float
    """From noticing to holding, of the slowest worker."""
    busy: float
    """Share of the machine's CPU time that somebody used."""
    bit_exact: bool


def stages(
    start_s: float, published_s: float, shown_s: float, worker: Mapping[str, float]
) -> dict[str, float]:
    """The parts of the time until one worker holds a version that its region's store shows since
    `shown_s`.

    Example: published 1.0 s after the start, looked for at 1.25, noticed at 1.5, held at 2.0:
    publish 1.0, wait 0.25, probe 0.25, read 0.5. A look that began before the version was there is
    all probe.
    """
    shown_s = min(
        max(shown_s, published_s), worker["noticed_s"]
    )  # a mirror that lags is passed over
    looked_s = max(worker["looked_s"], shown_s)
    times = (start_s, published_s, shown_s, looked_s, worker["noticed_s"], worker["held_s"])
    return {name: end - start for name, (start, end) in zip(STAGES, pairwise(times), strict=True)}


def over_the_ocean(
    served: Iterable[Sequence[Any]], start_s: float, known: set[int]
) -> tuple[int, int]:
    """How many of a server's requests came from the far side since `start_s`, and on how many
    connections not yet `known`.
    """
    far = [entry for entry in served if entry[3] == ADDRESSES[FAR]]
    requests = [entry for entry in far if entry[1] >= start_s]
    fresh = (
        {entry[2] for entry in requests} - known - {entry[2] for entry in far if entry[1] < start_s}
    )
    known |= {entry[2] for entry in far}
    return len(requests), len(fresh)


def mirrored_s(served: Iterable[Sequence[Any]], version: int) -> float:
    """When a version's manifest stood in the mirror; never, for one that is not there yet."""
    end = f"/{version:08d}/manifest.json"
    return min(
        (entry[1] for entry in served if entry[4] == "PUT" and entry[5].endswith(end)),
        default=float("inf"),
    )


def busy(before: Any, after: Any) -> float:
    """The share of the machine's CPU time between two `psutil.cpu_times()` that somebody used."""
    spent = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("user", "system", "nice", "softirq", "irq", "idle")
    }
    whole = sum(spent.values())
    return float(1 - spent["idle"] / whole) if whole else 0.0


def case(settings: Mapping[str, Any], steps: Sequence[VersionTimes]) -> Json:
    """What is printed of one format in one setting: all of the median step, and the seconds of
    every step.
    """
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


def table(found: Json) -> str:
    """The cases as lines for a person."""
    settings, machine = found["settings"], found["machine"]
    lines = [
        f"{settings['model_gb']:g} GB of bf16, {settings['changed']:.2%} changed a step, "
        f"{settings['rtt_ms']:g} ms round trip, "
        f"{settings['gbps']:g} Gbit/s, a look every {settings['interval_s']:g} s, median of "
        f"{settings['steps']}; "
        f"{machine['cpus']} cores of {machine['cpu']}, load average {machine['load_before']:.1f} "
        "before",
        "",
        f"{'format':8}{'workers':>8}{'mirror':>8}{'seconds':>9} "
        f"={' +'.join(f'{name:>8}' for name in STAGES)}"
        f"{'MB':>9}{'requests':>10}{'new':>5}{'CPU s':>7}{'busy':>6}",
    ]
    for one in found["cases"]:
        parts = " +".join(f"{one['stages'][name]:8.2f}" for name in STAGES)
        lines.append(
            f"{one['format']:8}{one['workers']:8}{'yes' if one['mirror'] else 'no':>8}{one['seconds']:9.2f} ={parts}"
            f"{one['bytes_crossed'] / 1e6:9.1f}{one['requests']:10}{one['connections_opened']:5}"
            f"{one['worker_cpu_s']:7.2f}{one['machine_busy']:6.0%}"
        )
    deltas = [one["seconds"] for one in found["cases"] if one["format"] == "delta"]
    if deltas and settings["changed"] <= TARGET_CHANGED:
        met = sum(found["target"]["met"])
        lines += [
            "",
            f"a delta within {TARGET_S:g} s: {met} of {len(deltas)} settings, {min(deltas):.2f} to "
            f"{max(deltas):.2f} s",
        ]
    lines += [
        "",
        "MB, requests and new connections: over the ocean; CPU s: of one worker, from noticing to "
        "holding",
        f"bit exact: {found['bit_exact']}",
    ]
    return "\n".join(lines)
