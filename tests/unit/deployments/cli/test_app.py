import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deployments.cli.app import app
from storage import layout
from storage.run import runs as stored_runs
from storage.store.object_store import open_store
from storage.weights import publisher, retention
from tasks.recipes import loader
from tests.support.runs import builders

COMMANDS = (
    "up",
    "down",
    "deploy",
    "run",
    "suspend",
    "resume",
    "cancel",
    "status",
    "attach",
    "logs",
    "runs",
    "verify",
    "report",
    "export",
    "tag",
    "gc",
    "promote",
    "rollback",
    "promotions",
    "doctor",
)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new home and store for every call."""
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    return str(tmp_path / "store")


def _call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_command_line_imports_no_slow_package() -> None:
    code = (
        "import sys, deployments.cli.app;"
        "print([name for name in ('prefect', 'mlflow', 'torch', 'pyarrow', 'httpx', 'pydantic') if "
        "name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert result.strip() == "[]"


def test_the_version_is_that_of_the_package() -> None:
    result = _call("--version")
    assert (result.exit_code, result.output) == (
        0,
        f"astraflow {importlib.metadata.version('astraflow')}\n",
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_in_its_help(command: str) -> None:
    result = _call(command, "--help")
    assert result.exit_code == 0
    assert f"astraflow {command}" in result.output.split("Example:")[1]


def test_an_invalid_setting_is_named_before_anything_starts(tmp_path: Path) -> None:
    result = _call("run", "--set", "policies.solver.train.lrr=1e-4")
    assert result.exit_code == 2
    assert "policies.solver.train.lrr: unknown key" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "home").exists()


def test_without_a_run_commands_show_how_to_start_one() -> None:
    result = _call("status")
    assert result.exit_code == 2
    assert "start one with `astraflow run`" in result.stderr
    assert json.loads(_call("runs", "--json").output) == []
    assert "no runs yet" in _call("runs").output


def test_an_unknown_run_is_named_with_similar_run_ids(store: str) -> None:
    _create_run(store, "tiny-1")
    result = _call("verify", "tiny-2")
    assert result.exit_code == 2
    assert "there is no run 'tiny-2'" in result.stderr
    assert "tiny-1" in result.stderr


def test_a_new_run_has_no_violations_and_its_json_has_the_documented_fields(store: str) -> None:
    _create_run(store, "tiny-1")
    verdict = json.loads(_call("verify", "--json").output)
    assert (verdict["run_id"], verdict["ok"], verdict["orders"], verdict["violations"]) == (
        "tiny-1",
        True,
        0,
        [],
    )
    assert set(verdict["policies"]["solver"]) >= {"trained", "filtered", "expired", "waiting"}
    status = json.loads(_call("status", "--json").output)
    assert status["run_id"] == "tiny-1"
    assert set(status) >= {"state", "policies", "regions", "evals"}
    assert [run["run_id"] for run in json.loads(_call("runs", "--json").output)] == ["tiny-1"]


def test_damage_is_listed_with_exit_code_1(store: str) -> None:
    run = _create_run(store, "tiny-1")
    run.create("orders/00000001.json", b"{}")
    result = _call("verify", "tiny-1")
    assert result.exit_code == 1
    assert "orders/" in result.output


def test_the_report_is_written_to_the_given_path(store: str, tmp_path: Path) -> None:
    _create_run(store, "tiny-1")
    page = tmp_path / "page.html"
    result = _call("report", "--out", str(page))
    assert result.exit_code == 0
    assert result.output.strip() == str(page)
    assert "tiny-1" in page.read_text()


def test_an_unwritable_store_gives_an_error_of_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", "ftp://nowhere")
    result = _call("runs")
    assert result.exit_code == 2
    assert "unknown scheme 'ftp'" in result.stderr


def test_deploying_to_an_unreachable_server_gives_an_error_of_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    result = _call("deploy")
    assert result.exit_code == 2
    assert "set PREFECT_API_URL" in result.stderr


def test_deploy_refuses_the_address_of_a_webhook_before_it_registers_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)  # registering would fail for want of it
    result = _call("deploy", "--notify", "https://hooks.example/secret")
    assert result.exit_code == 2
    assert result.stderr.startswith("--notify does not name a notification block")
    assert "secret" not in result.stderr.partition(";")[0]


def test_an_invalid_address_gives_an_error_of_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "nonsense")
    result = _call("deploy")
    assert result.exit_code == 2
    assert "PREFECT_API_URL=nonsense is not the address of a server" in result.stderr


@pytest.mark.parametrize("command", ["up", "run"])
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("foo://x", "unknown scheme 'foo'"),
        ("{tmp}/file/store", "a file is where a folder belongs"),
    ],
)
def test_an_unusable_store_is_reported_before_anything_starts(
    command: str, url: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("ASTRAFLOW_STORE", url.format(tmp=tmp_path))
    result = _call(command)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "home" / "stack.json").exists()


def test_cancelling_a_run_writes_its_stop_and_a_second_cancel_shows_its_state(store: str) -> None:
    run = _create_run(store, "tiny-1")
    assert "astraflow run --run-id tiny-1" in _call("cancel", "tiny-1").output
    stop = stored_runs.read_stop(run)
    assert stop is not None
    assert (stop.state, stop.reason) == ("cancelled", "cancelled from the command line")
    assert (
        "tiny-1 is already cancelled: cancelled from the command line"
        in _call("cancel", "tiny-1").output
    )
    assert _call("cancel", "tiny-9").exit_code == 2


def test_a_version_is_tagged_listed_exported_by_its_tag_and_untagged(
    store: str, tmp_path: Path
) -> None:
    run = _create_run(store, "tiny-1")
    for version in range(3):
        publisher.publish(run, "solver", version, builders.tensors(version))
    assert (
        "tiny-1 has no tags; `astraflow tag tiny-1 POLICY@VERSION NAME` creates one"
        in _call("tag", "tiny-1").output
    )
    assert _call("tag", "tiny-1", "solver@1", "best").output == "solver@1 is tagged best\n"
    assert re.search(r"solver +1 +best", _call("tag", "tiny-1").output)
    assert re.search(r"solver +best 1 +anchor", _call("weights", "tiny-1", "solver").output)
    assert (
        "solver version 1 is in"
        in _call(
            "export", "tiny-1", "solver", "--version", "best", "--out", str(tmp_path / "m")
        ).output
    )
    result = _call("export", "tiny-1", "solver", "--version", "worst", "--out", str(tmp_path / "m"))
    assert (
        result.exit_code,
        "'worst' is no version of solver and none of its tags; those are best" in result.stderr,
    ) == (2, True)
    assert (
        "tagged best"
        in _call("gc", "tiny-1", "--last", "1", "--every", "0", "--grace-hours", "0").output
    )
    assert _call("tag", "tiny-1", "--remove", "best").output == "deleted the tag best of solver@1\n"
    assert (
        "tagged"
        not in _call("gc", "tiny-1", "--last", "1", "--every", "0", "--grace-hours", "0").output
    )


def test_a_tag_command_with_missing_arguments_shows_its_usage(store: str) -> None:
    _create_run(store, "tiny-1")
    for words in (["solver@1"], ["solver@1", "best", "--remove", "good"]):
        result = _call("tag", "tiny-1", *words)
        assert (result.exit_code, "astraflow tag tiny-1 solver@1 NAME" in result.stderr) == (
            2,
            True,
        )


def test_gc_shows_its_plan_and_deletes_only_on_request(store: str) -> None:
    run = _create_run(store, "tiny-1")
    for version in range(4):
        publisher.publish(run, "solver", version, builders.tensors(version))
    run.put(layout.evaluation({"solver": 0, "verifier": 0}), b"")
    wanted = ("gc", "tiny-1", "--last", "1", "--every", "0", "--grace-hours", "0")
    result = _call(*wanted)
    assert result.exit_code == 0
    assert "the base model" in result.output
    assert "nothing is deleted yet, add --delete\n" in result.output
    assert not run.exists(layout.retired("solver", 2))
    misspelt = _call(*wanted, "--keep", "slover@2", "--delete")
    assert misspelt.exit_code == 2
    assert "'slover@2' names no version" in misspelt.stderr
    kept = _call(*wanted, "--keep", "solver@2", "--delete")
    assert kept.output.strip().endswith("of tiny-1 are deleted")
    lost = _call(*wanted, "--keep", "solver@1", "--keep", "solver@2")
    assert (lost.exit_code, lost.stderr) == (
        0,
        "solver@1 cannot be kept: an earlier gc deleted its data\n",
    )
    assert [run.exists(layout.retired("solver", version)) for version in range(4)] == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("hours", "code", "words"),
    [
        ("nan", 2, "Invalid value for '--grace-hours': Input should be greater than or equal to"),
        ("-inf", 2, "Invalid value for '--grace-hours': Input should be greater than or equal to"),
        ("-1", 2, "Invalid value for '--grace-hours': Input should be greater than or equal to"),
        (
            "inf",
            2,
            "what is younger than inf s: the first is at least 1, the others are finite and at "
            "least 0",
        ),
        (
            "1e308",
            2,
            "what is younger than inf s: the first is at least 1, the others are finite and at "
            "least 0",
        ),
        ("1e30", 0, "1–2    younger than 1e+30 h"),
    ],
)
def test_gc_refuses_a_grace_that_is_invalid_or_too_long(
    store: str, hours: str, code: int, words: str
) -> None:
    run = _create_run(store, "tiny-1")
    for version in range(4):
        publisher.publish(run, "solver", version, builders.tensors(version))
    result = _call(
        "gc", "tiny-1", "--last", "1", "--every", "0", f"--grace-hours={hours}", "--delete"
    )
    assert (result.exit_code, words in result.output) == (code, True)
    assert [key for key in run.list("weights") if key.endswith(layout.RETIRED)] == []


def test_weights_of_a_missing_version_name_it_and_list_the_others(store: str) -> None:
    run = _create_run(store, "tiny-1")
    for version in range(4):
        publisher.publish(run, "solver", version, builders.tensors(version))
    run.delete("weights/solver/00000001/manifest.json")
    result = _call("weights", "tiny-1", "solver", "--json")
    assert [item["version"] for item in json.loads(result.stdout)] == [0, 2, 3]
    assert (
        result.stderr
        == "skipped, because it cannot be read: weights/solver/00000001/manifest.json is missing\n"
    )


def test_gc_refuses_to_keep_a_version_that_does_not_exist(store: str) -> None:
    run = _create_run(store, "tiny-1")
    result = _call("gc", "tiny-1", "--keep", "solver@0")
    assert result.exit_code == 2
    assert "there is no solver@0 to keep; solver has no version yet" in result.stderr
    for version in range(4):
        publisher.publish(run, "solver", version, builders.tensors(version))
    wanted = ("gc", "tiny-1", "--last", "1", "--every", "0", "--grace-hours", "0", "--delete")
    result = _call(*wanted, "--keep", "solver@2", "--keep", "solver@40")
    assert result.exit_code == 2
    assert "there is no solver@40 to keep; the newest is solver@3" in result.stderr
    assert not any(run.exists(layout.retired("solver", version)) for version in range(4))


def test_gc_names_a_mirror_that_it_cannot_clean_and_deletes_at_home(
    store: str, tmp_path: Path
) -> None:
    (tmp_path / "eu").write_text("no folder")
    mirror = {"rollout.regions.eu-west.mirror": str(tmp_path / "eu")}
    config = loader.load("multi_policy_tiny", mirror).model_dump(mode="json")
    run = stored_runs.create_run(open_store(store), "tiny-1", config)
    for version in range(4):
        publisher.publish(run, "solver", version, builders.tensors(version))
    wanted = ("gc", "tiny-1", "--last", "1", "--every", "0", "--grace-hours", "0")
    for arguments in (wanted, (*wanted, "--delete")):
        result = _call(*arguments)
        assert result.exit_code == 0
        assert result.stderr.startswith("the mirror in eu-west is unchanged until the next gc: ")
        assert f"{tmp_path}/eu" in result.stderr
    assert run.exists(layout.retired("solver", 1))


@pytest.mark.parametrize("change", ["--freeze", "--thaw"])
def test_gc_refuses_to_freeze_or_thaw_together_with_deletion(store: str, change: str) -> None:
    run = _create_run(store, "tiny-1")
    retention.freeze(run)
    if change == "--freeze":
        retention.thaw(run)
    before = retention.is_frozen(run)
    result = _call("gc", "tiny-1", change, "--delete")
    assert result.exit_code == 2
    assert f"{change} deletes nothing; repeat the command with --delete alone" in result.stderr
    assert retention.is_frozen(run) is before


def test_gc_of_a_frozen_run_shows_how_to_thaw_it(store: str) -> None:
    run = _create_run(store, "tiny-1")
    publisher.publish(run, "solver", 0, builders.tensors())
    assert _call("gc", "tiny-1", "--freeze").exit_code == 0
    result = _call("gc", "tiny-1")
    assert result.exit_code == 0
    assert (
        "of tiny-1 would be deleted if it were not frozen; `astraflow gc tiny-1 --thaw` removes "
        "the freeze" in result.output
    )
    assert "--delete" not in result.output
    assert _call("gc", "tiny-1", "--thaw").exit_code == 0
    assert "nothing is deleted yet, add --delete\n" in _call("gc", "tiny-1").output


def test_a_piped_list_of_runs_holds_whole_lines(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it
    _create_run(store, "a-name-that-somebody-made-up-" + "x" * 70)
    assert "a-name-that-somebody-made-up-" + "x" * 70 in _call("runs").output


def _create_run(store: str, run_id: str):  # type: ignore[no-untyped-def]  # the run's store, for planting damage
    config = loader.load("multi_policy_tiny").model_dump(mode="json")
    return stored_runs.create_run(open_store(store), run_id, config)
