from dataclasses import replace
from pathlib import Path

import pytest

from deployments.paths import Home
from deployments.servers import auth
from deployments.stack import pages
from deployments.stack.state import Stack

OWN = Stack(
    prefect_url="http://127.0.0.1:4200/api",
    mlflow_url="http://127.0.0.1:5000",
    store_url="file:///store",
    own_server=True,
)
ELSEWHERE = Stack(
    prefect_url="https://prefect.example/api",
    mlflow_url="https://mlflow.example",
    store_url="s3://bucket",
    own_server=False,
    own_mlflow=False,
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    made.create()
    return made


def test_pages_of_our_servers_log_the_browser_in(home: Home) -> None:
    password = auth.create(home).partition(":")[2]
    flow_run, tracking = pages.prefect(home, OWN, "/runs/flow-run/1"), pages.mlflow(home, OWN)
    assert flow_run.startswith("http://127.0.0.1:4200/open#")
    assert flow_run.endswith("/runs/flow-run/1")
    assert tracking.startswith("http://127.0.0.1:5000/open#")
    assert password not in flow_run + tracking


def test_pages_of_other_servers_are_shown_unchanged(home: Home) -> None:
    auth.create(home)
    assert (
        pages.prefect(home, ELSEWHERE, "/runs/flow-run/1")
        == "https://prefect.example/runs/flow-run/1"
    )
    assert pages.prefect(home, ELSEWHERE) == "https://prefect.example"
    assert pages.mlflow(home, ELSEWHERE) == "https://mlflow.example"
    assert pages.mlflow(home, replace(ELSEWHERE, own_server=True)) == "https://mlflow.example"
