"""Fixtures of the tests that use MLflow: a real one, on a database file; and of those that run
Prefect tasks: a server for the tests of one file.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.testing.utilities import prefect_test_harness

from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=int(PATIENCE_S)):
        yield


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An MLflow database with its tables: creating them takes seconds, copying them almost no time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with warnings.catch_warnings():  # of MLflow's database layer
        warnings.simplefilter("ignore")
        MlflowClient(tracking_uri=f"sqlite:///{file}").search_experiments()
    return file.read_bytes()


@pytest.fixture
def uri(tmp_path: Path, empty_database: bytes) -> str:
    (tmp_path / "mlflow.db").write_bytes(empty_database)
    return f"sqlite:///{tmp_path / 'mlflow.db'}"
