import os
import signal
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deployments.stack import processes
from deployments.stack.processes import MARK
from storage.errors import ConfigError
from tests.support.patience import until

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(3600)"]
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(3600)']);"
    "print(c.pid, flush=True); time.sleep(3600)",
]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(3600)",
]


def _start(command: list[str], folder: Path, mark: str = "") -> processes.Process:
    return processes.start(
        "sleeper", command, {**os.environ, MARK: mark or str(folder)}, folder / "log", folder
    )


def _last_line(log: Path) -> str:
    until(lambda: len(log.read_text().splitlines()) > 1)
    return log.read_text().splitlines()[-1]


def test_a_started_process_is_alive_until_it_is_stopped(tmp_path: Path) -> None:
    process = _start(SLEEP, tmp_path)
    assert processes.is_alive(process)
    processes.stop([process], grace_s=5)
    assert not processes.is_alive(process)
    assert not psutil.pid_exists(process.pid)


def test_a_process_reacts_to_sigint_also_where_the_command_ignores_it(tmp_path: Path) -> None:
    shown = "import signal; print(signal.getsignal(signal.SIGINT), flush=True)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = _start([sys.executable, "-c", shown], tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert "default_int_handler" in _last_line(tmp_path / "log")
    processes.stop([process], grace_s=5)


def test_only_the_owner_may_read_logs_and_files_of_a_process(
    tmp_path: Path,
) -> None:
    touch = [sys.executable, "-c", "open('made', 'w').close(); print('done', flush=True)"]
    (tmp_path / "log").touch(mode=0o644)
    process = processes.start("toucher", touch, os.environ, tmp_path / "log", tmp_path, umask=0o077)
    assert _last_line(tmp_path / "log") == "done"
    processes.stop([process], grace_s=5)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o600


def test_a_process_listens_on_a_port_if_it_or_its_child_does(
    tmp_path: Path,
) -> None:
    listen = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    own = _start([sys.executable, "-c", f"{listen}time.sleep(3600)"], tmp_path)
    port = int(_last_line(tmp_path / "log"))
    (tmp_path / "other").mkdir()
    through_child = ["sh", "-c", f'"{sys.executable}" -c "{listen}time.sleep(3600)"; true']
    parent = _start(through_child, tmp_path / "other")
    childs_port = int(_last_line(tmp_path / "other" / "log"))
    assert processes.listens(own, port)
    assert processes.listens(parent, childs_port)
    assert not processes.listens(parent, port)
    assert not processes.listens(own, childs_port)
    processes.stop([own, parent], grace_s=5)
    assert not processes.listens(own, port)


def test_a_foreign_process_with_the_recorded_id_is_not_ours(tmp_path: Path) -> None:
    process = _start(SLEEP, tmp_path)
    boot_id, ticks = process.start.split()
    for start in (f"{boot_id} {int(ticks) - 1}", f"another-boot {ticks}"):
        stranger = replace(process, start=start)
        assert not processes.is_alive(stranger)
        processes.stop([stranger], grace_s=1)
    assert processes.is_alive(process)
    processes.stop([process], grace_s=5)


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_step_of_the_clock_changes_no_process_of_the_record(
    tmp_path: Path, step_s: float
) -> None:
    process = _start(SLEEP, tmp_path)
    until(lambda: [item.pid for item in processes.marked(str(tmp_path))] == [process.pid])
    stepped = replace(process, created_s=process.created_s + step_s)
    assert processes.is_alive(stepped)
    assert processes.is_alive(replace(stepped, start=""))  # the record of an earlier release
    other_home = replace(stepped, start="", log="/another/home/logs/log")
    assert not processes.is_alive(other_home)
    processes.stop([stepped], grace_s=5)
    assert not processes.is_alive(process)


def test_a_zombie_child_is_not_alive(tmp_path: Path) -> None:
    process = _start([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)
    until(lambda: not processes.is_alive(process))  # a zombie is not alive


def test_stopping_a_process_stops_its_children_too(tmp_path: Path) -> None:
    process = _start(PARENT, tmp_path)
    child = int(_last_line(tmp_path / "log"))
    processes.stop([process], grace_s=0.2)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = _start(STUBBORN, tmp_path)
    _last_line(tmp_path / "log")
    processes.stop([process], grace_s=0.2)
    assert not processes.is_alive(process)


def test_a_sweep_finds_orphaned_processes_of_this_stack_only(
    tmp_path: Path,
) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.mkdir()
    other.mkdir()
    parent = _start(PARENT, ours)
    orphan = int(_last_line(ours / "log"))
    bystander = _start(SLEEP, other)
    psutil.Process(parent.pid).kill()
    while processes.is_alive(parent):
        time.sleep(0.02)
    assert [process.pid for process in processes.marked(str(ours))] == [orphan]
    swept = processes.sweep(str(ours), grace_s=5)
    assert [words.split(" (")[0] for words in swept] == [str(orphan)]
    assert "import time" in swept[0]
    assert processes.marked(str(ours)) == []
    assert processes.is_alive(bystander)
    processes.stop([bystander], grace_s=5)


def test_draining_stops_the_children_and_not_the_process(tmp_path: Path) -> None:
    process = _start(PARENT, tmp_path)
    child = int(_last_line(tmp_path / "log"))
    processes.drain([process], grace_s=5)
    assert processes.is_alive(process)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    processes.stop([process], grace_s=5)


def test_the_end_of_a_log_is_its_last_non_empty_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n\nthree\n")
    assert processes.last_lines(log, count=3) == "two\nthree"
    assert processes.last_lines(tmp_path / "absent") == ""


def test_a_log_that_is_too_long_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * (processes.LOG_BYTES_MAX + 1))
    process = _start(SLEEP, tmp_path)
    processes.stop([process], grace_s=5)
    assert (tmp_path / "log.old").stat().st_size == processes.LOG_BYTES_MAX + 1
    assert log.stat().st_size < 1000


def test_a_pipe_in_place_of_a_log_is_neither_written_nor_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)
    with pytest.raises(ConfigError, match=f"{log} is not a regular file"):
        processes.start("x", [sys.executable, "-c", "pass"], dict(os.environ), log, tmp_path)
    assert processes.last_lines(log) == ""
