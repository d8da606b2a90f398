"""The command line of each process of the stack."""

import socket
import sys
from collections.abc import Sequence

from deployments.paths import Home

MLFLOW_NICENESS = "5"
"""Starting MLflow takes seconds of CPU time, and the services of a run have priority."""


def prefect_server(port: int) -> list[str]:
    """Return the command of the Prefect server."""
    return [sys.executable, "-m", "deployments.servers.prefect_server", "--port", str(port)]


def mlflow_server(home: Home, port: int) -> list[str]:
    """Return the command of the MLflow server."""
    return [
        *("nice", "-n", MLFLOW_NICENESS),
        *(sys.executable, "-m", "deployments.servers.mlflow_server"),
        *("--folder", str(home.mlflow), "--port", str(port)),
    ]


def watchdog() -> list[str]:
    """Return the command of the watchdog."""
    return [sys.executable, "-m", "deployments.watchdog"]


def worker(
    pool: str, region: str = "", gpus: Sequence[str] = (), limit: int | None = None
) -> list[str]:
    """Return the command of the worker of a work pool.

    Args:
        pool: name of the pool.
        region: its work queue that the worker serves; empty: all.
        gpus: names of the GPUs that its flow runs may use; they only distinguish workers here.
        limit: most flow runs at a time; None: any number.
    """
    return [
        *(sys.executable, "-m", "prefect", "worker", "start"),
        *("--pool", pool, "--type", "process", "--name", worker_name(pool, region, gpus)),
        *(("--work-queue", region) if region else ()),
        *(("--limit", str(limit)) if limit is not None else ()),
    ]


def worker_name(pool: str, region: str = "", gpus: Sequence[str] = ()) -> str:
    """Return the worker's name: unique among machines, and the same after a restart, so that
    Prefect does not list former workers as offline.
    """
    part = ":".join(each for each in (pool, region, "+".join(gpus)) if each)
    return f"{part}@{socket.gethostname()}"
