"""What the stack runs: the command of each of its processes."""

import socket
import sys

from deployments.paths import Home

MLFLOW_NICENESS = "5"
"""MLflow's start takes seconds of CPU that nobody waits for; services of a run go first."""


def prefect_server(port: int) -> list[str]:
    return [sys.executable, "-m", "deployments.servers.prefect_server", "--port", str(port)]


def mlflow_server(home: Home, port: int) -> list[str]:
    return [
        *("nice", "-n", MLFLOW_NICENESS),
        *(sys.executable, "-m", "deployments.servers.mlflow_server"),
        *("--folder", str(home.mlflow), "--port", str(port)),
    ]


def worker(pool: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        pool,
        "--type",
        "process",
        "--name",
        worker_name(pool),
    ]


def worker_name(pool: str) -> str:
    """Stable over restarts, so that Prefect does not list the dead ones of the past; unique among
    machines.
    """
    return f"{pool}@{socket.gethostname()}"
