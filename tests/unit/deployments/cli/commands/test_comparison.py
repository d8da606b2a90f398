"""`astraflow compare`: its table, its JSON, its page, its errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deployments.cli.app import app
from storage.store.object_store import open_store
from tests.support.runs.small_run import SmallRun


@pytest.fixture
def two_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("ASTRAFLOW_STORE", f"memory://{tmp_path.name}")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, right in (("weak", 10), ("strong", 38), ("untested", 0)):
        run = SmallRun(tmp_path.name, run_id=name)
        if right:
            run.evaluation(3, [1.0] * right + [0.0] * (40 - right), [1.0] * 40)


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["compare", *words])


@pytest.mark.usefixtures("two_runs")
def test_a_clear_gain_is_named_with_its_interval() -> None:
    output = command("weak", "strong").stdout
    (line,) = [line for line in output.splitlines() if line.rstrip().endswith("better")]
    assert line.split()[:4] == ["strong", "chained_addition", "single_turn", "+70.0"]
    assert "no clear difference" in output, "the teams have equal results"
    assert command("strong", "weak").stdout.count("worse") == 1


@pytest.mark.usefixtures("two_runs")
def test_json_has_evaluations_gains_and_settings() -> None:
    content = json.loads(command("weak", "strong", "untested", "--json").stdout)
    assert [run["run_id"] for run in content["runs"]] == ["weak", "strong", "untested"]
    assert content["runs"][1]["evals"][0] == {
        "dataset": "chained_addition",
        "workflow": "single_turn",
        "version": 3,
        "hours": 0.0,
        "accuracy": 0.95,
        "n": 40,
    }
    assert {gain["run_id"] for gain in content["gains"]} == {"strong"}
    assert content["settings"] == {}


@pytest.mark.usefixtures("two_runs")
def test_the_page_is_written_where_the_user_says(tmp_path: Path) -> None:
    page = tmp_path / "comparison.html"
    assert str(page) in command("weak", "strong", "--out", str(page)).stdout.replace("\n", "")
    assert "2 runs compared" in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["weak"], "one run (weak) is not a comparison; name at least two"),
        (["weak", "weak"], "one run (weak) is not a comparison"),
        (["weak", "none"], "none"),
    ],
)
def test_bad_arguments_are_named(words: list[str], error: str) -> None:
    result = command(*words)
    assert result.exit_code == 2
    assert error in result.stderr


@pytest.mark.usefixtures("two_runs")
@pytest.mark.parametrize("body", [b"{", b"{}", b"[]", b'{"format": 1, "run_id": "weak"}'])
def test_a_run_that_cannot_be_read_is_named(tmp_path: Path, body: bytes) -> None:
    open_store(f"memory://{tmp_path.name}").put("runs/strong/run.json", body)
    result = command("weak", "strong", "untested")
    assert result.exit_code == 1
    assert f"memory://{tmp_path.name}/runs/strong/run.json" in result.stderr
