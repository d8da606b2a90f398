import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from deployments.cli import run_launcher
from deployments.cli.run_follower import Followed
from deployments.paths import Home
from deployments.registration import deployments, flow_runs
from deployments.registration.flow_runs import FlowRun
from deployments.stack import state
from deployments.stack.processes import Process
from deployments.stack.state import Stack
from storage.errors import ConfigError
from storage.records.control import BudgetKind, RunEnd, Stop, Usage
from storage.run import runs, usage
from storage.store.object_store import open_store
from tasks.monitoring.status import Status, status
from tasks.recipes import loader


def test_a_run_id_consists_of_the_recipe_name_and_the_time() -> None:
    wanted = run_launcher.prepare("astraflow/multi-policy", None, ["steps=3"], None)
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}", wanted.run_id)
    assert (wanted.recipe, wanted.overrides) == (None, {"steps": 3})


def test_a_deployment_may_be_named_without_its_flow() -> None:
    assert (
        run_launcher.prepare("single-policy", None, [], "mine").deployment
        == "astraflow/single-policy"
    )


def test_a_foreign_deployment_is_not_validated_locally() -> None:
    wanted = run_launcher.prepare("theirs/special", None, [], None)
    assert wanted.run_id.startswith("special-")


@pytest.mark.parametrize(
    "name",
    ["", "a/b/c", "a/", "/b", "theirs/..", "./special", "a/b?c", "a/50%", "a\n/b", "x" * 201],
)
def test_what_can_be_no_deployment_is_refused_before_the_stack_starts(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a deployment; write FLOW/DEPLOY"):
        run_launcher.prepare(name, None, [], None)


def test_an_error_in_a_recipe_file_names_file_and_line(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: multi_policy_tiny\nsteps: many\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 2: steps: must be a whole number"):
        run_launcher.prepare("multi-policy", str(recipe), [], None)


def test_an_unknown_deployment_is_refused_with_a_list_of_deployments() -> None:
    with pytest.raises(
        ConfigError,
        match="there is no deployment nope; name multi-policy, single-policy, or your own",
    ):
        run_launcher.prepare("nope", None, [], None)


def test_a_stack_with_another_store_refuses_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    me = Process("prefect-server", os.getpid(), psutil.Process().create_time(), "")
    up = Stack(
        prefect_url="http://127.0.0.1:1/api",
        mlflow_url="http://127.0.0.1:2",
        store_url=home.store.as_uri(),
        own_server=True,
        processes=(me,),
        ready=True,
    )
    state.save(home, up)
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match=r"ASTRAFLOW_STORE is now .*elsewhere"):
        run_launcher.start(home, run_launcher.prepare("multi-policy", None, [], None), print)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Parameters of every started flow run, on a server with the deployments of `astraflow deploy`."""
    results: list[Mapping[str, Any]] = []
    names = [f"{item.flow}/{item.name}" for item in deployments.DEPLOYMENTS]

    def start(
        api_url: str, deployment: str, parameters: Mapping[str, Any], name: str, tags: list[str]
    ) -> FlowRun:
        results.append(parameters)
        return FlowRun(id="f", state="Scheduled", final=False, message="")

    monkeypatch.setattr(flow_runs, "start", start)
    monkeypatch.setattr(
        flow_runs,
        "deployments_of",
        lambda api_url, flow: [item for item in names if item.startswith(f"{flow}/")],
    )
    return results


def stack_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, own_server: bool) -> Home:
    up = Stack(
        prefect_url="http://127.0.0.1:1/api",
        mlflow_url="http://127.0.0.1:2",
        store_url=(tmp_path / "store").as_uri(),
        own_server=own_server,
    )
    monkeypatch.setattr(run_launcher, "_stack", lambda home, say: up)
    return Home(tmp_path / "home")


def write_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder, from which two prompt files are named."""
    folder.mkdir()
    for name in ("recipes.jsonl", "own.jsonl"):
        (folder / name).write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    (folder / "mine.yaml").write_text(
        "extends: single_policy_tiny\ndata: {prompts: {path: recipes.jsonl}}\n"
    )
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("assignments", "file"),
    [
        ([], "recipes.jsonl"),
        (["data.prompts.path=own.jsonl"], "own.jsonl"),
        (["prompts.path=own.jsonl", "steps=3"], "own.jsonl"),
        (["data.prompts.path=recipes.jsonl", "data.prompts={path: own.jsonl}"], "own.jsonl"),
        (["prompts.builtin=chained_addition"], None),
    ],
)
def test_a_supervisor_in_another_folder_reads_the_files_named_by_the_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sent: list[Mapping[str, Any]],
    assignments: list[str],
    file: str | None,
) -> None:
    write_prompts(tmp_path / "person", monkeypatch)
    home = stack_here(tmp_path, monkeypatch, own_server=True)
    mirrored = [*assignments, "rollout.regions.us-east.mirror=near"]
    wanted = run_launcher.prepare("single-policy", "mine.yaml", mirrored, None)
    run_launcher.start(home, wanted, print)
    (tmp_path / "clone").mkdir()
    monkeypatch.chdir(tmp_path / "clone")
    read = loader.load(sent[0]["recipe"], sent[0]["overrides"])
    assert read == wanted.config
    assert getattr(read.data.prompts, "path", None) == (
        None if file is None else str(tmp_path / "person" / file)
    )
    assert read.rollout.regions["us-east"].mirror == str(tmp_path / "person" / "near")


