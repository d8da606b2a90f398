"""An MLflow server in its own process, with the command, the settings and the secrets of
`docker/compose.yaml`, at other addresses.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deployments.stack import readiness
from storage.machine.ports import HOST, unusual_port
from tests.support import compose
from tests.support.patience import until


@contextmanager
def mlflow_server(
    folder: Path, database: str, environment: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """The variables of a client of the server, whose process has these variables beside its own."""
    port = unusual_port()
    composed = compose.compose(compose.new_env())
    service, settings = (
        composed["services"]["mlflow"],
        composed["configs"]["mlflow-auth"]["content"],
    )
    theirs = service["environment"]["MLFLOW_BACKEND_STORE_URI"]
    (folder / "auth.ini").write_text(settings.replace(theirs, database))
    addresses = {
        "MLFLOW_BACKEND_STORE_URI": database,
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
    }
    changed = {
        "--host": HOST,
        "--port": str(port),
        "--workers": "1",
        "--artifacts-destination": str(folder / "artifacts"),
    }
    options = dict(option.split("=", 1) for option in service["command"][2:]) | changed
    command = [sys.executable, "-m", *service["command"][:2]]
    address = f"http://{HOST}:{port}"
    with (folder / "mlflow.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *(f"{name}={value}" for name, value in options.items())],
            env={**environment, **service["environment"], **addresses},
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
    try:
        until(lambda: server.poll() is not None or readiness.responds(f"{address}/health"), 0.2)
        assert server.poll() is None, (folder / "mlflow.log").read_text()[-4000:]
        yield {
            "MLFLOW_TRACKING_URI": address,
            "MLFLOW_TRACKING_USERNAME": service["environment"]["MLFLOW_AUTH_ADMIN_USERNAME"],
            "MLFLOW_TRACKING_PASSWORD": service["environment"]["MLFLOW_AUTH_ADMIN_PASSWORD"],
        }
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
