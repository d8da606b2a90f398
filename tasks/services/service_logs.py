"""Log records of AstraFlow's packages in Prefect's log of the flow run, and which of them.

Prefect sends the records of a logger only where its own settings name it, which a worker that was
started by hand does not have; and of a thread only with a flow run's context. Here both are
independent of how the flow run was started.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler
from prefect.runtime import flow_run

PACKAGES = ("data_ops", "rollout", "storage", "tasks", "trainer")

Level = Literal["DEBUG", "INFO", "WARNING"]


@contextmanager
def service_logs(level: Level) -> Iterator[None]:
    """Send records from `level` on, of all threads of the block, to the current flow run's log.

    Outside a flow run only the level is set.
    """
    current = flow_run.get_id()

    def with_flow_run(record: logging.LogRecord) -> bool:
        if FlowRunContext.get() is None and TaskRunContext.get() is None:
            record.flow_run_id = current  # a thread without the context
        return True

    loggers = [logging.getLogger(package) for package in PACKAGES]
    levels = [logger.level for logger in loggers]
    added = APILogHandler()
    filtered: set[logging.Handler] = set()
    for logger in loggers:
        logger.setLevel(level)
        if current is None:
            continue
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            logger.addHandler(added)
        for handler in logger.handlers:
            if isinstance(handler, APILogHandler):
                handler.addFilter(with_flow_run)
                filtered.add(handler)
    try:
        yield
    finally:
        for handler in filtered:
            handler.removeFilter(with_flow_run)
        for logger, before in zip(loggers, levels, strict=True):
            logger.removeHandler(added)
            logger.setLevel(before)
