"""Measure every format in every setting, with processes on both sides of the link."""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ocean import figures, link
from benchmarks.ocean.figures import TARGET_S, VersionTimes
from benchmarks.ocean.link import ADDRESSES, FAR, HOME
from benchmarks.ocean.process import NamespaceProcess, running
from storage.records.types import Json

MIRRORS = {"no": (False,), "yes": (True,), "both": (False, True)}
WARM_UPS = {"anchor": 0, "delta": 2, "plain": 1}
"""Number of versions of each format that are not measured.

Version 0 is the warm-up of the anchors. A worker can reuse memory from the third delta after an
anchor.
"""
PORT = 9000
BUCKET = "ocean"
SERVICES = "benchmarks.ocean.services"


@dataclass(kw_only=True)
class Ocean:
    """The processes shared by all settings: both servers, and the trainer with its model."""

    settings: argparse.Namespace
    folder: Path
    home: NamespaceProcess
    near: NamespaceProcess
    trainer: NamespaceProcess
    counted: set[int]
    """The connections of earlier versions, by the port at their far end."""

    def cases(self, num_workers: int, has_mirror: bool) -> Iterator[Json]:
        """Measure every format in one setting, as one run."""
        run = f"{num_workers}-workers{'-mirror' if has_mirror else ''}"
        spec = {"home": _url(HOME), "mirror": _url(FAR) if has_mirror else "", "run": run}
        worker = {**spec, "role": "worker", "interval_s": self.settings.interval_s}
        with ExitStack() as stack:
            if has_mirror:
                stack.enter_context(running(FAR, SERVICES, json.dumps({**spec, "role": "mirror"})))
            workers = [
                stack.enter_context(running(FAR, SERVICES, json.dumps(worker)))
                for _ in range(num_workers)
            ]
            version = 0
            self._step(workers, run, version, "anchor", has_mirror)
            # Anchors first: version 0 was their warm-up. Plain last: after it, the workers' weights
            # have no manifest.
            for format in ("anchor", "delta", "plain"):
                if format not in self.settings.formats or (format == "plain" and has_mirror):
                    continue
                steps: list[VersionTimes] = []
                while len(steps) < self.settings.steps + WARM_UPS[format]:
                    version += 1
                    steps.append(self._step(workers, run, version, format, has_mirror))
                    self._delete(run, version - 1)
                yield figures.case(
                    {"format": format, "workers": num_workers, "mirror": has_mirror},
                    steps[-self.settings.steps :],
                )
        self._delete(run)

    def _delete(self, run: str, version: int | None = None) -> None:
        """Delete a version's data, which all workers have loaded, or a run, to free memory."""
        for server in ("home", "near"):
            folder = self.folder / server / BUCKET / run
            if version is None:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            for file in folder.glob(f"weights/*/{version:08d}/*.safetensors"):
                file.unlink()

    def _step(
        self,
        workers: Sequence[NamespaceProcess],
        run: str,
        version: int,
        format: str,
        has_mirror: bool,
    ) -> VersionTimes:
        """Publish a version, wait until all workers have loaded it, and return its times."""
        self._served()
        crossed = link.bytes_arrived()
        for worker in workers:
            worker.send(do="follow", version=version, format=format)
        draw = random.Random(f"{self.settings.seed} {run} {version}")
        time.sleep(
            self.settings.pause_s
            + draw.uniform(1, 1.5) * (self.settings.interval_s + 4 * self.settings.rtt_ms / 1e3)
        )
        cpu_before = psutil.cpu_times()
        published = self.trainer.call(run=run, version=version, format=format)
        loads = [worker.receive() for worker in workers]
        busy = figures.busy(cpu_before, psutil.cpu_times())
        crossed = link.bytes_arrived() - crossed
        start_s, published_s = published["start_s"], published["published_s"]
        at_home, near = self._served()
        visible_s = figures.mirrored_s(near, version) if has_mirror else published_s
        requests, connections = figures.over_the_ocean(at_home, start_s, self.counted)
        slowest = max(loads, key=lambda load: float(load["loaded_s"]))
        digests = {worker.call(do="digest")["digest"] for worker in workers}
        step = VersionTimes(
            seconds=slowest["loaded_s"] - start_s,
            stages=figures.stages(start_s, published_s, visible_s, slowest),
            bytes_crossed=crossed,
            requests=requests,
            connections=connections,
            trainer_cpu_s=published["cpu_s"],
            worker_cpu_s=slowest["cpu_s"],
            busy=busy,
            bit_exact=digests == {published["digest"]},
        )
        parts = " + ".join(f"{name} {seconds:.2f}" for name, seconds in step.stages.items())
        _log(f"{run}, version {version}, {format}: {step.seconds:.2f} s = {parts}")
        return step

    def _served(self) -> tuple[list[Any], list[Any]]:
        """Return the requests at home and at the mirror since the last call."""
        return self.home.call()["served"], self.near.call()["served"]


def measure(settings: argparse.Namespace) -> Json:
    """Measure all settings; return all printed numbers."""
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        stack.enter_context(link.emulated(settings.rtt_ms, settings.gbps, settings.wan))
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="astraflow-ocean-", dir=_in_memory())
            )
        )
        home, near = (
            stack.enter_context(
                running(namespace, "benchmarks.ocean.folder_s3", str(folder / name), str(PORT))
            )
            for namespace, name in ((HOME, "home"), (FAR, "near"))
        )
        elements = int(settings.model_gb * 1e9 / 2)
        _log(f"making a step of {elements:,} weights")
        model = {"elements": elements, "changed": settings.changed, "seed": settings.seed}
        spec = {"role": "trainer", "home": _url(HOME), **model}
        trainer = stack.enter_context(running(HOME, SERVICES, json.dumps(spec)))
        ocean = Ocean(
            settings=settings, folder=folder, home=home, near=near, trainer=trainer, counted=set()
        )
        cases = [
            case
            for has_mirror in MIRRORS[settings.mirror]
            for num_workers in settings.workers
            for case in ocean.cases(num_workers, has_mirror)
        ]
    return {
        "cases": cases,
        "target": {
            "seconds": TARGET_S,
            "met": [case["seconds"] <= TARGET_S for case in cases if case["format"] == "delta"],
        },
        "bit_exact": all(case["bit_exact"] for case in cases),
        "settings": shown(settings),
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "cpu": _cpu_name(),
            "load_before": load_before,
        },
    }


def shown(settings: argparse.Namespace) -> Json:
    """Return the settings as JSON."""
    return {**vars(settings), "wan": str(settings.wan)}


def _url(namespace: str) -> str:
    return f"s3://{BUCKET}?endpoint=http://{ADDRESSES[namespace]}:{PORT}"


def _in_memory() -> str | None:
    """Return a folder in memory for the servers' objects, so that no disk is the limit."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
