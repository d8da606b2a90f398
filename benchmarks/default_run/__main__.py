"""Measure CPU time and wall-clock of the default run by component, and the delay of its shards.

Starts `astraflow run` with a new stack (a fresh home, free ports), samples every process of the
stack once a second, and stops the stack. All shares are of the time between the first batch and the
last version, without installation, base models and the start of services.

The control plane is the Prefect server and its workers, the MLflow server, and the processes of the
supervisor (with the tracking) and of the dataflow (with the Prefect client and its part of the
store). A local store has no process: its work is done in the processes that call it. The live view,
`astraflow run` itself, is listed separately: a run does not need it.

CPU seconds hardly depend on the load of the machine; wall-clock seconds do, so the load average is
printed with them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx

from benchmarks import command_line
from benchmarks.default_run import figures, process_cpu, task_cost
from benchmarks.default_run.figures import CONTROL_PLANE, LIVE_VIEW
from benchmarks.default_run.process_cpu import Meter
from benchmarks.default_run.task_cost import TaskCost
from deployments.paths import Home
from deployments.servers import auth
from deployments.stack import environment, state, up_down
from deployments.stack.state import SERVER, Stack
from storage import layout
from storage.coordination import heartbeats
from storage.errors import AstraFlowError, NotFoundError
from storage.records.batches import Batch
from storage.records.control import Heartbeat
from storage.records.types import Json
from storage.run import batches, runs, shards
from storage.store import object_store
from storage.store.object_store import ObjectStore
from storage.weights import manifests
from tasks.recipes.run_config import RunConfig

RUN_ID = f"benchmark-{int(time.time())}"
SAMPLE_INTERVAL_S = 1.0
TIMEOUT_S = 1800.0
TARGET_SHARE = 0.10
ELSEWHERE = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "ASTRAFLOW_STORE")
"""Variables that would select other servers, removed from the environment of the run."""


@dataclass
class Observed:
    """Samples taken during the run."""

    meter: Meter
    beats: dict[tuple[str, float], list[Heartbeat]] = field(default_factory=dict)
    """(member, start of its attempt) → heartbeats, oldest first."""

    def sample(self, run: ObjectStore) -> None:
        self.meter.sample(time.time())
        for beat in heartbeats.readable(run):
            earlier = self.beats.setdefault((beat.id, beat.started_s), [])
            if not earlier or earlier[-1].beats != beat.beats:
                earlier.append(beat)


def play(home: Home, steps: int, seed: int) -> Observed:
    """Run the default recipe to its end; AstraFlowError with the end of its output if it fails."""
    home.create()
    log = home.logs / "benchmark.log"
    command = [sys.executable, "-m", "deployments.cli.app", "run", "--run-id", RUN_ID]
    command += ["--set", f"steps={steps}", "--set", f"seed={seed}"]
    inherited = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    with log.open("ab") as output:
        playing = subprocess.Popen(
            command,
            env={**inherited, "ASTRAFLOW_HOME": str(home.root)},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    observed = Observed(Meter(str(home.root), (playing.pid,)))
    run = object_store.open_store(home.store.as_uri()).sub(layout.run_prefix(RUN_ID))
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while playing.poll() is None:
            if time.monotonic() > deadline_s:
                raise AstraFlowError(
                    f"the run did not end within {TIMEOUT_S:.0f} s; {log} has its output"
                )
            observed.sample(run)
            time.sleep(SAMPLE_INTERVAL_S)
    finally:
        playing.kill()  # only the view; the run itself ends with the stack
    if playing.returncode:
        raise AstraFlowError(f"the run failed; the end of {log}:\n{log.read_text()[-2000:]}")
    return observed


def report(home: Home, observed: Observed) -> Json:
    """Return all printed numbers as JSON; the stack must still run."""
    run = runs.open_run(object_store.open_store(home.store.as_uri()), RUN_ID)
    config = RunConfig.model_validate(runs.read_run_config(run))
    made = [
        batches.read(run, policy, step)
        for policy in config.policies
        for step in range(1, config.steps + 1)
    ]
    last_s = [
        manifests.read_manifest(run, policy, config.steps).created_s for policy in config.policies
    ]
    start_s, end_s = figures.window(made, last_s)
    stack = state.load(home)
    if stack is None:
        raise AstraFlowError(
            f"{home.record} is missing: the stack was stopped during the benchmark"
        )
    started = {process.name: process.pid for process in stack.processes}
    latest = [beats[-1] for beats in observed.beats.values()]
    live_view = observed.meter.pids[0]
    names = figures.names_of(started, latest, live_view)
    cpu_s = process_cpu.spent(observed.meter.processes.values(), names, start_s, end_s)
    live_view_s = cpu_s.pop(LIVE_VIEW, 0.0)
    num_tasks = count_tasks(home, stack, start_s, end_s)
    environment.adopt(up_down.settings(home, stack))
    # Less output on the terminal only; the server gets all logs.
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "ERROR"
    cost = task_cost.measure(started[SERVER]) if SERVER in started else None
    finished_s = _finished_s(run, made)
    waits = figures.latency(finished_s, made)
    return {
        "cores": os.cpu_count(),
        "steps": config.steps,
        "seed": config.seed,
        "window_s": end_s - start_s,
        "whole_run_s": _ended_s(latest) - runs.read_run(run).created_s,
        "cores_busy": sum(cpu_s.values()) / (end_s - start_s),
        "cpu_s": dict(sorted(cpu_s.items(), key=lambda item: -item[1])),
        "share": process_cpu.shares(cpu_s),
        "control_plane_share": figures.control_plane_share(cpu_s),
        "live_view_cpu_s": live_view_s,
        "wall_clock_s": figures.wall_clocks(observed.beats, start_s, end_s),
        "shard_to_batch": asdict(waits) if waits else None,
        "ingest": _ingest_cost(num_tasks, cost, len(finished_s), len(made)),
    }


def count_tasks(home: Home, stack: Stack, start_s: float, end_s: float) -> int:
    """Count the ingest tasks that started between two times, on the Prefect server."""
    between = {"after_": _iso(start_s), "before_": _iso(end_s)}
    query = {"task_runs": {"name": {"like_": "ingest"}, "start_time": between}}
    headers = {"Authorization": auth.basic(auth.read_or_empty(home))}
    response = httpx.post(
        f"{stack.prefect_url}/task_runs/count", json=query, headers=headers, trust_env=False
    )
    return int(response.raise_for_status().json())


def _finished_s(run: ObjectStore, made: Sequence[Batch]) -> dict[int, float]:
    """Return order → end of its rollout, for every shard that a batch lists."""
    finished: dict[int, float] = {}
    for order in {order for batch in made for order in batch.shards}:
        try:
            finished[order] = shards.read(run, order).finished_s
        except NotFoundError:
            continue  # quarantined: a batch lists the order nevertheless
    return finished


def _ingest_cost(num_tasks: int, cost: TaskCost | None, num_shards: int, num_batches: int) -> Json:
    counts = {
        "num_tasks": num_tasks,
        "num_shards": num_shards,
        "tasks_per_batch": num_tasks / num_batches,
    }
    if cost is None:
        return counts
    per_batch_ms = cost.total_ms * num_tasks / num_batches
    return {
        **counts,
        **asdict(cost),
        "cpu_ms_per_batch": per_batch_ms,
        "tasks_per_cpu_s": 1000 / cost.total_ms,
    }


def _ended_s(latest: Sequence[Heartbeat]) -> float:
    return max(beat.beat_s for beat in latest if beat.kind == "supervisor")


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat()


def show(results: Json) -> None:
    """Print the report as tables."""
    print(
        f"default run: {results['steps']} steps, seed {results['seed']}; "
        f"{results['window_s']:.0f} s from the first batch to the last version, "
        f"{results['whole_run_s']:.0f} s in total; "
        f"{results['cores']} cores, {results['cores_busy']:.2f} of them busy with the run, "
        f"load average {results['load_before']:.1f} before and {results['load_after']:.1f} after"
    )
    print(f"\n{'component':18}{'CPU s':>9}{'share':>9}")
    for name, seconds in results["cpu_s"].items():
        plane = "  control plane" if name in CONTROL_PLANE else ""
        print(f"{name:18}{seconds:9.2f}{results['share'][name]:9.1%}{plane}")
    print(
        f"{'control plane':27}{results['control_plane_share']:9.1%}  (target: at most "
        f"{TARGET_SHARE:.0%})"
    )
    print(f"not included: {LIVE_VIEW} {results['live_view_cpu_s']:.2f} CPU s")
    print("\nwall-clock of each service, share of the window")
    for member, spans in results["wall_clock_s"].items():
        print(
            f"{member:20}"
            + "  ".join(
                f"{name} {seconds / results['window_s']:.1%}" for name, seconds in spans.items()
            )
        )
    if waits := results["shard_to_batch"]:
        print(
            f"\nfinished shard to batch: p50 {waits['p50_s']:.2f} s, p99 {waits['p99_s']:.2f} s, "
            f"at most {waits['max_s']:.2f} s, of {waits['num_shards']} shards"
        )
    ingest = results["ingest"]
    print(
        f"ingest: {ingest['num_tasks']} tasks for {ingest['num_shards']} shards, "
        f"{ingest['tasks_per_batch']:.2f} a batch"
    )
    if "client_ms" in ingest:
        print(
            f"an empty task costs {ingest['client_ms']:.1f} ms of CPU in the dataflow and "
            f"{ingest['server_ms']:.1f} ms in the server, "
            f"{ingest['tasks_per_cpu_s']:.0f} tasks a CPU second; "
            f"{ingest['cpu_ms_per_batch']:.1f} ms a batch"
        )


def run_in(root: Path, steps: int, seed: int) -> Json:
    """Run the benchmark in a home; its stack is always stopped at the end."""
    home = Home(root.resolve())
    load_before = os.getloadavg()[0]
    try:
        results = report(home, play(home, steps, seed))
        return {**results, "load_before": load_before, "load_after": os.getloadavg()[0]}
    finally:
        up_down.down(home, lambda words: None)


def main() -> None:
    arguments = parse()
    if arguments.home is None:
        with tempfile.TemporaryDirectory(prefix="astraflow-benchmark-") as root:
            results = run_in(Path(root), arguments.steps, arguments.seed)
    else:
        results = run_in(Path(arguments.home), arguments.steps, arguments.seed)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


def parse() -> argparse.Namespace:
    parser = command_line.parser("default_run", __doc__, "--steps 40 --home /tmp/benchmark --json")
    parser.add_argument(
        "--steps", type=int, default=80, help="training steps of each policy (default: 80)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument(
        "--home",
        metavar="DIR",
        help="folder of the stack, kept for the base models of later benchmarks "
        "(default: a temporary folder)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
