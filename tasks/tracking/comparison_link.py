"""The address of MLflow's own comparison of several training runs."""

import json
from collections.abc import Sequence
from urllib.parse import quote

from storage.store.addresses import without_credentials
from tasks.tracking import mlflow_client
from tasks.tracking.mlflow_client import POLICY_TAG, RUN_TAG


def comparison_link(uri: str, runs: Sequence[tuple[str, str]]) -> str | None:
    """Return MLflow's page that compares the parent runs of `runs`: (experiment, run id).

    None where MLflow has no pages, or has fewer than two of the runs. Raises MlflowError.
    """
    if not uri.startswith("http"):
        return None
    with mlflow_client.translated():
        client = mlflow_client.client_of(uri)
        found: list[str] = []
        experiments: list[str] = []
        for experiment, run_id in runs:
            existing = client.get_experiment_by_name(experiment)
            if existing is None:
                continue
            same = client.search_runs([existing.experiment_id], f"tags.`{RUN_TAG}` = '{run_id}'")
            parents = [run.info.run_id for run in same if POLICY_TAG not in run.data.tags]
            found += parents[:1]
            if parents and existing.experiment_id not in experiments:
                experiments.append(existing.experiment_id)
    if len(found) < 2:
        return None
    listed = (quote(json.dumps(ids, separators=(",", ":"))) for ids in (found, experiments))
    page = "#/compare-runs?runs={}&experiments={}".format(*listed)
    return f"{without_credentials(uri).rstrip('/')}/{page}"
