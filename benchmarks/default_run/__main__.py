"""Where the CPU time and the wall-clock of the default run go, and how long a finished shard waits
for its batch.

Starts `astraflow run` with a stack of its own (a fresh home, free ports), looks at every process of
the stack once a second, and stops the stack again. All shares are of the time between the first
batch and the last version: what installation, the base models and the start of services cost is not
in them.

What counts as control plane: the Prefect server and its workers, the MLflow server, and the whole
processes of the supervisor (with the tracking) and of the dataflow (with the Prefect client and its
part of the store). The store has no process of its own here; the rest of its work is done inside
the processes that call it. The live view, `astraflow run` itself, is listed beside the shares and
is no part of them: a run goes on without it.

CPU seconds hardly depend on what else the machine does; the wall-clock numbers do, so the load
average is printed with them.
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
LOOK_INTERVAL_S = 1.0
TIMEOUT_S = 1800.0
TARGET_SHARE = 0.10
ELSEWHERE = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "ASTRAFLOW_STORE")
"""Variables that would make the run use somebody else's servers."""


@dataclass
class Observed:
    """What was seen while the run went on."""

    meter: Meter
    beats: dict[tuple[str, float], list[Heartbeat]] = field(default_factory=dict)
    """(member, start of its attempt) → what it said of itself, oldest first."""

    def look(self, run: ObjectStore) -> None:
        self.meter.look(time.time())
        for beat in heartbeats.read_all(run):
            said = self.beats.setdefault((beat.id, beat.started_s), [])
            if not said or said[-1].beats != beat.beats:
                said.append(beat)


def play(home: Home, steps: int, seed: int) -> Observed:
    """Runs the default recipe to its end. Raises AstraFlowError with the end of what it printed
    when it fails.
    """
    home.create()
    log = home.logs / "benchmark.log"
    command = [sys.executable, "-m", "deployments.cli.app", "run", "--run-id", RUN_ID]
    command += ["--set", f"steps={steps}", "--set", f"seed={seed}"]
    own = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    with log.open("ab") as output:
        playing = subprocess.Popen(
            command,
            env={**own, "ASTRAFLOW_HOME": str(home.root)},
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
            observed.look(run)
            time.sleep(LOOK_INTERVAL_S)
    finally:
        playing.kill()  # only the view; the run itself ends with the stack
    if playing.returncode:
        raise AstraFlowError(f"the run failed; the end of {log}:\n{log.read_text()[-2000:]}")
    return observed


def report(home: Home, observed: Observed) -> Json:
    """Everything that is printed, as JSON. The stack must still run."""
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
    standing = state.load(home)
    if standing is None:
        raise AstraFlowError(f"{home.record} is gone: the stack was stopped under the benchmark")
    started = {process.name: process.pid for process in standing.processes}
    latest = [said[-1] for said in observed.beats.values()]
    live_view = observed.meter.pids[0]
    names = figures.names_of(started, latest, live_view)
    cpu_s = process_cpu.spent(observed.meter.seen.values(), names, start_s, end_s)
    live_view_s = cpu_s.pop(LIVE_VIEW, 0.0)
    num_tasks = count_tasks(home, standing, start_s, end_s)
    environment.adopt(up_down.settings(home, standing))
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = (
        "ERROR"  # only on the terminal; the server is told as ever
    )
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
        "take_in": _take_in(num_tasks, cost, len(finished_s), len(made)),
    }


def count_tasks(home: Home, standing: Stack, start_s: float, end_s: float) -> int:
    """How many take-in tasks the server saw start between two times."""
    between = {"after_": _iso(start_s), "before_": _iso(end_s)}
    wanted = {"task_runs": {"name": {"like_": "take in"}, "start_time": between}}
    headers = {"Authorization": auth.basic(auth.read_or_empty(home))}
    answer = httpx.post(
        f"{standing.prefect_url}/task_runs/count", json=wanted, headers=headers, trust_env=False
    )
    return int(answer.raise_for_status().json())


def _finished_s(run: ObjectStore, made: Sequence[Batch]) -> dict[int, float]:
    """order → end of its play, of every shard that a batch took in."""
    finished: dict[int, float] = {}
    for order in {order for batch in made for order in batch.shards}:
        try:
            finished[order] = shards.read(run, order).finished_s
        except NotFoundError:
            continue  # quarantined: a batch counts the order as taken in all the same
    return finished


