import os
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deployments.cli.doctor import machine as doctor
from deployments.paths import Home
from deployments.servers import auth
from deployments.stack import plan, state
from deployments.stack.machine import Machine
from deployments.stack.processes import Process
from deployments.stack.state import Stack
from deployments.watchdog import restarts
from storage.machine.ports import HOST
from tests.support.stores.ordinary_user import as_ordinary_user


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("PREFECT_API_URL", "ASTRAFLOW_STORE"):
        monkeypatch.delenv(name, raising=False)
    return Home(tmp_path / "home")


def test_each_problem_on_this_machine_has_a_remedy(
    home: Home,
) -> None:
    result = {check.name: check for check in doctor.examine(home)}
    assert {result[name].verdict for name in ("python", "packages", "store", "prefect")} == {"ok"}
    assert result["bf16"].verdict in ("ok", "warn")
    assert all(check.fix for check in result.values() if check.verdict != "ok")


def test_a_taken_port_gives_a_warning(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(1)
        monkeypatch.setattr(plan, "PREFECT_PORT", listener.getsockname()[1])
        assert next(doctor._ports(home)).verdict == "warn"


def test_a_dead_process_of_the_stack_is_reported_and_ports_of_the_others_are_the_stacks(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.create()
    assert list(doctor._processes(home)) == []
    me = Process("prefect-server", os.getpid(), psutil.Process().create_time(), "")
    dead = Process("worker-rollout", os.getpid(), 1.0, "")
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        monkeypatch.setattr(plan, "PREFECT_PORT", port)
        stack = Stack(
            prefect_url=f"http://{HOST}:{port}/api",
            mlflow_url=f"http://{HOST}:2",
            store_url=home.store.as_uri(),
            own_server=True,
            processes=(me,),
        )
        state.save(home, stack)
        assert list(doctor._processes(home)) == [doctor.Check("stack", "ok", "all 1 processes run")]
        state.save(home, stack.with_process(dead))
        assert list(doctor._processes(home)) == [
            doctor.Check("stack", "warn", "ended: worker-rollout", "astraflow up")
        ]
        assert next(doctor._ports(home)).finding == "used by the running stack"
        state.save(home, replace(stack, processes=(dead,)))
        assert next(doctor._ports(home)).finding == "in use by another program"
    state.save(home, replace(stack.with_process(dead), processes=(dead,), machine=Machine("other")))
    assert [check.verdict for check in doctor._processes(home)] == ["fail"]


def test_an_unreachable_prefect_server_fails_the_check(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{HOST}:1/api")
    check = doctor._prefect(home)
    assert check.verdict == "fail", check
    assert "unset PREFECT_API_URL" in check.fix


def test_a_home_readable_by_others_fails_the_check_until_it_is_private(home: Home) -> None:
    assert doctor._private(home).verdict == "ok"
    home.create()
    assert doctor._private(home).verdict == "ok"
    home.logs.chmod(0o755)
    check = doctor._private(home)
    assert (check.verdict, check.finding) == ("fail", f"other users have access to {home.logs}")
    home.create()
    assert doctor._private(home).finding == f"only you have access to {home.root}"


def test_restarts_by_the_watchdog_are_reported_and_a_process_that_keeps_ending_is_a_warning(
    home: Home,
) -> None:
    home.create()
    me = Process("mlflow", os.getpid(), psutil.Process().create_time(), "")
    stack = Stack(
        prefect_url=f"http://{HOST}:1/api",
        mlflow_url=f"http://{HOST}:2",
        store_url=home.store.as_uri(),
        own_server=True,
        processes=(me,),
    )
    state.save(home, stack)
    counts = {"mlflow": restarts.Restarts(ends=5, in_a_row=2)}
    restarts.save(home, counts)
    found = "; the watchdog has started again: mlflow 5 times"
    assert list(doctor._processes(home)) == [
        doctor.Check("stack", "ok", f"all 1 processes run{found}")
    ]
    restarts.save(home, {"mlflow": restarts.Restarts(ends=5, in_a_row=3)})
    assert list(doctor._processes(home)) == [
        doctor.Check("stack", "warn", f"all processes run{found}", f"read {home.logs}/mlflow.log")
    ]
    state.save(home, stack.with_process(Process("worker-rollout", os.getpid(), 1.0, "")))
    assert list(doctor._processes(home)) == [
        doctor.Check("stack", "warn", f"ended: worker-rollout{found}", "astraflow up")
    ]


def test_a_running_stack_without_its_secret_fails_the_check(home: Home) -> None:
    home.create()
    me = Process("prefect-server", os.getpid(), psutil.Process().create_time(), "")
    url = home.store.as_uri()
    state.save(
        home,
        Stack(
            prefect_url=f"http://{HOST}:1/api",
            mlflow_url=f"http://{HOST}:2",
            store_url=url,
            own_server=True,
            processes=(me,),
            ready=True,
        ),
    )
    assert doctor._private(home).finding == f"the stack is running, but {home.auth} is missing"
    auth.create(home)
    assert doctor._private(home).verdict == "ok"
    home.auth.write_text("")
    assert doctor._private(home).verdict == "fail"


def test_an_address_with_a_credential_fails_the_check_without_a_request(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://me:s3cr3t@{HOST}:1/api")
    assert [(check.name, check.verdict) for check in doctor._addresses()] == [
        ("PREFECT_API_URL", "fail")
    ]
    assert doctor._prefect(home).finding == f"http://{HOST}:1/api was not checked"


@pytest.mark.parametrize("url", ["http://[", "\x1b[2J", "http://\u202e/api", "nonsense"])
def test_an_invalid_address_fails_the_check_without_a_request(
    home: Home, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert doctor._prefect(home) == doctor.Check(
        "prefect", "fail", f"{url} was not checked", "see PREFECT_API_URL"
    )
    (check,) = doctor._addresses()
    assert check.finding == (
        f"PREFECT_API_URL={url} is not the address of a server; write it as http://HOST:4200/api, or "
        "unset it"
    )


def test_an_unwritable_folder_fails_the_check(tmp_path: Path) -> None:
    def work() -> None:
        tmp_path.chmod(0o500)
        assert doctor._disk(Home(tmp_path / "home")).verdict == "fail"

    as_ordinary_user(tmp_path, work)


def test_a_missing_store_url_fails_the_check_with_the_variable_to_set(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", "ftp://nowhere")
    check = doctor._store(home)
    assert (check.verdict, check.fix) == ("fail", "correct ASTRAFLOW_STORE or its credentials")


def test_the_check_does_not_create_a_store_in_a_missing_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASTRAFLOW_STORE", raising=False)
    home = Home(tmp_path / "home")
    assert doctor._store(home) == doctor.Check(
        "store", "ok", f"`astraflow up` creates {home.store}"
    )
    assert not home.root.exists()
