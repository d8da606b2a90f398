import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from deployments.paths import PROJECT, Home
from deployments.registration import work_pools
from deployments.stack import another_worker, commands, environment, up_down
from storage.errors import ConfigError


@pytest.mark.parametrize(
    ("gpus", "names"),
    [("", []), ("0", ["0"]), ("0, 1", ["0", "1"]), ("GPU-5f1a,MIG-0/1", ["GPU-5f1a", "MIG-0/1"])],
)
def test_gpus_are_names_separated_by_commas(gpus: str, names: list[str]) -> None:
    assert another_worker.check_arguments("rollout", "eu-west", gpus) == names


@pytest.mark.parametrize(
    ("pool", "region", "gpus", "message"),
    [
        ("trainer", "", "", "--pool trainer: use control, trainers, rollout"),
        ("trainers", "eu", "", "--region eu: only the pool rollout has regions"),
        ("rollout", "../eu", "", "cannot be the name of a region"),
        ("rollout", "", "0,", "--gpus .*: write numbers such as 0,1"),
        ("rollout", "", "-1", "--gpus .*: write numbers such as 0,1"),
        ("rollout", "", "1,0,1", "--gpus 1,0,1: names a GPU twice"),
    ],
)
def test_a_wrong_argument_is_named(pool: str, region: str, gpus: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        another_worker.check_arguments(pool, region, gpus)


def test_workers_of_one_machine_have_different_names() -> None:
    host = socket.gethostname()
    assert commands.worker_name("control") == f"control@{host}"
    command = commands.worker("rollout", "eu-west", ["2"], 1)
    assert command[-8:] == [
        *("--type", "process", "--name", f"rollout:eu-west:2@{host}"),
        *("--work-queue", "eu-west", "--limit", "1"),
    ]


def test_the_environment_of_a_worker_has_its_gpus_and_the_users_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    monkeypatch.delenv("ASTRAFLOW_LOGS", raising=False)
    monkeypatch.setenv("ASTRAFLOW_HOME", "relative")
    own = environment.of_worker(Home(tmp_path), ["2"], {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert own["ASTRAFLOW_LOGS"] == str(tmp_path / "logs")
    assert own["ASTRAFLOW_HOME"] == str(tmp_path)
    assert own["CUDA_VISIBLE_DEVICES"] == "2"
    assert own["OMP_NUM_THREADS"] == "7"
    assert own["DO_NOT_TRACK"] == "1"
    assert environment.of_worker(Home(tmp_path), [], {})["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_a_worker_starts_in_the_projects_folder_and_reacts_to_sigint_whatever_the_command_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command would replace this process. What a process inherits from such a handler is tested
    with a real one in `test_processes.py`.
    """
    replaced = []

    def execve(path: str, command: list[str], variables: Mapping[str, str]) -> None:
        replaced.append((path, command, signal.getsignal(signal.SIGINT), Path.cwd()))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(up_down, "adopt_server", lambda home: "http://127.0.0.1:9/api")
    monkeypatch.setattr(work_pools, "types", lambda url, names: {"rollout": "process"})
    monkeypatch.setattr(os, "execve", execve)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        another_worker.serve(Home(tmp_path), "rollout", "", "", None, lambda words: None)
    finally:
        signal.signal(signal.SIGINT, before)
    command = commands.worker("rollout", "", [], None)
    assert replaced == [(sys.executable, command, signal.default_int_handler, PROJECT)]
