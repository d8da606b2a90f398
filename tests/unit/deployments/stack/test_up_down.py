import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.paths import Home
from deployments.stack import cpu_features, environment, processes, state, up_down
from deployments.stack.machine import Machine, this_machine
from deployments.stack.processes import MARK
from deployments.stack.state import SERVER, WATCHDOG, Stack
from storage import layout
from storage.coordination import heartbeats
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.errors import AstraFlowError, ConfigError, TransientError
from storage.formats.json_objects import seal
from storage.run import runs
from storage.store.object_store import ObjectStore, open_store
from tasks.recipes import loader
from tests.support.http_servers import one_answer
from tests.support.runs import builders

SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "ASTRAFLOW_STORE"):
        monkeypatch.delenv(name, raising=False)
    made = Home(tmp_path / "home")
    made.create()
    return made


def _sleeper(home: Home, name: str) -> processes.Process:
    started = processes.start(
        name, SLEEP, {MARK: str(home.root)}, home.logs / f"{name}.log", home.root
    )
    while started.pid not in [item.pid for item in processes.marked(str(home.root))]:
        time.sleep(0.01)  # the kernel shows a new program's environment with a short delay
    return started


def test_runs_that_an_unreachable_server_did_not_cancel_are_named(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_down, "RESPONSE_STALL_LIMIT_S", 0.2)
    monkeypatch.setattr(up_down.environment, "adopt", lambda settings: None)
    run = runs.create_run(
        open_store(home.store.as_uri()),
        "mine",
        loader.load("multi_policy_tiny").model_dump(mode="json"),
    )
    server = _sleeper(home, SERVER)
    state.save(
        home,
        Stack(
            prefect_url="http://127.0.0.1:1/api",
            mlflow_url="http://127.0.0.1:2",
            store_url=home.store.as_uri(),
            own_server=True,
            processes=(server,),
        ),
    )
    home.auth.write_text("damaged")
    messages: list[str] = []
    with HeartbeatWriter(run, "supervisor", "supervisor", 0, 2.0):
        while not heartbeats.readable(run):
            time.sleep(0.02)
        with pytest.raises(
            AstraFlowError, match="so these runs are stopped without being cancelled"
        ) as caught:
            up_down.down(home, messages.append)
    assert str(caught.value).startswith(
        "no process of the stack is running any more, but this failed: the Prefect server does not"
    )
    assert f"; the end of its log {server.log}:" in str(caught.value)
    assert "interrupted: mine;" in str(caught.value)
    assert messages == []
    assert not processes.is_alive(server)
    assert not home.auth.exists()


def _silent_run(home: Home, run_id: str, pid: int, state: str = "working") -> None:
    """A run whose supervisor, the process `pid`, wrote its last heartbeat two minutes ago."""
    run = runs.create_run(
        open_store(home.store.as_uri()),
        run_id,
        loader.load("multi_policy_tiny").model_dump(mode="json"),
    )
    ago_s = time.time() - 60.0
    run.put(layout.RUN, seal(replace(runs.read_run(run), created_s=ago_s - 120.0)))
    heartbeat = builders.heartbeat(
        "supervisor",
        "supervisor",
        beat_s=ago_s - 60.0,
        started_s=ago_s,
        pid=pid,
        host=socket.gethostname(),
        state=state,
    )
    builders.put_heartbeat(run, heartbeat)


def test_a_run_with_a_slow_supervisor_is_named_and_one_with_a_dead_supervisor_is_not(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_down.environment, "adopt", lambda settings: None)
    supervisor = _sleeper(home, "supervisor")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    _silent_run(home, "slow", supervisor.pid)
    _silent_run(home, "gone", gone.pid)
    _silent_run(home, "reused", os.getpid())  # a process that does not belong to the stack
    _silent_run(home, "left", supervisor.pid, "done")
    for damaged in ("a-damaged", "z-damaged"):  # they hide no other run
        _silent_run(home, damaged, supervisor.pid)
        shutil.rmtree(home.store / "runs" / damaged / "heartbeats")
        (home.store / "runs" / damaged / "heartbeats").touch()
    state.save(home, _stack(home))
    with pytest.raises(
        AstraFlowError, match="will be shown as interrupted: slow; start them again"
    ):
        up_down.down(home, lambda words: None)


