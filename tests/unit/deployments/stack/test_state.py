import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.paths import Home
from deployments.stack import state
from deployments.stack.processes import Process
from deployments.stack.state import Stack

STACK = Stack(
    prefect_url="http://127.0.0.1:4200/api",
    mlflow_url="http://127.0.0.1:5000",
    store_url="file:///tmp/store",
    own_server=True,
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.create()
    return made


def test_a_saved_record_is_loaded(home: Home) -> None:
    stack = STACK.with_process(Process("mlflow", 12, 3.5, "/tmp/log"))
    assert state.save(home, stack) == stack
    assert state.load(home) == stack
    assert stat.S_IMODE(home.record.stat().st_mode) == 0o600
    assert stack.ui_url == "http://127.0.0.1:4200"


@pytest.mark.parametrize(
    "body", ["", "{", "[]", '{"format": 0}', '{"format": 1, "processes": 3}', '{"format": 1}']
)
def test_an_unreadable_record_counts_as_none(home: Home, body: str) -> None:
    home.record.write_text(body)
    assert state.load(home) is None


@pytest.mark.parametrize(
    ("field", "url"),
    [
        ("prefect_url", "http://127.0.0.1:99999/api"),
        ("prefect_url", "http://[/api"),
        ("prefect_url", ""),
        ("mlflow_url", "http://127.0.0.1:x"),
    ],
)
def test_a_record_with_an_address_of_no_server_counts_as_damaged(
    home: Home, field: str, url: str
) -> None:
    changed: dict[str, Any] = {field: url}
    state.save(home, replace(STACK, **changed))
    assert state.load(home) is None
    assert state.exists(home)


def test_a_record_with_an_external_tracking_database_is_loaded(home: Home) -> None:
    stack = replace(STACK, own_mlflow=False, mlflow_url="sqlite:////data/mlflow.db")
    state.save(home, stack)
    assert state.load(home) == stack


def test_a_record_of_an_earlier_release_is_loaded(home: Home) -> None:
    home.record.write_text(
        '{"format": 1, "prefect_url": "http://127.0.0.1:4200/api", '
        '"mlflow_url": "http://127.0.0.1:5000", "store_url": "file:///tmp/store", '
        '"own_server": true, '
        '"processes": [{"name": "mlflow", "pid": 12, "created_s": 3.5, "log": "/tmp/log"}]}'
    )
    assert state.load(home) == STACK.with_process(Process("mlflow", 12, 3.5, "/tmp/log"))


def test_a_missing_record_counts_as_none(home: Home) -> None:
    assert state.load(home) is None
    state.delete(home)


def test_only_a_running_process_is_found_by_name() -> None:
    me = Process("mlflow", os.getpid(), psutil.Process().create_time(), "")
    assert STACK.with_process(me).process("mlflow") == me
    stale = Process("mlflow", os.getpid(), me.created_s - 1000, "")
    assert STACK.with_process(me).with_process(stale).process("mlflow") is None
    assert STACK.process("prefect-server") is None


def test_a_pipe_in_place_of_the_record_counts_as_damaged(home: Home) -> None:
    os.mkfifo(home.record)
    assert state.load(home) is None
    assert state.exists(home)
    state.delete(home)
    assert not state.exists(home)
