"""From publishing to serving over an emulated ocean: seconds until every worker of a region holds a new version, verified.

    astra-home: trainer ─▶ S3 server ═══ 300 ms, 4 Gbit/s ═══▶ astra-far: workers, or S3 server of the mirror ─▶ workers

The clock starts when the trainer has the new tensors in hand and ends when the last worker holds the version in memory with
every digest checked. In between, of the slowest worker of the median step:

    publish   encode, upload, commit the manifest
    mirror    until the region's mirror shows the version too (with a mirror only)
    wait      until the look that finds it begins: the rest of a look in vain, and the pause of --interval-s after it, as in a
              rollout worker's refresher
    probe     that look, from the moment that the version is there
    read      fetch the manifest and the files, apply, check

`delta` is a step's changes, `anchor` the whole model, which is all there is without deltas; `plain` is what AstraFlow's paper
sends, 6 bytes a change as two plain objects, by the same client. The first versions of each format in each setting are not
measured: compiled loops are loaded, connections stand, memory is there to be reused. The client closes a connection that was
idle for 12 s; a worker's looks go over its connections in turn and keep some of them open, and --pause-s shows what a longer
step leaves (`new`). The steps are made up (benchmarks/weight_steps.py), back and forth between two states of a model. The S3
servers are benchmarks/folder_s3.py.

Needs Linux, root and a way to delay packets: netem in the kernel, or a script (--wan) that makes the two namespaces. Servers,
workers and the emulated link share this machine: where `busy` nears 100 %, the machine is measured and not the ocean.
"""

import argparse
import json
import os
import platform
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks import ocean_link
from benchmarks.ocean_link import ADDRESSES, FAR, HOME, LinkError
from storage.records import Json

TARGET_S, TARGET_CHANGED = 2.0, 0.01
MIRRORS = {"no": (False,), "yes": (True,), "both": (False, True)}
WARM_UPS = {"anchor": 0, "delta": 2, "plain": 1}
"""Versions of each format that are not measured. Version 0 is one for the anchors; a worker has memory to reuse from the
third delta on after an anchor."""
FORMATS = ("delta", "anchor", "plain")
STAGES = ("publish", "mirror", "wait", "probe", "read")
PORT = 9000
BUCKET = "ocean"
ANSWER_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Step:
    """One version on its way to all workers. `seconds` are those of the slowest, `stages` their parts."""

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


def stages(start_s: float, published_s: float, shown_s: float, worker: Mapping[str, float]) -> dict[str, float]:
    """The parts of the time until one worker holds a version that its region's store shows since `shown_s`.

    Example: published 1.0 s after the start, looked for at 1.25, noticed at 1.5, held at 2.0: publish 1.0, wait 0.25,
    probe 0.25, read 0.5. A look that began before the version was there is all probe.
    """
    shown_s = min(max(shown_s, published_s), worker["noticed_s"])  # a mirror that lags is passed over
    looked_s = max(worker["looked_s"], shown_s)
    times = (start_s, published_s, shown_s, looked_s, worker["noticed_s"], worker["held_s"])
    return {name: end - start for name, (start, end) in zip(STAGES, pairwise(times), strict=True)}


def case(settings: Mapping[str, Any], steps: Sequence[Step]) -> Json:
    """What is printed of one format in one setting: all of the median step, and the seconds of every step."""
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


def over_the_ocean(served: Iterable[Sequence[Any]], start_s: float, known: set[int]) -> tuple[int, int]:
    """How many of a server's requests came from the far side since `start_s`, and on how many connections not yet `known`."""
    far = [entry for entry in served if entry[3] == ADDRESSES[FAR]]
    requests = [entry for entry in far if entry[1] >= start_s]
    fresh = {entry[2] for entry in requests} - known - {entry[2] for entry in far if entry[1] < start_s}
    known |= {entry[2] for entry in far}
    return len(requests), len(fresh)


class Process:
    """A process of the benchmark in one of the namespaces, asked and answering in lines of JSON."""

    def __init__(self, namespace: str, module: str, arguments: Sequence[str]) -> None:
        command = ocean_link.inside(namespace, [sys.executable, "-m", module, *arguments])
        self._name = f"{module} in {namespace}"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(), start_new_session=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise LinkError(f"{self._name} ended; what it said stands above") from None

    def answer(self) -> Json:
        try:
            line = self._lines.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise LinkError(f"{self._name} did not answer within {ANSWER_TIMEOUT_S:.0f} s") from None
        if not line:
            raise LinkError(f"{self._name} ended; what it said stands above")
        answer: Json = json.loads(line)
        return answer

    def ask(self, **order: Any) -> Json:
        self.tell(**order)
        return self.answer()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, ""):
            self._lines.put(line)
        self._lines.put("")


