import sys
from pathlib import Path

import psutil
import pytest

from deployments.paths import Home
from deployments.stack import processes, startup
from deployments.stack.processes import MARK
from deployments.stack.state import Stack

SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]


def test_a_process_whose_record_cannot_be_written_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    stack = Stack(
        prefect_url="http://127.0.0.1:4200/api",
        mlflow_url="http://127.0.0.1:5000",
        store_url=home.store.as_uri(),
        own_server=True,
    )
    started: list[processes.Process] = []
    start = processes.start

    def noted(*args: object) -> processes.Process:
        started.append(start(*args))  # type: ignore[arg-type]
        home.new_record.mkdir()  # from now on the record cannot be written
        return started[0]

    monkeypatch.setattr(processes, "start", noted)
    with pytest.raises(IsADirectoryError):
        startup._start(home, stack, "sleeper", SLEEP, {MARK: str(home.root)}, 0o077)
    assert not processes.is_alive(started[0])
    assert not psutil.pid_exists(started[0].pid)
