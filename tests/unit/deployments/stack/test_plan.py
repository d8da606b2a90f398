import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deployments.paths import Home
from deployments.servers import auth
from deployments.stack import plan as planning
from deployments.stack.plan import plan
from deployments.stack.processes import Process
from deployments.stack.state import Stack
from storage.errors import ConfigError
from storage.machine.ports import HOST, is_free

PREFECT_PORT = 47001
MLFLOW_PORT = 47002


@pytest.fixture(autouse=True)
def _recorded_ports_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else listens on this machine."""
    monkeypatch.setattr(
        planning, "is_free", lambda port: port in (PREFECT_PORT, MLFLOW_PORT) or is_free(port)
    )


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "ASTRAFLOW_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def _living(name: str) -> Process:
    return Process(name, os.getpid(), psutil.Process().create_time(), "")


def _dead(name: str) -> Process:
    return Process(name, os.getpid(), 1.0, "")


def _stack(
    home: Home, *processes: Process, port: int = PREFECT_PORT, own_server: bool = True
) -> Stack:
    return Stack(
        prefect_url=f"http://{HOST}:{port}/api",
        mlflow_url=f"http://{HOST}:{MLFLOW_PORT}",
        store_url=home.store.as_uri(),
        own_server=own_server,
        processes=processes,
        deployed="digest",
        auth_digest=auth.digest(auth.read(home) or ""),
    )


def test_a_first_stack_starts_everything_and_keeps_nothing(home: Home) -> None:
    wanted = plan(home, None)
    assert (wanted.own_server, wanted.own_mlflow, wanted.processes) == (True, True, ())
    assert wanted.store_url == home.store.as_uri()


def test_a_taken_port_is_skipped(home: Home, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PREFECT_PORT", taken)
    assert plan(home, None).prefect_url != f"http://{HOST}:{taken}/api"


def test_running_processes_stay_with_their_addresses(home: Home) -> None:
    standing = _stack(
        home, _living("prefect-server"), _living("mlflow"), _living("worker-trainers")
    )
    wanted = plan(home, standing)
    assert wanted.processes == standing.processes
    assert wanted.prefect_url == standing.prefect_url
    assert wanted.deployed == "digest"


def test_a_dead_server_is_restarted_on_its_port_and_its_workers_stay(home: Home) -> None:
    standing = _stack(home, _dead("prefect-server"), _living("worker-trainers"))
    wanted = plan(home, standing)
    assert wanted.prefect_url == standing.prefect_url
    assert [process.name for process in wanted.processes] == ["worker-trainers"]
    assert wanted.deployed == ""


def test_workers_of_a_server_that_cannot_be_restarted_are_stopped(home: Home, taken: int) -> None:
    wanted = plan(
        home, _stack(home, _dead("prefect-server"), _living("worker-trainers"), port=taken)
    )
    assert wanted.prefect_url != f"http://{HOST}:{taken}/api"
    assert wanted.processes == ()


def test_a_server_named_by_the_environment_is_not_ours(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    wanted = plan(home, None)
    assert (wanted.prefect_url, wanted.own_server) == ("https://prefect.example/api", False)
    assert (wanted.mlflow_url, wanted.own_mlflow) == ("https://mlflow.example", False)


def test_our_own_address_in_the_environment_counts_as_ours(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{HOST}:{PREFECT_PORT}/api")
    assert plan(home, _stack(home, _living("prefect-server"))).own_server


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ASTRAFLOW_STORE", "s3://elsewhere/runs"),
        ("ASTRAFLOW_STORE_SECRET", "other-keys"),
        ("PREFECT_API_URL", "https://prefect.example/api"),
        ("MLFLOW_TRACKING_URI", "https://mlflow.example"),
    ],
)
def test_a_running_stack_is_not_moved(
    home: Home, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable} is now {value}.*astraflow down"):
        plan(home, _stack(home, _living("prefect-server")))


@pytest.mark.parametrize("started_with", ["", auth.digest("astraflow:another")])
def test_servers_with_another_secret_are_not_reused(home: Home, started_with: str) -> None:
    home.create()
    auth.create(home)
    standing = replace(_stack(home, _living("prefect-server")), auth_digest=started_with)
    with pytest.raises(
        ConfigError,
        match=f"not started with the auth string in {home.auth}; run `astraflow down`, then",
    ):
        plan(home, standing)
    assert plan(
        home, replace(standing, processes=(_dead("prefect-server"),))
    ).auth_digest == auth.digest(auth.create(home))
    elsewhere = replace(
        standing, own_server=False, own_mlflow=False, processes=(_living("worker-trainers"),)
    )
    assert plan(home, elsewhere).processes == elsewhere.processes


def test_a_dead_stack_may_be_moved(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", "s3://elsewhere/runs")
    assert plan(home, _stack(home, _dead("prefect-server"))).store_url == "s3://elsewhere/runs"


def test_a_running_stack_keeps_its_settings_by_default(home: Home) -> None:
    standing = replace(
        _stack(home, _living("worker-trainers"), own_server=False),
        prefect_url="https://prefect.example/api",
        store_url="s3://bucket/runs",
    )
    wanted = plan(home, standing)
    assert (wanted.prefect_url, wanted.own_server) == ("https://prefect.example/api", False)
    assert wanted.store_url == "s3://bucket/runs"
    assert wanted.processes == standing.processes


def test_a_port_of_a_foreign_process_is_not_reused(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "PREFECT_PORT", 47010)
    assert (
        plan(home, _stack(home, _dead("worker-trainers"), own_server=False)).prefect_url
        != f"http://{HOST}:{PREFECT_PORT}/api"
    )


def test_a_relative_store_path_is_the_same_in_every_folder(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASTRAFLOW_STORE", "here")
    assert plan(home, None).store_url == (tmp_path / "here").as_uri()
