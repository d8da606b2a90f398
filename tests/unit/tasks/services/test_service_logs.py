"""Log records of a service in Prefect's log of its flow run."""

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.context import FlowRunContext
from prefect.logging import handlers
from prefect.logging.handlers import APILogHandler

from tasks.services.service_logs import PACKAGES, Level, service_logs

LOGGER = logging.getLogger("trainer.service.trainer")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is sent to Prefect's server."""
    records: list[dict[str, Any]] = []
    monkeypatch.setattr(handlers, "_api_log_sink", records.append)
    return records


@pytest.fixture
def flow_run() -> Iterator[str]:
    """The id of a flow run whose context this thread has."""
    id = uuid4()
    context: Any = FlowRunContext
    with context.model_construct(flow_run=SimpleNamespace(id=id)):
        yield str(id)


@pytest.mark.parametrize(
    ("level", "messages"),
    [("DEBUG", ["d", "i", "w"]), ("INFO", ["i", "w"]), ("WARNING", ["w"])],
)
def test_records_are_sent_from_the_level_of_the_recipe_on(
    sent: list[dict[str, Any]], flow_run: str, level: Level, messages: list[str]
) -> None:
    with service_logs(level):
        LOGGER.debug("d")
        LOGGER.info("i")
        LOGGER.warning("w")
    assert [record["message"] for record in sent] == messages
    assert {record["flow_run_id"] for record in sent} == {flow_run}


def test_records_of_every_package_are_sent(sent: list[dict[str, Any]], flow_run: str) -> None:
    with service_logs("INFO"):
        for package in PACKAGES:
            logging.getLogger(f"{package}.module").info(package)
    assert [record["message"] for record in sent] == list(PACKAGES)


def test_records_of_a_thread_without_the_context_are_sent(
    sent: list[dict[str, Any]], flow_run: str
) -> None:
    with service_logs("INFO"):
        thread = threading.Thread(target=LOGGER.info, args=("from a thread",))
        thread.start()
        thread.join()
    assert [(record["message"], record["flow_run_id"]) for record in sent] == [
        ("from a thread", flow_run)
    ]


def test_a_record_is_sent_once_where_prefects_settings_name_the_package(
    sent: list[dict[str, Any]], flow_run: str
) -> None:
    shared = APILogHandler()
    for package in PACKAGES:
        logging.getLogger(package).addHandler(shared)
    try:
        with service_logs("INFO"):
            thread = threading.Thread(target=LOGGER.info, args=("once",))
            thread.start()
            thread.join()
        assert [record["message"] for record in sent] == ["once"]
        assert shared.filters == []
    finally:
        for package in PACKAGES:
            logging.getLogger(package).removeHandler(shared)


def test_levels_and_handlers_are_restored(sent: list[dict[str, Any]], flow_run: str) -> None:
    loggers = [logging.getLogger(package) for package in PACKAGES]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    with pytest.raises(KeyError), service_logs("DEBUG"):
        raise KeyError
    assert [(logger.level, list(logger.handlers)) for logger in loggers] == before


def test_outside_a_flow_run_nothing_is_sent(sent: list[dict[str, Any]]) -> None:
    with service_logs("INFO"):
        assert LOGGER.isEnabledFor(logging.INFO)
        LOGGER.warning("alone")
    assert sent == []
