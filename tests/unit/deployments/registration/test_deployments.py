import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema

from deployments.paths import PROJECT
from deployments.registration import deployments, pools
from deployments.registration.deployments import DEPLOYMENTS, Deployment
from storage import layout
from storage.errors import ConfigError
from tasks.recipes import loader
from tasks.supervision.members import members_of


def test_each_deployment_has_a_pool_with_a_worker() -> None:
    assert {item.pool for item in DEPLOYMENTS} == set(pools.load())
    assert max(Counter((item.flow, item.name) for item in DEPLOYMENTS).values()) == 1


@pytest.mark.parametrize("recipe", ["multi_policy_tiny", "single_policy_tiny"])
def test_each_member_of_an_embedded_run_can_be_launched_in_any_region(recipe: str) -> None:
    names = {f"{item.flow}/{item.name}" for item in DEPLOYMENTS}
    config = loader.load(
        recipe, {"rollout.regions.mars": {"workers": 1, "mirror": "memory://mars"}}
    )
    assert {member.deployment for member in members_of(config)} <= names


def test_prefects_own_file_describes_the_same_deployments() -> None:
    described = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    wanted = [
        {
            "name": item.name,
            "entrypoint": item.entrypoint,
            "description": item.description,
            "work_pool": {"name": item.pool},
            "tags": [deployments.TAG],
            "enforce_parameter_schema": True,
        }
        | ({"parameters": dict(item.parameters)} if item.parameters else {})
        | (
            {
                "schedules": [
                    {
                        "cron": item.cron,
                        "timezone": "UTC",
                        "active": item.cron_active,
                        "slug": item.name,
                    }
                ]
            }
            if item.cron
            else {}
        )
        for item in DEPLOYMENTS
    ]
    assert described == wanted


def test_no_module_has_the_name_of_a_region() -> None:
    """Docstrings may use one as an example; `us-east-1` is a region of AWS and not of this project."""
    recipes = (PROJECT / "recipes").glob("*.yaml")
    regions = {
        name
        for recipe in recipes
        for name in yaml.safe_load(recipe.read_text())["rollout"]["regions"]
    }
    assert regions == {"us-east", "eu-west"}
    named = re.compile(rf"({'|'.join(sorted(regions))})(?!-\d\b)")
    rooms = (
        "storage",
        "data_ops",
        "rollout",
        "trainer",
        "tasks",
        "flows",
        "deployments",
        "benchmarks",
    )
    modules = [module for room in rooms for module in sorted((PROJECT / room).rglob("*.py"))]
    assert len(modules) > 100
    assert [module for module in modules if any(map(named.search, _literals(module)))] == []


def _literals(module: Path) -> Iterator[str]:
    """The string literals of a module without its docstrings."""
    tree = ast.parse(module.read_text())
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in statements
        ):
            yield node.value


def test_each_flow_file_can_be_deployed_and_accepts_its_deployments_parameters() -> None:
    deployments.import_flows()
    for item in DEPLOYMENTS:
        known = parameter_schema(deployments.flow_of(item)).model_dump_for_openapi()["properties"]
        assert set(item.parameters) <= set(known)


def test_the_nightly_run_is_registered_inactive() -> None:
    nightly = next(item for item in DEPLOYMENTS if item.name == "nightly")
    assert (nightly.cron, nightly.cron_active) == ("0 2 * * *", False)


def test_the_nightly_gc_is_registered_inactive_as_a_dry_run() -> None:
    gc = next(item for item in DEPLOYMENTS if (item.flow, item.name) == ("gc", "nightly"))
    assert (gc.pool, gc.cron, gc.cron_active) == ("control", "0 4 * * *", False)
    assert deployments.form(deployments.flow_of(gc))["properties"]["apply"]["default"] is False


class StandingServer:
    """A Prefect client of a server on which a user has changed a deployment and activated its
    schedule.
    """

    def __init__(self, parameters: dict[str, object]) -> None:
        self.standing = SimpleNamespace(
            parameters=parameters, schedules=[SimpleNamespace(active=True)]
        )
        self.created: dict[str, Any] = {}

    def read_deployment_by_name(self, name: str) -> SimpleNamespace:
        return self.standing

    def create_flow_from_name(self, name: str) -> str:
        return "flow"

    def create_deployment(self, **given: Any) -> None:
        self.created = given


def test_a_scheduled_deployment_keeps_user_settings_that_the_flow_still_accepts() -> None:
    gc = next(item for item in DEPLOYMENTS if item.flow == "gc")
    server = StandingServer({"apply": True, "last": 3, "of_an_older_release": 1})
    deployments._create(server, gc, deployments.flow_of(gc), "/project")
    assert server.created["parameters"] == {"apply": True, "last": 3}
    assert [schedule.active for schedule in server.created["schedules"]] == [True]


def test_a_deployment_without_a_schedule_is_registered_as_in_the_code() -> None:
    server = StandingServer({"recipe": "another"})
    deployments._create(server, DEPLOYMENTS[0], deployments.flow_of(DEPLOYMENTS[0]), "/project")
    assert (server.created["parameters"], server.created["schedules"]) == (
        {"recipe": "multi_policy_tiny"},
        [],
    )


def test_a_negative_seed_is_refused_by_the_form() -> None:
    flow = deployments.flow_of(DEPLOYMENTS[0])
    flow.validate_parameters({"seed": 0})
    with pytest.raises(ParameterTypeError):
        flow.validate_parameters({"seed": -1})
    assert deployments.form(flow)["properties"]["seed"]["anyOf"][0]["minimum"] == 0


def test_the_longest_run_id_is_accepted_by_the_form() -> None:
    flow = deployments.flow_of(DEPLOYMENTS[0])
    longest = "r" * 100
    layout.run_prefix(longest)
    flow.validate_parameters({"run_id": longest})
    with pytest.raises(ParameterTypeError):
        flow.validate_parameters({"run_id": f"{longest}r"})


def test_a_broken_flow_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_flows_for_test.py").write_text("raise ImportError('no such thing')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = Deployment(
        flow="x", name="x", entrypoint="broken_flows_for_test.py:x", pool="control", description=""
    )
    with pytest.raises(
        ConfigError,
        match=r"broken_flows_for_test\.py cannot be deployed: ImportError: no such thing",
    ):
        deployments.import_flows([broken])


def test_the_digest_changes_only_with_a_flow_file(tmp_path: Path) -> None:
    (tmp_path / "flows").mkdir()
    flow = tmp_path / "flows" / "run_x.py"
    flow.write_text("one")
    before = deployments.digest(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert deployments.digest(tmp_path) == before
    flow.write_text("two")
    assert deployments.digest(tmp_path) != before
