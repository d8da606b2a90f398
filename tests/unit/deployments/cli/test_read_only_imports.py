"""A stored `run.json` names code; commands that only read a run never import it."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli.app import app
from storage.errors import ConfigError
from storage.run.runs import create_run
from storage.store.object_store import open_store
from storage.weights import publisher
from tasks.recipes import loader
from tests.support.runs import builders

MODULE = "names_code_of_a_stranger"
NAMED = {
    "data.curate": [f"{MODULE}:A"],
    "data.filter": [f"{MODULE}:B"],
    "data.sample": [f"{MODULE}:C"],
    "rollout.workflow.name": f"{MODULE}:D",
    "rollout.workflow.reward": f"{MODULE}:E",
    "rollout.engine.name": f"{MODULE}:F",
    "policies.solver.train.engine": f"{MODULE}:G",
}
LOOKS = (
    ("status", "evil"),
    ("status", "evil", "--json"),
    ("runs",),
    ("runs", "--json"),
    ("verify", "evil"),
    ("report", "evil"),
    ("episodes", "evil"),
    ("weights", "evil"),
    ("tag", "evil", "solver@0", "best"),
    ("tag", "evil"),
    ("export", "evil", "solver", "--out", "out"),
    ("promote", "evil", "--version", "0"),
    ("promotions",),
    ("gc", "evil"),
    ("gc", "evil", "--delete"),
)


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that exists after the foreign module was imported, which the store's only run names
    in every key.
    """
    proof = tmp_path / "imported"
    (tmp_path / f"{MODULE}.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    config = loader.load("single_policy_tiny").model_dump(mode="json")
    for dotted, value in NAMED.items():
        *sections, key = dotted.split(".")
        place = config
        for section in sections:
            place = place[section]
        place[key] = (
            [{"name": name, "args": {}} for name in value] if isinstance(value, list) else value
        )
    run = create_run(open_store(str(tmp_path / "store")), "evil", config)
    publisher.publish(run, "solver", 0, builders.tensors(0), extra_files={"config.json": b"{}"})
    return proof


@pytest.mark.parametrize("arguments", LOOKS, ids=" ".join)
def test_a_read_only_command_imports_nothing_that_the_run_names(
    imported: Path, arguments: tuple[str, ...]
) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    assert not imported.exists()
    assert MODULE not in sys.modules


def test_starting_a_recipe_imports_the_names_it_contains(imported: Path) -> None:
    with pytest.raises(ConfigError, match=f"the module {MODULE} has no 'D'"):
        loader.load("single_policy_tiny", NAMED)
    assert imported.exists()
    del sys.modules[MODULE]
