"""`astraflow continue`: the request that it makes of a stored run."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.cli import continuation, preflight
from deployments.cli.app import app
from deployments.cli.output import tables
from deployments.cli.output.plain_console import PlainConsole
from storage.errors import ConfigError
from storage.records.rollouts import Order, Prompt
from storage.records.weights import Origin
from storage.run import orders, runs
from storage.store.object_store import ObjectStore, open_store
from storage.weights import publisher, tags
from tasks.base_models.stored import RunModel
from tasks.monitoring.status import runs as summaries
from tasks.monitoring.status import status
from tasks.monitoring.status_schema import OriginStatus, continues
from tasks.recipes import loader
from tasks.reports.page import render_report
from tests.support.runs.builders import tensors

POLICIES = ("solver", "verifier")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The run `one` of the default recipe, with versions 0 to 2 of both policies."""
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    store = open_store(str(tmp_path / "store"))
    config = loader.load("multi_policy_tiny", {"policies.solver.train.lr": 3e-4})
    run = runs.create_run(store, "one", config.model_dump(mode="json"), "astraflow/special")
    for policy in POLICIES:
        for version in range(3):
            files = {} if version else {"config.json": b"{}"}
            publisher.publish(run, policy, version, tensors(version), extra_files=files)
    tags.create(run, "best", "solver", 1)
    return store


def prepared(store: ObjectStore, *words: str, **changes: Any) -> Any:
    arguments = {"steps": 9, "assignments": [], "new_id": None, "with_optimizer": False, **changes}
    return continuation.prepare(store, "one", words=words, **arguments)


def test_the_request_has_the_stored_recipe_and_the_versions(store: ObjectStore):
    request = prepared(store, "solver@best", "2", assignments=["policies.solver.train.lr=1e-5"])
    assert request.deployment == "astraflow/special"
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}", request.run_id)
    config = loader.load(request.recipe, request.overrides)
    assert config == request.config
    assert (config.steps, config.seed) == (9, 1)
    assert config.policies["solver"].train.lr == 1e-5
    assert {name: each.model for name, each in config.policies.items()} == {
        "solver": RunModel(run="one", policy="solver", version="best"),
        "verifier": RunModel(run="one", policy="verifier", version="2"),
    }
    assert config.evaluation == loader.load("multi_policy_tiny").evaluation


def test_prompts_go_on_unless_they_are_others(store: ObjectStore):
    order = Order(
        number=0,
        prompts=(Prompt("p/0", {"question": "1+1=?"}),),
        samples_per_prompt=2,
        seed=0,
        seen=(),
        cursor={"epoch": 0, "position": 24},
    )
    orders.create(store.sub("runs/one"), order)
    seeded = ["data.prompts.seed=5"]
    for assignments, position in (
        ([], 24),
        (["data.prompts.seed=0"], 24),
        (seeded, 0),
        ([*seeded, "data.start.position=3"], 3),
    ):
        config = prepared(store, assignments=assignments).config
        assert (config.data.start.epoch, config.data.start.position) == (0, position)


def test_a_run_id_is_taken_or_refused(store: ObjectStore):
    assert prepared(store, new_id="two").run_id == "two"
    with pytest.raises(ConfigError, match="cannot be a run id"):
        prepared(store, new_id="../two")


def test_a_run_without_a_deployment_is_continued_by_the_default_one(store: ObjectStore):
    config = runs.read_run_config(store.sub("runs/one"))
    runs.create_run(store, "plain", config)
    request = continuation.prepare(store, "plain", 9, [], [], None, with_optimizer=True)
    assert request.deployment == "astraflow/multi-policy"
    assert all(
        isinstance(each.model, RunModel) and each.model.with_optimizer
        for each in (request.config.policies.values() if request.config else ())
    )


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        ("noslash", "run odd names the deployment 'noslash', without its flow"),
        ("a/b/c", "'a/b/c' cannot be the name of a deployment"),
        ("a/" + "b" * 90_000, r"'a/b+' cannot be the name of a deployment"),
    ],
)
def test_a_stored_name_that_no_deployment_has_is_refused(
    store: ObjectStore, deployment: str, message: str
):
    config = runs.read_run(runs.open_run(store, "one")).config
    run = runs.create_run(store, "odd", config, deployment=deployment)
    publisher.publish(run, "solver", 0, tensors())
    with pytest.raises(ConfigError, match=message):
        continuation.prepare(store, "odd", 9, [], [], None, with_optimizer=True)


