from collections import Counter
from pathlib import Path

import pytest
from prefect.utilities.callables import parameter_schema

from deployments import register
from deployments.pools import POOLS
from deployments.register import DEPLOYMENTS, Deployment
from storage.errors import ConfigError
from tasks import recipes
from tasks.members import members_of


def test_every_deployment_stands_on_a_pool_that_has_a_worker() -> None:
    assert {one.pool for one in DEPLOYMENTS} == {pool.name for pool in POOLS}
    assert max(Counter((one.flow, one.name) for one in DEPLOYMENTS).values()) == 1


@pytest.mark.parametrize("recipe", ["multi_policy_tiny", "single_policy_tiny"])
def test_every_member_of_an_embedded_run_can_be_launched(recipe: str) -> None:
    names = {f"{one.flow}/{one.name}" for one in DEPLOYMENTS}
    assert {member.deployment for member in members_of(recipes.load(recipe))} <= names


def test_every_flow_file_can_be_deployed_and_takes_what_its_deployment_gives() -> None:
    register.import_flows()
    for one in DEPLOYMENTS:
        known = parameter_schema(register._flow(one)).model_dump_for_openapi()["properties"]
        assert set(one.parameters) <= set(known)


def test_the_nightly_run_waits_to_be_switched_on() -> None:
    nightly = next(one for one in DEPLOYMENTS if one.name == "nightly")
    assert (nightly.cron, nightly.cron_active) == ("0 2 * * *", False)


def test_a_broken_flow_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_flows_for_test.py").write_text("raise ImportError('no such thing')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = Deployment("x", "x", "broken_flows_for_test.py:x", "control", "")
    with pytest.raises(ConfigError, match=r"broken_flows_for_test\.py cannot be deployed: ImportError: no such thing"):
        register.import_flows([broken])


def test_the_digest_changes_with_a_flow_file_and_with_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "flows").mkdir()
    flow = tmp_path / "flows" / "run_x.py"
    flow.write_text("one")
    before = register.digest(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert register.digest(tmp_path) == before
    flow.write_text("two")
    assert register.digest(tmp_path) != before
