"""Whether the process of a flow run works, as seen from beside it."""

import os
import subprocess
import sys
import time
from uuid import uuid4

from tasks.supervision import flow_processes
from tasks.supervision.flow_processes import MARK, FlowProcesses

BUSY = "import time\nend_s = time.monotonic() + 900\nwhile time.monotonic() < end_s: pass"
BUSY_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


def test_the_cpu_time_of_a_flow_runs_process_and_its_descendants_is_found_by_its_id() -> None:
    flow_run = str(uuid4())
    process = subprocess.Popen([sys.executable, "-c", BUSY_CHILD], env={**os.environ, MARK: flow_run}, process_group=0)
    try:
        while (flow_processes.cpu_seconds(flow_run) or 0.0) < 0.5:
            assert process.poll() is None
            time.sleep(0.02)
        assert flow_processes.cpu_seconds(str(uuid4())) is None
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    while flow_processes.cpu_seconds(flow_run) is not None:  # the child is for init to reap
        time.sleep(0.02)


def test_a_process_works_that_used_cpu_time_since_the_last_look() -> None:
    now_s, cpu_s = [0.0], {"f": 10.0}
    seen = FlowProcesses(cpu_s.get, clock=lambda: now_s[0])
    assert seen.works("f"), "the first look finds it alive"
    now_s[0] = 4.9
    assert seen.works("f"), "too early to tell"
    now_s[0], cpu_s["f"] = 10.0, 10.3
    assert seen.works("f")
    now_s[0], cpu_s["f"] = 20.0, 10.59
    assert not seen.works("f")
    now_s[0], cpu_s["f"] = 24.0, 99.0
    assert not seen.works("f"), "too early to tell"
    del cpu_s["f"]
    now_s[0] = 30.0
    assert not seen.works("f"), "it is gone"
    cpu_s["f"], now_s[0] = 1.0, 30.1
    assert seen.works("f"), "a first look again"


def test_what_is_forgotten_is_seen_for_the_first_time_again() -> None:
    now_s = [0.0]
    seen = FlowProcesses({"f": 10.0}.get, clock=lambda: now_s[0])
    assert seen.works("f")
    now_s[0] = 6.0
    assert not seen.works("f")
    seen.forget("f")
    now_s[0] = 7.0
    assert seen.works("f")


def test_the_cpu_time_does_not_fall_when_a_child_ends() -> None:
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
