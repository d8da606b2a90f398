import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from deployments.paths import Home
from deployments.stack import processes, state
from deployments.stack.processes import MARK, Process
from deployments.stack.state import MLFLOW, SERVER, WATCHDOG, Stack
from deployments.watchdog import restarts, watch
from deployments.watchdog.restarts import Restarts
from deployments.watchdog.watch import Watchdog
from tests.support.patience import until

ME = Process(WATCHDOG, os.getpid(), 1.0, "", processes.start_of(os.getpid()))


class Repairs:
    """Records the repairs; `starts` has them write a living process into the record."""

    def __init__(self, home: Home, starts: bool = True) -> None:
        self.home, self.starts = home, starts
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.calls.append(list(arguments))
        stack = state.load(self.home)
        if self.starts and stack is not None and arguments[0] == "--start":
            for name in arguments[1:]:
                stack = stack.with_process(replace(ME, name=name))
            state.save(self.home, stack)
        return 0


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.create()
    return made


def _dead(name: str, created_s: float = 0.0) -> Process:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return Process(name, gone.pid, created_s, f"/logs/{name}.log", "0d6f 1")


def _saved(home: Home, *parts: Process, ready: bool = True) -> Stack:
    stack = Stack(
        prefect_url="http://127.0.0.1:1/api",
        mlflow_url="http://127.0.0.1:2",
        store_url=home.store.as_uri(),
        own_server=True,
        processes=parts,
        ready=ready,
    )
    return state.save(home, stack)


def test_what_has_ended_is_started_and_nothing_else(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(home, ME, replace(ME, name=SERVER), _dead(MLFLOW), _dead("worker-control"))
    repairs, clock = Repairs(home), Clock()
    watchdog = Watchdog(home, repairs, clock)
    assert watchdog.look()
    assert watchdog.look()
    assert repairs.calls == [["--start", MLFLOW, "worker-control"]]
    assert restarts.load(home) == {MLFLOW: Restarts(1, 1), "worker-control": Restarts(1, 1)}
    assert "mlflow (process " in (said := capsys.readouterr().out)
    assert "has ended; starting it now" in said


def test_a_process_that_keeps_ending_is_started_after_a_pause(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = _saved(home, ME, _dead(MLFLOW))
    repairs, clock = Repairs(home), Clock()
    watchdog = Watchdog(home, repairs, clock, wall_clock=clock)
    watchdog.look()
    state.save(home, stack.with_process(_dead(MLFLOW, clock.now_s)))
    watchdog.look()
    assert len(repairs.calls) == 1
    assert "2 times in a row soon after its start; starting it in 2 s; see mlflow.log" in (
        capsys.readouterr().out
    )
    clock.now_s += 2.0
    watchdog.look()
    assert len(repairs.calls) == 2


def test_what_could_not_be_started_is_tried_again_after_a_pause(home: Home) -> None:
    _saved(home, ME, _dead("worker-control"))
    repairs, clock = Repairs(home, starts=False), Clock()
    watchdog = Watchdog(home, repairs, clock)
    watchdog.look()
    watchdog.look()
    assert len(repairs.calls) == 1
    clock.now_s += 2.0
    watchdog.look()
    assert len(repairs.calls) == 2
    assert restarts.load(home)["worker-control"].ends == 1


def test_a_clock_that_is_set_back_delays_no_start(home: Home) -> None:
    _saved(home, ME, _dead("worker-control"))
    repairs, clock, wall_clock = Repairs(home, starts=False), Clock(), Clock()
    watchdog = Watchdog(home, repairs, clock, wall_clock)
    watchdog.look()
    wall_clock.now_s -= 7200.0
    clock.now_s += 2.0
    watchdog.look()
    assert len(repairs.calls) == 2


def test_a_record_that_cannot_be_written_keeps_nothing_from_being_started(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    _saved(home, ME, _dead(MLFLOW))
    home.watchdog.mkdir()
    repairs = Repairs(home)
    assert Watchdog(home, repairs).look()
    assert repairs.calls == [["--start", MLFLOW]]
    assert f"{home.watchdog} is not written" in capsys.readouterr().out


def test_the_watchdog_goes_on_after_an_error_of_the_system(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([OSError(12, "Cannot allocate memory"), None])

    def look(watchdog: Watchdog) -> bool:
        if (error := next(looks)) is not None:
            raise error
        return False

    monkeypatch.setattr(Watchdog, "look", look)
    monkeypatch.setattr(watch, "LOOK_S", 0.0)
    monkeypatch.setattr(watch.signal, "signal", lambda number, handler: None)
    assert watch.watch(home) == 0
    assert "could not look at the stack: [Errno 12]" in capsys.readouterr().out


def test_nothing_is_started_while_the_stack_is_not_ready(home: Home) -> None:
    _saved(home, ME, _dead(MLFLOW), ready=False)
    repairs = Repairs(home)
    assert Watchdog(home, repairs).look()
    assert repairs.calls == []


def test_a_watchdog_without_a_stack_or_with_another_watchdog_ends(home: Home) -> None:
    repairs = Repairs(home)
    watchdog = Watchdog(home, repairs)
    assert not watchdog.look()
    home.record.write_text("damaged")
    assert watchdog.look(), "`astraflow up` replaces the record"
    sleeper = processes.start(
        WATCHDOG,
        [sys.executable, "-c", "import time; time.sleep(3600)"],
        {MARK: str(home.root)},
        home.logs / "other.log",
        home.root,
    )
    try:
        _saved(home, sleeper, _dead(MLFLOW))
        assert not watchdog.look()
    finally:
        processes.stop([sleeper], 5.0)
    assert watchdog.look(), "the other one may not be recorded yet"
    assert repairs.calls == []


def test_two_watchdogs_cannot_watch_one_home(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "LOCK_TIMEOUT_S", 0.1)
    with FileLock(home.watchdog_lock):
        assert watch.watch(home) == 1
    assert "another watchdog has the lock" in capsys.readouterr().out


def test_the_watchdog_process_ends_when_its_stack_is_gone_and_at_sigterm(home: Home) -> None:
    environment = {**os.environ, "ASTRAFLOW_HOME": str(home.root), MARK: str(home.root)}
    command = [sys.executable, "-m", "deployments.watchdog"]

    def started(name: str) -> Process:
        log = home.logs / f"{name}.log"
        process = processes.start(WATCHDOG, command, environment, log, Path.cwd())
        until(lambda: "watching the stack" in log.read_text())
        return process

    state.save(home, _saved(home))
    first = started("first")
    processes.stop([first], 30.0)
    assert not processes.is_alive(first)
    second = started("second")
    state.delete(home)
    until(lambda: not processes.is_alive(second))
    assert "none, is recorded" in (home.logs / "second.log").read_text()
    assert time.time() - second.created_s < watch.LOCK_TIMEOUT_S * 100