def _take_in(num_tasks: int, cost: TaskCost | None, num_shards: int, num_batches: int) -> Json:
    known = {
        "num_tasks": num_tasks,
        "num_shards": num_shards,
        "tasks_per_batch": num_tasks / num_batches,
    }
    if cost is None:
        return known
    per_batch_ms = cost.total_ms * num_tasks / num_batches
    return {
        **known,
        **asdict(cost),
        "cpu_ms_per_batch": per_batch_ms,
        "tasks_per_cpu_s": 1000 / cost.total_ms,
    }


def _ended_s(latest: Sequence[Heartbeat]) -> float:
    return max(beat.beat_s for beat in latest if beat.kind == "supervisor")


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat()


def show(found: Json) -> None:
    """The report as tables."""
    print(
        f"default run: {found['steps']} steps, seed {found['seed']}; {found['window_s']:.0f} s "
        "from the first batch to the "
        f"last version, {found['whole_run_s']:.0f} s in all; {found['cores']} cores, "
        f"{found['cores_busy']:.2f} "
        f"of them busy with the run, load average {found['load_before']:.1f} before and "
        f"{found['load_after']:.1f} after"
    )
    print(f"\n{'component':18}{'CPU s':>9}{'share':>9}")
    for name, seconds in found["cpu_s"].items():
        print(
            f"{name:18}{seconds:9.2f}{found['share'][name]:9.1%}{'  control plane' if name in CONTROL_PLANE else ''}"
        )
    print(
        f"{'control plane':27}{found['control_plane_share']:9.1%}  (target: at most "
        f"{TARGET_SHARE:.0%})"
    )
    print(f"beside it: {LIVE_VIEW} {found['live_view_cpu_s']:.2f} CPU s")
    print("\nwall-clock of each service, share of the window")
    for member, spans in found["wall_clock_s"].items():
        print(
            f"{member:20}"
            + "  ".join(
                f"{name} {seconds / found['window_s']:.1%}" for name, seconds in spans.items()
            )
        )
    if waits := found["shard_to_batch"]:
        print(
            f"\nfinished shard to batch: p50 {waits['p50_s']:.2f} s, p99 {waits['p99_s']:.2f} s, "
            f"at most {waits['max_s']:.2f} s, of {waits['num_shards']} shards"
        )
    take_in = found["take_in"]
    print(
        f"take-in: {take_in['num_tasks']} tasks for {take_in['num_shards']} shards, "
        f"{take_in['tasks_per_batch']:.2f} a batch"
    )
    if "client_ms" in take_in:
        print(
            f"an empty task costs {take_in['client_ms']:.1f} ms of CPU in the dataflow and "
            f"{take_in['server_ms']:.1f} ms "
            f"in the server, {take_in['tasks_per_cpu_s']:.0f} tasks a CPU second; "
            f"{take_in['cpu_ms_per_batch']:.1f} ms a batch"
        )


def run_in(root: Path, steps: int, seed: int) -> Json:
    """The whole benchmark in a home; its stack is stopped at the end, come what may."""
    home = Home(root.resolve())
    load_before = os.getloadavg()[0]
    try:
        found = report(home, play(home, steps, seed))
        return {**found, "load_before": load_before, "load_after": os.getloadavg()[0]}
    finally:
        up_down.down(home, lambda words: None)


def main() -> None:
    arguments = parse()
    if arguments.home is None:
        with tempfile.TemporaryDirectory(prefix="astraflow-benchmark-") as root:
            found = run_in(Path(root), arguments.steps, arguments.seed)
    else:
        found = run_in(Path(arguments.home), arguments.steps, arguments.seed)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


def parse() -> argparse.Namespace:
    parser = command_line.parser("default_run", __doc__, "--steps 40 --home /tmp/benchmark --json")
    parser.add_argument(
        "--steps", type=int, default=80, help="training steps of each policy (default: 80)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument(
        "--home",
        metavar="DIR",
        help="folder of the stack, kept afterwards, so that a second benchmark finds the base models there "
        "(default: a temporary folder)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
