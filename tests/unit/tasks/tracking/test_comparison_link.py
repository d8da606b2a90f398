"""The address of MLflow's comparison of runs."""

import json
from urllib.parse import parse_qs, unquote

import pytest

from tasks.tracking import mlflow_client
from tasks.tracking.comparison_link import comparison_link
from tasks.tracking.mlflow_sync import Tracker
from tests.support.runs.small_run import SmallRun

pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow


def test_the_page_names_the_parent_runs_in_their_order(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        run = SmallRun("comparison-link", run_id=name)
        assert Tracker(run.run, name, run.config, uri).sync()
    client = mlflow_client.client_of(uri)
    experiment = client.get_experiment_by_name("astraflow").experiment_id
    parents = {
        run.info.run_name: run.info.run_id
        for run in client.search_runs([experiment])
        if "astraflow.policy" not in run.data.tags
    }
    asked = [("astraflow", "b"), ("astraflow", "a"), ("astraflow", "c"), ("other", "a")]
    assert comparison_link(uri, asked) is None, "a database has no pages"
    monkeypatch.setattr(mlflow_client, "client_of", lambda _: client)
    link = comparison_link("http://me:secret@mlflow.example/", asked)
    assert link is not None
    assert link.startswith("http://mlflow.example/#/compare-runs?")
    fields = parse_qs(link.partition("?")[2])
    assert json.loads(unquote(fields["runs"][0])) == [parents["b"], parents["a"]]
    assert json.loads(unquote(fields["experiments"][0])) == [experiment]
    assert comparison_link("http://mlflow.example", asked[:1]) is None
