import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deployments.paths import Home
from deployments.registration.client import UnavailableError
from deployments.stack import commands, processes, readiness, startup
from deployments.stack.processes import MARK
from deployments.stack.state import SERVER, Stack
from storage.errors import ConfigError

SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.create()
    return made


def _stack(home: Home, *started: processes.Process) -> Stack:
    return Stack(
        prefect_url="http://127.0.0.1:1/api",
        mlflow_url="http://127.0.0.1:2",
        store_url=home.store.as_uri(),
        own_server=True,
        processes=started,
    )


def test_a_process_whose_record_cannot_be_written_is_stopped(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[processes.Process] = []
    start = processes.start

    def noted(*args: object) -> processes.Process:
        started.append(start(*args))  # type: ignore[arg-type]
        home.new_record.mkdir()  # from now on the record cannot be written
        return started[0]

    monkeypatch.setattr(processes, "start", noted)
    with pytest.raises(IsADirectoryError):
        startup._start(home, _stack(home), "sleeper", SLEEP, {MARK: str(home.root)}, 0o077)
    assert not processes.is_alive(started[0])
    assert not psutil.pid_exists(started[0].pid)


def _wait_for_server(stack: Stack) -> None:
    startup._wait_for_server(stack, SERVER, stack.prefect_url, "the Prefect server", print)


def _wait_for_worker(stack: Stack) -> None:
    startup._wait_for_workers(stack, {"trainers": None}, print)


@pytest.mark.parametrize(
    ("name", "what", "wait"),
    [
        (SERVER, "the Prefect server", _wait_for_server),
        ("worker-trainers", "the worker of pool trainers", _wait_for_worker),
    ],
)
def test_a_part_that_hangs_gives_an_error_with_the_end_of_its_log(
    home: Home,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    what: str,
    wait: Callable[[Stack], None],
) -> None:
    monkeypatch.setattr(readiness.Progress, "stalled_s", 1000.0)
    monkeypatch.setattr(readiness, "worker_beats", lambda url, pools: {})
    part = processes.start(name, SLEEP, {}, home.logs / f"{name}.log", home.root)
    try:
        with pytest.raises(
            ConfigError,
            match=f"^{what} is not ready .* made no progress .*; "
            f"the end of its log {re.escape(part.log)}:\n",
        ):
            wait(_stack(home, part))
    finally:
        processes.stop([part], 5.0)


def test_a_worker_that_has_ended_gives_an_error_immediately(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "worker_beats", lambda url, pools: {})
    worker = processes.start("worker-trainers", SLEEP, {}, home.logs / "worker.log", home.root)
    processes.stop([worker], 5.0)
    with pytest.raises(
        ConfigError, match=r"^the worker of pool trainers ended before it was ready"
    ):
        _wait_for_worker(_stack(home, worker))


def test_a_worker_is_waited_for_while_the_server_is_too_busy_to_answer(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ("trainers", commands.worker_name("trainers"))
    answers: Iterator[UnavailableError | dict[tuple[str, str], str]] = iter(
        [UnavailableError("it timed out"), {worker: "old"}, {worker: "new"}]
    )

    def worker_beats(url: str, pools: list[str]) -> dict[tuple[str, str], str]:
        answer = next(answers)
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    monkeypatch.setattr(readiness, "worker_beats", worker_beats)
    part = processes.start("worker-trainers", SLEEP, {}, home.logs / "worker.log", home.root)
    try:
        startup._wait_for_workers(_stack(home, part), {"trainers": "old"}, print)
    finally:
        processes.stop([part], 5.0)
    assert next(answers, None) is None, "the heartbeat of the previous worker is none of this one"
