import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments import processes, record, stack
from deployments.home import Home
from deployments.processes import MARK
from deployments.record import SERVER, Stack
from storage import heartbeats, runs
from storage.errors import AstraFlowError, ConfigError
from storage.heartbeats import Pulse
from storage.objects import open_store
from tasks import recipes

SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "ASTRAFLOW_STORE"):
        monkeypatch.delenv(name, raising=False)
    made = Home(tmp_path / "home")
    made.create()
    return made


def _sleeper(home: Home, name: str) -> processes.Process:
    started = processes.start(name, SLEEP, {MARK: str(home.root)}, home.logs / f"{name}.log", home.root)
    while started.pid not in [one.pid for one in processes.marked(str(home.root))]:
        time.sleep(0.01)  # the kernel shows a new program's environment a moment after it began
    return started


def test_runs_that_a_server_without_an_answer_did_not_cancel_are_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "ANSWER_PATIENCE_S", 0.2)
    monkeypatch.setattr(stack.environment, "adopt", lambda settings: None)
    run = runs.create_run(open_store(home.store.as_uri()), "mine", recipes.load("multi_policy_tiny").model_dump(mode="json"))
    server = _sleeper(home, SERVER)
    record.save(home, Stack("http://127.0.0.1:1/api", "http://127.0.0.1:2", home.store.as_uri(), True, processes=(server,)))
    home.auth.write_text("damaged")
    said: list[str] = []
    with Pulse(run, "supervisor", "supervisor", 0, 2.0):
        while not heartbeats.read_all(run):
            time.sleep(0.02)
        with pytest.raises(AstraFlowError, match="so these runs are stopped without being cancelled") as caught:
            stack.down(home, said.append)
    assert str(caught.value).startswith("no process of the stack is left running, but this failed: the Prefect server does not")
    assert "interrupted: mine;" in str(caught.value)
    assert said == []
    assert not processes.is_alive(server)
    assert not home.auth.exists()


def _breaks(error: BaseException) -> Callable[..., Any]:
    def broken(*_: object, **__: object) -> Any:
        raise error

    return broken


def _stack(home: Home, *standing: processes.Process, store_url: str = "") -> Stack:
    url = "http://127.0.0.1:1/api"
    return Stack(url, "http://127.0.0.1:2", store_url or home.store.as_uri(), own_server=True, processes=standing)


BROKEN = {
    "an unknown error of the cancelling step": (
        "_end_flow_runs",
        RuntimeError("boom"),
        "cancelling flow runs: RuntimeError boom",
    ),
    "a refusal by the server": ("_end_flow_runs", PermissionError(13, "refused"), "cancelling flow runs: PermissionError"),
    "a Ctrl-C while it waits": ("_end_flow_runs", KeyboardInterrupt(), "cancelling flow runs: KeyboardInterrupt"),
    "settings that cannot be made": ("settings", ConfigError("no auth file"), "cancelling flow runs: no auth file"),
    "a broken stop": ("_stop_in_order", ValueError("pid"), "stopping the processes of the record: ValueError pid"),
}


@pytest.mark.parametrize(("step", "error", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_whatever_fails_while_the_stack_goes_down_its_processes_are_stopped(
    home: Home, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException, words: str
) -> None:
    monkeypatch.setattr(stack.environment, "adopt", lambda settings: None)
    monkeypatch.setattr(stack, step, _breaks(error))
    worker = _sleeper(home, "worker-trainers")
    record.save(home, _stack(home, worker))
    with pytest.raises(AstraFlowError) as caught:
        stack.down(home, lambda words: None)
    assert f"but this failed: {words}" in str(caught.value)
    assert not processes.is_alive(worker)
    assert not record.exists(home)


DAMAGED = {
    "cut short": '{"format": 1, "processes": [',
    "not text": "\x00",
    "deep": "[" * 100_000,
    "a process without a number": '{"format": 1, "processes": [{"name": "mlflow", "pid": "x", "created_s": 1.0, "log": ""}], '
    '"prefect_url": "", "mlflow_url": "", "store_url": "", "own_server": true}',
    "an address that is a number": '{"format": 1, "processes": [], "prefect_url": 5, "mlflow_url": "", "store_url": "", '
    '"own_server": true}',
    "a process of negative number": '{"format": 1, "processes": [{"name": "mlflow", "pid": -1, "created_s": 1.0, "log": ""}], '
    '"prefect_url": "", "mlflow_url": "", "store_url": "", "own_server": true}',
}


@pytest.mark.parametrize("body", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_record_is_told_and_keeps_no_process_alive(home: Home, body: str) -> None:
    worker = _sleeper(home, "worker-trainers")
    home.record.write_text(body)
    with pytest.raises(AstraFlowError, match="is damaged, so no run was cancelled; processes are found by their mark"):
        stack.down(home, lambda words: None)
    assert not processes.is_alive(worker)
    assert not home.record.exists()
    said: list[str] = []
    stack.down(home, said.append)
    assert said == ["nothing was running"]


@pytest.mark.parametrize("url", ["ftp://nowhere", "s3://user:secret@bucket", "", "file://host/store"])
def test_a_bad_address_of_the_store_keeps_no_process_alive(home: Home, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(stack.environment, "adopt", lambda settings: None)
    monkeypatch.setenv("ASTRAFLOW_STORE", url)
    worker = _sleeper(home, "worker-trainers")
    record.save(home, replace(_stack(home, worker), store_url=url))
    with pytest.raises(AstraFlowError, match="the Prefect server is gone, and the store does not tell its runs"):
        stack.down(home, lambda words: None)
    assert not processes.is_alive(worker)


def test_a_record_that_is_a_folder_keeps_no_process_alive(home: Home) -> None:
    worker = _sleeper(home, "worker-trainers")
    home.record.mkdir()
    with pytest.raises(AstraFlowError, match=f"removing {home.record}: "):
        stack.down(home, lambda words: None)
    assert not processes.is_alive(worker)


def test_a_lock_that_cannot_be_opened_keeps_no_process_alive(home: Home) -> None:
    worker = _sleeper(home, "worker-trainers")
    home.lock.mkdir()
    with pytest.raises(AstraFlowError, match="taking the lock: IsADirectoryError"):
        stack.down(home, lambda words: None)
    assert not processes.is_alive(worker)


def test_what_is_stopped_for_want_of_a_record_is_named(home: Home) -> None:
    left = _sleeper(home, "worker-trainers")
    home.record.write_text("{broken")
    said: list[str] = []
    stack._stop_strays(home, said.append)
    assert str(home.record) in said[0]
    assert said[1].startswith(f"  {left.pid} (-c import time")
    assert not processes.is_alive(left)
    stack._stop_strays(home, said.append)
    assert len(said) == 2
