"""The process of one flow run: Prefect's engine, with everything it prints in a log file of its
own.

A worker throws away what its processes print (streaming it costs CPU, and binds their lives to the
worker's). A process that dies before it can log to Prefect, or from a signal, would leave no word;
here its last words stay in `logs/flows/{flow run id}.log`. Without ASTRAFLOW_LOGS, as on a worker
far away, this is the engine and nothing else.
"""

import faulthandler
import logging
import os
import runpy
from pathlib import Path


def _print_into(log: Path) -> None:
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


if __name__ == "__main__":
    if (folder := os.environ.get("ASTRAFLOW_LOGS")) and (
        flow_run := os.environ.get("PREFECT__FLOW_RUN_ID")
    ):
        _print_into(Path(folder) / "flows" / f"{flow_run}.log")
    faulthandler.enable()
    for room in filter(None, os.environ.get("PREFECT_LOGGING_EXTRA_LOGGERS", "").split(",")):
        logging.getLogger(room).setLevel(
            logging.INFO
        )  # Prefect takes what they say, but leaves them at WARNING
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
