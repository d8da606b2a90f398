"""CPU use of the process of a flow run, measured by another process."""

import os
import signal
import subprocess
import sys
import time
from uuid import uuid4

import pytest

from tasks.supervision import flow_processes
from tasks.supervision.flow_processes import MARK, FlowProcesses

BUSY = "import time\nend_s = time.monotonic() + 900\nwhile time.monotonic() < end_s: pass"
BUSY_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


def test_the_cpu_time_of_a_flow_runs_process_tree_is_found_by_its_id() -> None:
    flow_run = str(uuid4())
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY_CHILD], env={**os.environ, MARK: flow_run}, process_group=0
    )
    try:
        while (flow_processes.cpu_seconds(flow_run) or 0.0) < 0.5:
            assert process.poll() is None
            time.sleep(0.02)
        assert flow_processes.cpu_seconds(str(uuid4())) is None
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    while flow_processes.cpu_seconds(flow_run) is not None:  # init reaps the child
        time.sleep(0.02)


def test_a_process_is_idle_when_it_uses_less_than_its_share_of_cpu_time() -> None:
    now_s, cpu_s = [0.0], {"f": 10.0}
    seen = FlowProcesses(cpu_s.get, lambda: now_s[0], lambda: 1.0)
    assert seen.idle_s("f") == 0.0, "the first look finds it alive"
    now_s[0] = 4.9
    assert seen.idle_s("f") == 4.9, "too early to measure"
    now_s[0], cpu_s["f"] = 10.0, 10.3
    assert seen.idle_s("f") == 0.0, "3 % of a core"
    now_s[0], cpu_s["f"] = 20.0, 10.59
    assert seen.idle_s("f") == 10.0, "less than 3 %"
    now_s[0], cpu_s["f"] = 24.0, 99.0
    assert seen.idle_s("f") == 14.0, "too early to measure"
    now_s[0] = 25.0
    assert seen.idle_s("f") == 0.0
    del cpu_s["f"]
    now_s[0] = 30.0
    assert seen.idle_s("f") is None, "it is gone"
    cpu_s["f"], now_s[0] = 1.0, 30.1
    assert seen.idle_s("f") == 0.0, "a first look again"


def test_on_a_busy_machine_a_small_share_counts_as_work() -> None:
    """40 busy processes on two cores: each gets 5 % of a core; one that also waits for others uses
    1 %.
    """
    now_s, cpu_s, share = [0.0], {"f": 10.0}, [0.05]
    seen = FlowProcesses(cpu_s.get, lambda: now_s[0], lambda: share[0])
    seen.idle_s("f")
    now_s[0], cpu_s["f"] = 10.0, 10.1
    assert seen.idle_s("f") == 0.0
    now_s[0], cpu_s["f"] = 20.0, 10.114
    assert seen.idle_s("f") == 10.0, "less than 3 % of its fair share"
    share[0], now_s[0], cpu_s["f"] = 1.0, 30.0, 10.214
    assert seen.idle_s("f") == 20.0, "on an idle machine 1 % is no work"


@pytest.mark.parametrize(
    ("load", "share"), [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (4.0, 0.5), (40.0, 0.05)]
)
def test_the_fair_share_decreases_with_the_load_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, load: float, share: float
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 7.0, 9.0))
    assert flow_processes.fair_share() == share


def test_a_forgotten_process_is_measured_anew() -> None:
    now_s = [0.0]
    seen = FlowProcesses({"f": 10.0}.get, lambda: now_s[0], lambda: 1.0)
    seen.idle_s("f")
    now_s[0] = 6.0
    assert seen.idle_s("f") == 6.0
    seen.forget("f")
    now_s[0] = 7.0
    assert seen.idle_s("f") == 0.0


def test_sigterm_is_sent_only_to_the_process_of_the_flow_run() -> None:
    """The child inherits the mark and would outlive its parent: the process ends without stopping
    the child.
    """
    flow_run = str(uuid4())
    child = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: print('child', "
        "flush=True))\n"
        "print('up', flush=True)\nwhile True: time.sleep(1)"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    environment = {**os.environ, MARK: flow_run}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(900)"],
        env={**os.environ, MARK: str(uuid4())},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        flow_processes.terminate(flow_run)
        assert process.wait() == -signal.SIGTERM
        assert flow_processes.cpu_seconds(flow_run) is not None, "the child lives"
        assert other.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        other.kill()
        other.wait()
    assert process.stdout.read() == "", "the child got no signal"
    process.stdout.close()


def test_the_cpu_time_does_not_decrease_when_a_child_ends() -> None:
    flow_run = str(uuid4())
    child = "import time\nwhile time.process_time() < 1.0: pass\nprint('used', flush=True)\ninput()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('ended', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, MARK: flow_run},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as told, process.stdout as said:
        assert said.readline() == "used\n"
        before_s = flow_processes.cpu_seconds(flow_run)
        assert before_s is not None
        assert before_s >= 0.9
        told.write("\n")
        told.flush()
        assert said.readline() == "ended\n"
        after_s = flow_processes.cpu_seconds(flow_run)
        assert after_s is not None
        assert after_s >= before_s
        told.write("\n")
    process.wait()
