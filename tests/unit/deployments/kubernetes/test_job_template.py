"""The job template and the objects of a cluster, compared with what Prefect's worker for Kubernetes
has by default. No cluster is needed.
"""

import json
import re
from typing import Any

import yaml

from deployments.registration import pools, work_pools
from tests.support.checkout import ROOT

FOLDER = ROOT / "deployments" / "kubernetes"
TEMPLATE = json.loads((FOLDER / "job_template.json").read_text())
VARIABLES = TEMPLATE["variables"]["properties"]


def default_template() -> Any:
    import prefect.server.api.collections_data.views as views

    path = f"{next(iter(views.__path__))}/aggregate-worker-metadata.json"
    with open(path) as file:
        return json.load(file)["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]


def test_each_placeholder_is_a_variable_and_each_variable_of_ours_is_used() -> None:
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(TEMPLATE["job_configuration"])))
    assert used <= set(VARIABLES)
    assert set(VARIABLES) - used == set()


def test_it_extends_the_default_of_prefects_worker() -> None:
    default = default_template()
    assert set(default["variables"]["properties"]) < set(VARIABLES)
    ours, theirs = TEMPLATE["job_configuration"], default["job_configuration"]
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {"job_manifest"}
    added = {"secret_name", "gpus", "shm_size", "grace_period_s", "node_selector", "tolerations"}
    assert set(VARIABLES) - set(default["variables"]["properties"]) == added


def test_registration_sets_only_its_own_part() -> None:
    changed = work_pools.with_own_part(
        TEMPLATE, "kubernetes", "python -m x", {"ASTRAFLOW_STORE": "s3://b"}, ()
    )
    variables = changed["variables"]["properties"]
    assert variables["command"]["default"] == "python -m x"
    assert variables["env"]["default"] == {"ASTRAFLOW_STORE": "s3://b"}
    assert changed["job_configuration"] == TEMPLATE["job_configuration"]
    for name in set(VARIABLES) - {"command", "env"}:
        assert variables[name] == VARIABLES[name]
    gpus = work_pools.with_defaults("rollout", "kubernetes", TEMPLATE, {"gpus": 1})
    assert gpus["variables"]["properties"]["gpus"]["default"] == 1


def test_the_worker_of_the_cluster_may_create_jobs_and_serves_a_pool_of_ours() -> None:
    objects = list(yaml.safe_load_all((FOLDER / "cluster.yaml").read_text()))
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert {each["metadata"]["namespace"] for each in objects} == {
        VARIABLES["namespace"]["default"]
    }
    assert ("ServiceAccount", VARIABLES["service_account_name"]["default"]) in found
    rules = found["Role", "prefect-worker"]["rules"]
    assert {"create", "delete"} <= set(rules[0]["verbs"])
    assert rules[0]["resources"] == ["jobs"]
    deployment = found["Deployment", "prefect-worker-rollout"]["spec"]["template"]["spec"]
    account, container = deployment["serviceAccountName"], deployment["containers"][0]
    bound = found["RoleBinding", "prefect-worker"]["subjects"][0]
    assert (bound["kind"], bound["name"]) == ("ServiceAccount", account)
    assert container["args"][-1] in pools.NAMES
    secret = container["envFrom"][0]["secretRef"]["name"]
    assert secret == VARIABLES["secret_name"]["default"]