def test_a_remote_supervisor_gets_the_recipe_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: list[Mapping[str, Any]]
) -> None:
    write_prompts(tmp_path / "person", monkeypatch)
    home = stack_here(tmp_path, monkeypatch, own_server=False)
    run_launcher.start(
        home,
        run_launcher.prepare("single-policy", "mine.yaml", ["data.prompts.path=own.jsonl"], None),
        print,
    )
    run_launcher.start(
        home,
        run_launcher.prepare("theirs/special", None, ["data.prompts.path=own.jsonl"], None),
        print,
    )
    assert [each["overrides"] for each in sent] == [{"data.prompts.path": "own.jsonl"}] * 2


def test_the_stack_is_reported_as_running_only_while_it_runs(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    store = open_store(home.store.as_uri())
    run = runs.create_run(store, "mine", loader.load("multi_policy_tiny").model_dump(mode="json"))
    runs.request_stop(run, Stop("cancelled", "enough", time.time()))
    me = Process("prefect-server", os.getpid(), psutil.Process().create_time(), "")
    up = Stack(
        prefect_url="http://127.0.0.1:1/api",
        mlflow_url="http://127.0.0.1:2",
        store_url=store.url,
        own_server=True,
        processes=(me,),
        ready=True,
    )
    followed = Followed(
        store=store, run_id="mine", api_url=up.prefect_url, flow_run_id="f", links={}, home=home
    )
    for ready in (True, False):  # `down` removes the readiness before it ends the runs
        state.save(home, replace(up, ready=ready))
        messages: list[str] = []
        run_launcher.summarize(followed, status(store, "mine"), messages.append)
        assert (
            "the stack stays up for the next run; `astraflow down` stops it" in messages
        ) is ready


def test_the_summary_of_a_run_that_used_up_its_budget_says_how_it_continues(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    store = open_store(home.store.as_uri())
    run = runs.create_run(store, "mine", loader.load("multi_policy_tiny").model_dump(mode="json"))
    used: dict[BudgetKind, float] = {"hours": 8.0, "tokens": 1.0, "cost": 501.0}
    usage.write(run, Usage(limits={"hours": 8.0, "tokens": 2.0, "cost": 500.0}, used=used))
    reason = "budget: hours 8.0 of 8, cost 501.00 of 500"
    runs.request_stop(run, Stop("exhausted", reason, runs.read_run(run).created_s + 28800))
    followed = Followed(
        store=store, run_id="mine", api_url="", flow_run_id="f", links={}, home=home
    )
    messages: list[str] = []
    run_launcher.summarize(followed, status(store, "mine"), messages.append)
    assert messages[1:3] == [
        f"mine: exhausted after 8:00:00; {reason}",
        "  start it again with a larger budget to go on: --run-id mine --set budget.hours=… "
        "--set budget.cost=…",
    ]
    assert messages[3].startswith("  verify: clean: ")


@pytest.mark.parametrize(
    ("end", "is_success"),
    [
        *(("completed", True), ("exhausted", True)),
        *(("suspended", False), ("cancelled", False), ("failed", False)),
    ],
)
def test_a_run_that_used_up_its_budget_is_a_success_of_the_command(
    monkeypatch: pytest.MonkeyPatch, end: RunEnd, is_success: bool
) -> None:
    ended = Status.model_construct(run_id="mine", state=end)
    follower = SimpleNamespace(follow=lambda: ended)
    monkeypatch.setattr(run_launcher, "Follower", lambda followed, console, ask: follower)
    monkeypatch.setattr(run_launcher, "summarize", lambda followed, last, say: None)
    followed = SimpleNamespace(run_id="mine")
    assert run_launcher.watch(followed, print) is is_success  # type: ignore[arg-type]  # only its id is read


def test_a_slow_check_reports_its_progress_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, messages = [0.0], list[str]()
    monkeypatch.setattr(run_launcher.time, "monotonic", lambda: now_s[0])
    tell = run_launcher._progress_printer(messages.append)
    for second in range(12):
        now_s[0] = float(second)
        tell("shards", second / 12)
    assert messages == ["  verifying shards 42%", "  verifying shards 83%"]


def test_the_nightly_deployment_starts_no_run() -> None:
    with pytest.raises(ConfigError, match="prefect deployment run astraflow/nightly"):
        run_launcher.prepare("nightly", None, [], None)
