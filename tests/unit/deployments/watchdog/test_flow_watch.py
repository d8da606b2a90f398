import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.stack import processes
from deployments.stack.processes import Process
from deployments.watchdog.flow_watch import (
    ORPHAN_GRACE_S,
    REPORTS_MAX,
    RETRY_S,
    WORKER_GRACE_S,
    FlowWatch,
)
from tasks.supervision.flow_processes import MARK
from tests.support.patience import until

FLOW_RUN = "5f3c21aa-0000-4000-8000-000000000001"
WORKER = """
import os, subprocess, sys, time
inner = "import subprocess, sys, time; " \\
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']); time.sleep(3600)"
env = {**os.environ, "PREFECT__FLOW_RUN_ID": sys.argv[1]}
child = subprocess.Popen([sys.executable, "-c", inner], env=env)
print(child.pid, flush=True)
child.wait()
time.sleep(3600)
"""
"""A worker with one flow run, whose process has a child of its own."""


class Worker:
    def __init__(self, folder: Path, flow_run: str) -> None:
        self.log = folder / f"{flow_run}.log"
        self.process: Process = processes.start(
            "worker-control",
            [sys.executable, "-c", WORKER, flow_run],
            {**os.environ, processes.MARK: str(folder)},
            self.log,
            folder,
        )
        until(lambda: self.log.read_text().splitlines()[-1].isdigit())
        self.flow_pid = int(self.log.read_text().splitlines()[-1])
        until(lambda: flow_run.encode() in Path(f"/proc/{self.flow_pid}/environ").read_bytes())

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        until(lambda: not processes.is_alive(self.process))

    def kill_flow(self) -> None:
        os.kill(self.flow_pid, signal.SIGKILL)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    yield Worker(tmp_path, FLOW_RUN)
    processes.sweep(str(tmp_path), 0.0)


def _ended(watch: FlowWatch, workers: list[Process], flow_run: str) -> None:
    def noted() -> bool:
        watch.look(workers)
        return flow_run in watch._due

    until(noted)


def test_a_killed_flow_run_of_a_killed_worker_is_reported_at_once(worker: Worker) -> None:
    clock = Clock()
    watch = FlowWatch(clock)
    watch.look([worker.process])
    worker.kill()
    watch.look([])
    assert watch.due() == [], "its process goes on"
    worker.kill_flow()
    _ended(watch, [], FLOW_RUN)
    assert watch.due() == []
    clock.now_s += ORPHAN_GRACE_S
    assert watch.due() == [FLOW_RUN]


def test_a_living_worker_has_time_to_report_the_end_itself(worker: Worker) -> None:
    clock = Clock()
    watch = FlowWatch(clock)
    watch.look([worker.process])
    worker.kill_flow()
    _ended(watch, [worker.process], FLOW_RUN)
    clock.now_s += WORKER_GRACE_S - 0.1
    assert watch.due() == []
    clock.now_s += 0.1
    assert watch.due() == [FLOW_RUN]


def test_a_report_that_failed_is_repeated_until_it_succeeds(worker: Worker) -> None:
    clock = Clock()
    watch = FlowWatch(clock)
    watch.look([worker.process])
    worker.kill_flow()
    _ended(watch, [worker.process], FLOW_RUN)
    clock.now_s += WORKER_GRACE_S
    watch.reported(watch.due(), done=False)
    assert watch.due() == []
    clock.now_s += RETRY_S
    assert watch.due() == [FLOW_RUN]
    watch.reported([FLOW_RUN], done=True)
    clock.now_s += 1000.0
    assert watch.due() == []


def test_a_flow_run_with_a_new_process_is_not_reported(worker: Worker, tmp_path: Path) -> None:
    clock = Clock()
    watch = FlowWatch(clock)
    watch.look([worker.process])
    worker.kill_flow()
    _ended(watch, [worker.process], FLOW_RUN)
    (tmp_path / "again").mkdir()
    again = Worker(tmp_path / "again", FLOW_RUN)
    try:
        watch.look([worker.process, again.process])
        clock.now_s += WORKER_GRACE_S
        assert watch.due() == []
    finally:
        processes.sweep(str(tmp_path / "again"), 0.0)


def test_a_new_watchdog_takes_up_flow_runs_whose_worker_is_gone(
    worker: Worker, tmp_path: Path
) -> None:
    worker.kill()
    clock = Clock()
    watch = FlowWatch(clock)
    watch.begin(str(tmp_path))
    assert [each.pid for each in watch._alive.values()] == [worker.flow_pid], "without its child"
    worker.kill_flow()
    _ended(watch, [], FLOW_RUN)
    clock.now_s += ORPHAN_GRACE_S
    assert watch.due() == [FLOW_RUN]


def test_a_process_that_ended_between_two_looks_is_no_error(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    watch = FlowWatch()
    watch.look([Process("worker-control", gone.pid, time.time(), "")])
    assert watch.due() == []
    assert MARK not in os.environ


def test_a_process_with_another_text_in_the_place_of_an_id_is_not_followed(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "no-id")
    try:
        watch = FlowWatch(Clock())
        watch.look([worker.process])
        assert watch._alive == {}, "the report of one that is no id would fail for all"
    finally:
        processes.sweep(str(tmp_path), 0.0)


def test_one_report_has_a_limited_number_of_flow_runs_and_the_next_one_the_others() -> None:
    clock = Clock()
    watch = FlowWatch(clock)
    names = [str(number) for number in range(REPORTS_MAX + 1)]
    watch.reported(names, done=False)
    clock.now_s += RETRY_S
    assert watch.due() == names[:REPORTS_MAX]
    watch.reported(names[:REPORTS_MAX], done=True)
    assert watch.due() == names[REPORTS_MAX:]