def test_a_run_whose_heartbeats_cannot_be_reached_hides_no_other_run(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_all(run: ObjectStore) -> heartbeats.Heartbeats:
        if run.url.endswith(("/a-lost", "/z-lost")):
            raise TransientError("the store does not answer")
        return heartbeats.read_all(run)

    monkeypatch.setattr(up_down.environment, "adopt", lambda settings: None)
    supervisor = _sleeper(home, "supervisor")
    for run_id in ("a-lost", "slow", "z-lost"):
        _silent_run(home, run_id, supervisor.pid)
    state.save(home, _stack(home))
    monkeypatch.setattr(up_down, "heartbeats", SimpleNamespace(read_all=read_all))
    with pytest.raises(AstraFlowError, match="shown as interrupted: slow; start them again"):
        up_down.down(home, lambda words: None)
    assert not processes.is_alive(supervisor)


def test_down_neither_creates_nor_changes_a_folder_of_other_programs(tmp_path: Path) -> None:
    home = Home(tmp_path / "opt")
    messages: list[str] = []
    up_down.down(home, messages.append)
    assert not home.root.exists()
    home.logs.mkdir(parents=True)
    for folder in (home.root, home.logs):
        folder.chmod(0o755)
    up_down.down(home, messages.append)
    assert messages == ["nothing was running"] * 2
    assert list(home.root.iterdir()) == [home.logs]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (home.root, home.logs)] == [0o755] * 2


def test_a_dead_worker_does_not_hide_the_prefect_server(home: Home) -> None:
    server, worker = _sleeper(home, SERVER), _sleeper(home, "worker-trainers")
    stack = state.save(home, replace(_stack(home, server, worker), ready=True))
    assert up_down.running(home) == up_down.reachable(home) == stack
    processes.stop([worker], 5.0)
    assert up_down.running(home) is None
    assert up_down.reachable(home) == stack
    processes.stop([server], 5.0)
    assert up_down.reachable(home) is None


def test_an_external_server_is_reachable_while_a_process_of_the_stack_runs(home: Home) -> None:
    worker = _sleeper(home, "worker-trainers")
    stack = state.save(home, replace(_stack(home, worker), own_server=False))
    assert up_down.reachable(home) == stack
    processes.stop([worker], 5.0)
    assert up_down.reachable(home) is None


def _foreign(home: Home, *processes: processes.Process) -> Stack:
    machine = replace(this_machine(), host="other", boot_id="another-boot")
    return replace(_stack(home, *processes), machine=machine)


@pytest.mark.parametrize("command", [up_down.up, up_down.down])
def test_the_stack_of_another_machine_in_a_shared_home_is_refused_and_not_changed(
    home: Home, command: Callable[..., Any]
) -> None:
    here = _sleeper(home, "worker-trainers")  # has the mark, as a process of any stack of the home
    stack = state.save(home, _foreign(home, replace(here, start="another-boot 1")))
    home.auth.write_text("astraflow:secret\n")
    home.prefect_toml.write_text("# Written by `astraflow up`, removed by `astraflow down`.\n")
    with pytest.raises(ConfigError) as raised:
        command(home, lambda words: None)
    assert str(raised.value) == (
        f"{home.record} belongs to the stack of another machine or container, named other, whose "
        "processes cannot be seen from here; run `astraflow down` there, or set ASTRAFLOW_HOME to a "
        f"folder of this machine. If its processes have ended, delete {home.record}"
    )
    assert processes.is_alive(here)
    assert state.load(home) == stack
    assert home.auth.exists()
    assert home.prefect_toml.exists()
    processes.stop([here], 5.0)


def test_down_stops_a_stack_whose_host_was_renamed(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_down.environment, "adopt", lambda settings: None)
    worker = _sleeper(home, "worker-trainers")
    state.save(home, replace(_foreign(home, worker), machine=Machine("renamed", "x", "y")))
    up_down.down(home, lambda words: None)
    assert not processes.is_alive(worker)
    assert not state.exists(home)


