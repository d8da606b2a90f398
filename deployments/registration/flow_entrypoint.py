"""The process of one flow run: Prefect's engine, with its output in a log file.

A worker discards the output of its processes: forwarding it costs CPU time, and a process would
end with its worker. The output of a process that ends before it can log to Prefect, or by a signal,
is in `logs/flows/{flow run id}.log`. Without ASTRAFLOW_LOGS, as on a remote worker, there is no
file.
"""

import faulthandler
import logging
import os
import runpy
from pathlib import Path

from deployments.paths import open_regular


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
    for package in filter(None, os.environ.get("PREFECT_LOGGING_EXTRA_LOGGERS", "").split(",")):
        # Prefect forwards their records, and leaves their level at WARNING
        logging.getLogger(package).setLevel(logging.INFO)
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