@dataclass
class Ocean:
    """What all settings share: both servers, the trainer and its model."""

    settings: argparse.Namespace
    folder: Path
    home: Process
    near: Process
    trainer: Process
    known: set[int]
    """Connections seen so far, by the port at their far end."""

    def cases(self, num_workers: int, has_mirror: bool) -> Iterator[Json]:
        """Every format in one setting, in a run of its own."""
        run = f"{num_workers}-workers{'-mirror' if has_mirror else ''}"
        spec = {"home": _url(HOME), "mirror": _url(FAR) if has_mirror else "", "run": run}
        worker = {**spec, "role": "worker", "interval_s": self.settings.interval_s}
        with ExitStack() as stack:
            if has_mirror:
                _started(stack, FAR, "benchmarks.ocean_services", [json.dumps({**spec, "role": "mirror"})])
            workers = [_started(stack, FAR, "benchmarks.ocean_services", [json.dumps(worker)]) for _ in range(num_workers)]
            version = 0
            self._step(workers, run, version, "anchor", has_mirror)
            # Anchors first: version 0 has warmed them up. Plain last: what is held afterwards has no manifest.
            for format in ("anchor", "delta", "plain"):
                if format not in self.settings.formats or (format == "plain" and has_mirror):
                    continue
                steps: list[Step] = []
                while len(steps) < self.settings.steps + WARM_UPS[format]:
                    version += 1
                    steps.append(self._step(workers, run, version, format, has_mirror))
                    self._forget(run, version - 1)
                yield case({"format": format, "workers": num_workers, "mirror": has_mirror}, steps[-self.settings.steps :])
        self._forget(run)

    def _forget(self, run: str, version: int | None = None) -> None:
        """Delete a version's data, which all workers hold, or all of a run: memory is short where everybody shares it."""
        for server in ("home", "near"):
            place = self.folder / server / BUCKET / run
            if version is None:
                shutil.rmtree(place, ignore_errors=True)
                continue
            for file in place.glob(f"weights/*/{version:08d}/*.safetensors"):
                file.unlink()

    def _step(self, workers: Sequence[Process], run: str, version: int, format: str, has_mirror: bool) -> Step:
        self._served()
        crossed = ocean_link.bytes_arrived()
        for worker in workers:
            worker.tell(do="follow", version=version, format=format)
        draw = random.Random(f"{self.settings.seed} {run} {version}")
        time.sleep(self.settings.pause_s + draw.uniform(1, 1.5) * (self.settings.interval_s + 4 * self.settings.rtt_ms / 1e3))
        cpu_before = psutil.cpu_times()
        published = self.trainer.ask(run=run, version=version, format=format, compact=self.settings.compact)
        held = [worker.answer() for worker in workers]
        busy = _busy(cpu_before, psutil.cpu_times())
        crossed = ocean_link.bytes_arrived() - crossed
        start_s, published_s = published["start_s"], published["published_s"]
        at_home, near = self._served()
        shown_s = _shown(near, version) if has_mirror else published_s
        requests, connections = over_the_ocean(at_home, start_s, self.known)
        slowest = max(held, key=lambda worker: float(worker["held_s"]))
        digests = {worker.ask(do="digest")["digest"] for worker in workers}
        step = Step(
            seconds=slowest["held_s"] - start_s,
            stages=stages(start_s, published_s, shown_s, slowest),
            bytes_crossed=crossed,
            requests=requests,
            connections=connections,
            trainer_cpu_s=published["cpu_s"],
            worker_cpu_s=slowest["cpu_s"],
            busy=busy,
            bit_exact=digests == {published["digest"]},
        )
        parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in step.stages.items())
        _say(f"{run}, version {version}, {format}: {step.seconds:.2f} s = {parts}")
        return step

    def _served(self) -> tuple[list[Any], list[Any]]:
        """Requests at home and at the mirror since the last time."""
        return self.home.ask()["served"], self.near.ask()["served"]


def _shown(served: Iterable[Sequence[Any]], version: int) -> float:
    """When a version's manifest stood in the mirror; never, for one that is not there yet."""
    end = f"/{version:08d}/manifest.json"
    return min((entry[1] for entry in served if entry[4] == "PUT" and entry[5].endswith(end)), default=float("inf"))


def measure(settings: argparse.Namespace) -> Json:
    """Everything that is printed."""
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        stack.enter_context(ocean_link.link(settings.rtt_ms, settings.gbps, settings.wan))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="astraflow-ocean-", dir=_in_memory())))
        home, near = (
            _started(stack, namespace, "benchmarks.folder_s3", [str(folder / name), str(PORT)])
            for namespace, name in ((HOME, "home"), (FAR, "near"))
        )
        elements = int(settings.model_gb * 1e9 / 2)
        _say(f"making a step of {elements:,} weights")
        model = {"elements": elements, "changed": settings.changed, "seed": settings.seed}
        trainer = {"role": "trainer", "home": _url(HOME), **model}
        ocean = Ocean(
            settings, folder, home, near, _started(stack, HOME, "benchmarks.ocean_services", [json.dumps(trainer)]), set()
        )
        cases = [
            found
            for has_mirror in MIRRORS[settings.mirror]
            for num_workers in settings.workers
            for found in ocean.cases(num_workers, has_mirror)
        ]
    return {
        "cases": cases,
        "target": {"seconds": TARGET_S, "met": [found["seconds"] <= TARGET_S for found in cases if found["format"] == "delta"]},
        "bit_exact": all(found["bit_exact"] for found in cases),
        "settings": shown(settings),
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "cpu": _cpu_name(), "load_before": load_before},
    }


