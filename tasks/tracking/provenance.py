"""Where a run is from, as tags of its MLflow run: who started it, with which code, in which store.

Each tag is left out where its value is unknown; none may fail a run.
"""

import getpass
import importlib.metadata
import subprocess
from collections.abc import Mapping
from pathlib import Path

from prefect.runtime import flow_run

from storage import layout
from storage.run import runs
from storage.store.addresses import without_credentials
from storage.store.object_store import ObjectStore
from tasks.terminal_text import plain
from tasks.tracking.mlflow_client import STORE_TAG

GIT_TIMEOUT_S = 10
TAG_CHARACTERS_MAX = 1000
CODE = Path(__file__).resolve().parents[2]
"""The folder of the code that runs."""


def provenance(run: ObjectStore) -> Mapping[str, str]:
    """Return the tags of `run`, which the calling flow run supervises.

    `mlflow.user` and `mlflow.source.git.commit` are those that MLflow's tables of runs show.
    """
    deployment, store = runs.read_run(run).deployment, runs.store_of(run).address
    tags = {
        "mlflow.user": _user(),
        "mlflow.source.type": "JOB",
        "mlflow.source.name": deployment,
        "mlflow.source.git.commit": _commit(),
        "astraflow.release": importlib.metadata.version("astraflow"),
        "astraflow.deployment": deployment,
        "astraflow.prefect_run": without_credentials(flow_run.ui_url or ""),
        STORE_TAG: store,
        "astraflow.report": f"{without_credentials(run.url)}/{layout.REPORT}",
    }
    return {key: plain(value)[:TAG_CHARACTERS_MAX] for key, value in tags.items() if value}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


def _commit() -> str:
    """Return the commit of the code, with `-dirty` for changed files; empty outside a checkout."""
    command = ["git", "-C", str(CODE), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=GIT_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):  # no git on this machine
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
