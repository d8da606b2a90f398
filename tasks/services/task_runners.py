"""Make Prefect's task runner of `data.task_runner`: threads, processes, a Dask or a Ray cluster."""

import atexit
import multiprocessing
import os
import secrets
import threading
from contextlib import ExitStack
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from data_ops.config import DaskRunner, ProcessRunner, RayRunner, TaskRunnerConfig
from storage.errors import ConfigError
from storage.import_path import ALLOW_VARIABLE, is_allowed
from storage.machine.cpus import num_cpus
from storage.machine.temporary_folders import temporary_folder

DASK_PREFIX, RAY_PREFIX = "astraflow-dask-", "astraflow-ray-"
RAY_TOKEN: Final = secrets.token_hex(32)
"""Of all Ray clusters of this process, one for each window: Ray keeps the first that it reads."""
RAY_FOLDERS: Final = Path("/tmp")
"""Not TMPDIR, which may be long: paths of Ray's sockets add 93 bytes, and have at most 107."""
OWN_DASK_CLUSTER: Final[dict[str, Any]] = {
    "security": True,
    "dashboard_address": "127.0.0.1:0",
    "config": {"distributed.worker.profile.enabled": False},
}
"""A cluster that the dataflow starts: TLS with certificates of its own, since who reaches a
scheduler runs code there; no port on other interfaces (the default is 0.0.0.0:8787); no profiler,
which can block a worker for ever in Python 3.11 (https://github.com/dask/distributed/issues/8616).
"""


def make_task_runner(config: TaskRunnerConfig) -> TaskRunner[Any]:
    """Return the task runner, not yet started.

    Raises ConfigError when its package is not installed, and for the address of a cluster where
    ASTRAFLOW_IMPORT_ALLOW does not have the package: who answers there can run code here.
    """
    has_address = isinstance(config, DaskRunner | RayRunner) and config.address
    if has_address and not is_allowed(config.name):
        raise ConfigError(
            f"data.task_runner: the cluster at the address of {config.name} can run code here, and "
            f"{ALLOW_VARIABLE} does not allow that; add {config.name} there if you trust the "
            "recipe, or leave the address out"
        )
    if isinstance(config, ProcessRunner):
        return ProcessPoolTaskRunner(
            max_workers=config.workers or num_cpus(), initializer=exit_with_parent
        )
    if isinstance(config, DaskRunner):
        try:
            from prefect_dask.task_runners import DaskTaskRunner
        except ImportError as error:
            raise _missing(config.name, error) from error
        own = None if config.address else _own_dask_cluster()
        dask: TaskRunner[Any] = DaskTaskRunner(address=config.address, cluster_kwargs=own)
        return dask
    if isinstance(config, RayRunner):
        try:
            from prefect_ray.task_runners import RayTaskRunner
        except ImportError as error:
            raise _missing(config.name, error) from error
        own = None if config.address else _own_ray_cluster()
        # Without an address Ray would take a cluster of any user of the machine.
        ray: TaskRunner[Any] = RayTaskRunner(config.address or "local", init_kwargs=own)
        return ray
    return ThreadPoolTaskRunner()


def _own_dask_cluster() -> dict[str, Any]:
    """Return the settings of a cluster whose files are in a folder of its own.

    Dask imports from that folder.
    """
    import dask

    dask.config.set({"temporary-directory": _own_folder(DASK_PREFIX)})
    return OWN_DASK_CLUSTER


def _own_ray_cluster() -> dict[str, Any]:
    """Return the settings of a cluster that admits the processes of this one alone.

    Ray reads the token from the environment before it looks for a file, which others may read. Ray
    opens the folder that it is given to every user, so that it gets one inside this user's own.
    """
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=RAY_TOKEN)
    return {"_temp_dir": f"{_own_folder(RAY_PREFIX, RAY_FOLDERS)}/r"}


def _own_folder(prefix: str, parent: Path | None = None) -> str:
    """Return a folder of this user alone, which is deleted when this process ends.

    The defaults are folders in /tmp. Another user may have made Dask's, and may write into Ray's.
    """
    temporary = ExitStack()
    atexit.register(temporary.close)
    return str(temporary.enter_context(temporary_folder(prefix, parent)))


def exit_with_parent() -> None:
    """End this worker process when its parent has ended, even by SIGKILL.

    A worker of a process pool waits for work on a pipe whose other end it holds itself, so it would
    wait for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _missing(name: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"data.task_runner: {name} cannot be used where the dataflow runs ({error}); install its "
        f"extra: pip install 'astraflow[{name}]'"
    )