def shown(settings: argparse.Namespace) -> Json:
    """The settings as JSON has them."""
    return {**vars(settings), "wan": str(settings.wan)}


def _started(stack: ExitStack, namespace: str, module: str, arguments: Sequence[str]) -> Process:
    """A process that has said it is ready and is stopped with the block."""
    process = Process(namespace, module, arguments)
    stack.callback(process.stop)
    process.answer()
    return process


def _url(namespace: str) -> str:
    return f"s3://{BUCKET}?endpoint=http://{ADDRESSES[namespace]}:{PORT}"


def _environment() -> dict[str, str]:
    """For the processes: keys that the servers do not check, and no proxy between the namespaces."""
    keys = {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**os.environ, **keys, "NO_PROXY": "*", "no_proxy": "*"}


def _busy(before: Any, after: Any) -> float:
    spent = {
        name: getattr(after, name) - getattr(before, name) for name in ("user", "system", "nice", "softirq", "irq", "idle")
    }
    whole = sum(spent.values())
    return float(1 - spent["idle"] / whole) if whole else 0.0


def _in_memory() -> str | None:
    """Where the servers keep their objects: a disk that cannot keep up would be measured in the ocean's place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(found: Json) -> str:
    """The cases as lines for a person."""
    settings, machine = found["settings"], found["machine"]
    lines = [
        f"{settings['model_gb']:g} GB of bf16, {settings['changed']:.2%} changed a step, {settings['rtt_ms']:g} ms round trip, "
        f"{settings['gbps']:g} Gbit/s, a look every {settings['interval_s']:g} s, median of {settings['steps']}; "
        f"{machine['cpus']} cores of {machine['cpu']}, load average {machine['load_before']:.1f} before",
        "",
        f"{'format':8}{'workers':>8}{'mirror':>8}{'seconds':>9} ={' +'.join(f'{name:>8}' for name in STAGES)}"
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
            f"a delta within {TARGET_S:g} s: {met} of {len(deltas)} settings, {min(deltas):.2f} to {max(deltas):.2f} s",
        ]
    lines += [
        "",
        "MB, requests and new connections: over the ocean; CPU s: of one worker, from noticing to holding",
        f"bit exact: {found['bit_exact']}",
    ]
    return "\n".join(lines)


@contextmanager
def _terminable() -> Iterator[None]:
    """A termination unwinds like Ctrl-C, so that processes and namespaces go."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    settings = parse(sys.argv[1:])
    try:
        with _terminable():
            found = measure(settings)
    except LinkError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(found, indent=2) if settings.json else table(found))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ocean",
        description=__doc__,
        epilog="example: python -m benchmarks.ocean --model-gb 0.1 --workers 1 --formats delta",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-gb", type=_positive, default=1.0, help="size of the model in bf16 (default: 1.0)")
    parser.add_argument(
        "--changed", type=_positive, default=0.01, help="share of its weights that a step changes (default: 0.01)"
    )
    parser.add_argument("--workers", type=_counts, default="1,4", help="numbers of workers in the region (default: 1,4)")
    parser.add_argument("--mirror", choices=MIRRORS, default="both", help="whether the region has one (default: both)")
    parser.add_argument("--formats", type=_formats, default=",".join(FORMATS), help=f"default: {','.join(FORMATS)}")
    parser.add_argument("--compact", action="store_true", help="publish compact deltas: fewer bytes for more CPU time")
    parser.add_argument("--rtt-ms", type=_positive, default=300.0, help="round trip of the ocean (default: 300)")
    parser.add_argument("--gbps", type=_positive, default=4.0, help="its width, each way (default: 4)")
    parser.add_argument("--interval-s", type=_positive, default=0.2, help="pause between a worker's looks (default: 0.2)")
    parser.add_argument("--steps", type=int, default=3, help="versions measured in each case; their median counts (default: 3)")
    parser.add_argument("--pause-s", type=float, default=0.0, help="time without a version before each one (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    parser.add_argument(
        "--wan", type=Path, default=Path("../shared/tools/wan/wan.sh"), metavar="PATH",
        help="script that makes the namespaces where the kernel has no netem: `up ONEWAY_MS GBPS QUEUE_MB`, `down` "
        "(default: ../shared/tools/wan/wan.sh)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    settings = parser.parse_args(arguments)
    if not settings.changed < 1:
        parser.error(f"--changed {settings.changed} is no share below 1")
    if settings.steps < 1:
        parser.error("--steps must be at least 1")
    return settings


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text} holds a number below 1")
    return counts


def _formats(text: str) -> list[str]:
    formats = text.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(FORMATS)}")
    return formats


if __name__ == "__main__":
    main()
