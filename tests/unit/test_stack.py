import sys
import time
from pathlib import Path

import pytest

from deployments import processes, record, stack
from deployments.home import Home
from deployments.processes import MARK
from deployments.record import SERVER, Stack
from storage import heartbeats, runs
from storage.heartbeats import Pulse
from storage.objects import open_store
from tasks import recipes

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "ASTRAFLOW_STORE"):
        monkeypatch.delenv(name, raising=False)
    made = Home(tmp_path / "home")
    made.create()
    return made


def _sleeper(home: Home, name: str) -> processes.Process:
    return processes.start(name, SLEEP, {MARK: str(home.root)}, home.logs / f"{name}.log", home.root)


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
        stack.down(home, said.append)
    assert said[0].startswith("the Prefect server does not answer, so these runs are stopped without being cancelled")
    assert "interrupted: mine;" in said[0]
    assert not processes.is_alive(server)
    assert not home.auth.exists()


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