def test_a_missing_version_is_refused_before_anything_starts(store: ObjectStore):
    config = prepared(store, "solver@7").config
    with pytest.raises(ConfigError, match=r"policies\.solver\.model: there is no version 7 of"):
        preflight.refuse_missing_origins(store, "two", config)
    preflight.refuse_missing_origins(store, "one", config)  # a run that exists has its versions
    preflight.refuse_missing_origins(store, "two", prepared(store, "2").config)
    assert preflight.continues_runs(config)
    assert not preflight.continues_runs(loader.load("multi_policy_tiny"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("two", "--steps", "+3"), "there is no run 'two'"),
        (("one", "--steps", "0"), "--steps"),
        (
            ("one", "--steps", "+3", "--version", "judge@2"),
            "judge@2 names none of the run's policies",
        ),
        (("one", "--steps", "+3", "--version", "9"), "there is no version 9 of solver of run one"),
        (("one", "--steps", "+3", "--version", "best"), "'best' is no version of verifier"),
        (("one", "--steps", "+3", "--with-optimizer"), "has no checkpoint of solver at step 2"),
        (("one", "--steps", "+3", "--set", "colour=red"), "colour: unknown key"),
    ],
)
def test_the_command_refuses_what_cannot_start(
    store: ObjectStore, arguments: tuple[str, ...], message: str, tmp_path: Path
):
    result = CliRunner().invoke(app, ["continue", *arguments])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert not (tmp_path / "home" / "stack.json").exists()  # no stack was started


def test_the_list_of_tags_says_which_run_continues(store: ObjectStore):
    one = store.sub("runs/one")
    runs.create_run(store, "two", {})
    tags.keep_for(one, "solver", 2, "two")
    listed = printed(tables.tags_table(tags.read_all(one).readable))
    assert "(run two continues from it)" in listed
    assert re.search(r"solver +1 +best ", listed)


def origin(run: str, policy: str, version: int) -> OriginStatus:
    return OriginStatus(run=run, policy=policy, version=version)


@pytest.mark.parametrize(
    ("origins", "words"),
    [
        ({}, ""),
        ({"a": origin("x", "a", 4), "b": origin("x", "b", 4)}, "continues x from version 4"),
        ({"a": origin("x", "a", 4), "b": origin("x", "b", 5)}, "continues x from a@4, b@5"),
        ({"a": origin("x", "c", 4)}, "continues x from c@4"),
        (
            {"a": origin("x", "a", 4), "b": origin("y", "b", 5)},
            "continues x from version 4; y from version 5",
        ),
    ],
)
def test_the_origins_are_described_briefly(origins: dict[str, OriginStatus], words: str):
    assert continues(origins) == words


def printed(picture: Any) -> str:
    console = PlainConsole(width=160)
    with console.capture() as capture:
        console.print(picture)
    return capture.get()


def test_status_runs_and_report_name_the_run_that_is_continued(store: ObjectStore):
    config = prepared(store, "2").config
    origins = {
        policy: Origin(run="one", policy=policy, version=2, digest="sha256:0")
        for policy in POLICIES
    }
    run = runs.create_run(store, "two", config.model_dump(mode="json"), origins=origins)
    current = status(store, "two")
    assert current.origins["solver"] == origin("one", "solver", 2)
    assert "continues one from version 2" in printed(tables.status_picture(current))
    assert "continues" not in printed(tables.status_picture(status(store, "one")))
    listed = printed(tables.runs_table(summaries(store))).splitlines()
    assert [line.rstrip().endswith("one from version 2") for line in listed] == [
        False,
        False,
        True,
    ]
    page = render_report(run, "two")
    assert "from version 2" in page
    assert "from version 2" not in render_report(store.sub("runs/one"), "one")