def test_up_sends_the_secret_for_the_stores_credentials_to_no_proxy(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*environment.UNTRACKED, "PREFECT_API_AUTH_STRING", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # restored after the test
    server = _sleeper(home, SERVER)
    state.save(home, replace(_stack(home, server), store_secret="store-keys"))
    with one_answer(200, b"{}", "application/json") as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(AstraFlowError, match="the Prefect block store-keys cannot be read"):
            up_down.up(home, lambda words: None)
    assert proxy.requests == []
    assert os.environ["PREFECT_API_AUTH_STRING"] == home.auth.read_text().strip()
    processes.stop([server], 5.0)


def test_the_stack_commands_do_not_import_torch(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "reports_bf16", lambda: True)
    monkeypatch.setattr(cpu_features, "survives_bf16", _breaks(AssertionError("asked")))
    assert up_down.settings(home, _stack(home))["ASTRAFLOW_STORE"] == home.store.as_uri()


def _breaks(error: BaseException) -> Callable[..., Any]:
    def broken(*_: object, **__: object) -> Any:
        raise error

    return broken


def _stack(home: Home, *standing: processes.Process, store_url: str = "") -> Stack:
    url = "http://127.0.0.1:1/api"
    return Stack(
        prefect_url=url,
        mlflow_url="http://127.0.0.1:2",
        store_url=store_url or home.store.as_uri(),
        own_server=True,
        processes=standing,
    )


BROKEN = {
    "an unknown error of the cancelling step": (
        "_end_flow_runs",
        RuntimeError("boom"),
        "cancelling flow runs: RuntimeError boom",
    ),
    "a refusal by the server": (
        "_end_flow_runs",
        PermissionError(13, "refused"),
        "cancelling flow runs: PermissionError",
    ),
    "a Ctrl-C while it waits": (
        "_end_flow_runs",
        KeyboardInterrupt(),
        "cancelling flow runs: KeyboardInterrupt",
    ),
    "settings that cannot be made": (
        "settings",
        ConfigError("no auth file"),
        "cancelling flow runs: no auth file",
    ),
    "a broken stop": (
        "_stop_in_order",
        ValueError("pid"),
        "stopping the processes of the record: ValueError pid",
    ),
    "no stop": ("processes.stop", RuntimeError("boom"), "stopping the watchdog: RuntimeError boom"),
    "a prefect.toml that stays": (
        "prefect_toml.remove",
        PermissionError(13, "refused"),
        "deleting {home.prefect_toml}: PermissionError",
    ),
}


@pytest.mark.parametrize(("step", "error", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_processes_are_stopped_whatever_else_fails_in_down(
    home: Home, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException, words: str
) -> None:
    monkeypatch.setattr(up_down.environment, "adopt", lambda settings: None)
    monkeypatch.setattr(f"{up_down.__name__}.{step}", _breaks(error))
    worker, watchdog = _sleeper(home, "worker-trainers"), _sleeper(home, WATCHDOG)
    state.save(home, _stack(home, worker, watchdog))
    home.auth.write_text("astraflow:secret\n")
    with pytest.raises(AstraFlowError) as caught:
        up_down.down(home, lambda words: None)
    assert f"but this failed: {words.format(home=home)}" in str(caught.value)
    assert not any(map(processes.is_alive, (worker, watchdog)))
    assert not home.auth.exists()
    assert not state.exists(home)


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
def test_a_damaged_record_is_reported_and_all_processes_are_stopped(home: Home, body: str) -> None:
    worker = _sleeper(home, "worker-trainers")
    home.record.write_text(body)
    with pytest.raises(
        AstraFlowError,
        match="is damaged, so no run was cancelled; processes are found by their mark",
    ):
        up_down.down(home, lambda words: None)
    assert not processes.is_alive(worker)
    assert not home.record.exists()
    messages: list[str] = []
    up_down.down(home, messages.append)
    assert messages == ["nothing was running"]


@pytest.mark.parametrize(
    "url", ["ftp://nowhere", "s3://user:secret@bucket", "", "file://host/store"]
)
def test_down_with_an_invalid_store_address_stops_all_processes(
    home: Home, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr(up_down.environment, "adopt", lambda settings: None)
    monkeypatch.setenv("ASTRAFLOW_STORE", url)
    worker = _sleeper(home, "worker-trainers")
    state.save(home, replace(_stack(home, worker), store_url=url))
    with pytest.raises(
        AstraFlowError,
        match="the Prefect server is not running, and the store's runs cannot be listed",
    ):
        up_down.down(home, lambda words: None)
    assert not processes.is_alive(worker)


@pytest.mark.parametrize(
    ("file", "step"),
    [
        ("lock", "taking the lock"),
        ("new_record", "recording that the stack is not ready"),
        ("auth", "deleting {home.auth}"),
        ("record", "deleting {home.record}"),
    ],
)
def test_down_with_a_folder_in_place_of_a_file_stops_all_processes(
    home: Home, monkeypatch: pytest.MonkeyPatch, file: str, step: str
) -> None:
    monkeypatch.setattr(up_down.environment, "adopt", lambda settings: None)
    worker = _sleeper(home, "worker-trainers")
    state.save(home, _stack(home, worker))
    path: Path = getattr(home, file)
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(AstraFlowError, match=f"{step.format(home=home)}: .*{path}"):
        up_down.down(home, lambda words: None)
    assert not processes.is_alive(worker)
    assert state.exists(home) is (path == home.record)


def test_processes_stopped_without_a_record_are_named(home: Home) -> None:
    left = _sleeper(home, "worker-trainers")
    home.record.write_text("{broken")
    messages: list[str] = []
    up_down._stop_unrecorded(home, messages.append)
    assert str(home.record) in messages[0]
    assert messages[1].startswith(f"  {left.pid} (-c import time")
    assert not processes.is_alive(left)
    up_down._stop_unrecorded(home, messages.append)
    assert len(messages) == 2
