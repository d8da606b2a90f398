"""What MLflow's own server finds in a shared folder of temporary files when it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.paths import Home
from deployments.servers import auth
from deployments.stack import environment, readiness
from storage.machine.ports import HOST, unusual_port
from tests.support.patience import until


@pytest.mark.slow
def test_a_link_in_a_shared_folder_does_not_make_the_server_delete_folders(tmp_path: Path) -> None:
    """MLflow deletes old folders in `mlflow-assistant-sessions/sandbox-home` of its TMPDIR."""
    home, shared, old = Home(tmp_path / "home"), tmp_path / "shared", tmp_path / "work" / "thesis"
    home.create()
    auth.create(home)
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    (shared / "mlflow-assistant-sessions").mkdir(parents=True)
    (shared / "mlflow-assistant-sessions" / "sandbox-home").symlink_to(old.parent)
    port = unusual_port()
    command = ["deployments.servers.mlflow_server", "--folder", str(home.mlflow)]
    variables = {**environment.of_mlflow_server(home), "TMPDIR": str(shared)}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", str(port)],
            env=variables,
            stdout=log,
            stderr=log,
        )
    try:
        until(
            lambda: server.poll() is not None or readiness.responds(f"http://{HOST}:{port}/health"),
            0.2,
        )
        assert server.poll() is None, (tmp_path / "log").read_text()[-4000:]
    finally:
        server.terminate()
        server.wait()
    assert old.is_dir()
    assert (home.mlflow / "tmp").stat().st_mode & 0o777 == 0o700
