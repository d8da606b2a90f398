"""The process of one flow run: Prefect's engine, with its output in a log file.

A worker discards the output of its processes: forwarding it costs CPU time, and a process would
end with its worker. The output of a process that ends before it can log to Prefect, or by a signal,
is in `logs/flows/{flow run id}.log`. Without ASTRAFLOW_LOGS, as with a worker that Prefect's own
command has started, there is no file.
"""

import faulthandler
import logging
import os
import runpy
from pathlib import Path

from deployments import shadowing

shadowing.refuse()

from deployments.paths import open_regular  # noqa: E402  # it imports a package that may be shadowed

LOGGING = {
    "PREFECT_LOGGING_EXTRA_LOGGERS": "storage,data_ops,rollout,trainer,tasks",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "WARNING",
}
"""Prefect's settings of logs, wherever a worker was started: AstraFlow's records are sent, those of
threads without a flow run are dropped, and so is the line "finished in state Completed" of a task,
which would be one more row for the server and repeats the task's state.
"""


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


if __name__ == "__main__":
    if (folder := os.environ.get("ASTRAFLOW_LOGS")) and (
        flow_run := os.environ.get("PREFECT__FLOW_RUN_ID")
    ):
        _redirect_output(Path(folder) / "flows" / f"{flow_run}.log")
    faulthandler.enable()
    for name, value in LOGGING.items():
        os.environ.setdefault(name, value)
    for package in filter(None, os.environ["PREFECT_LOGGING_EXTRA_LOGGERS"].split(",")):
        # Prefect forwards their records, and leaves their level at WARNING
        logging.getLogger(package).setLevel(logging.INFO)
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
