"""Tags of an MLflow run: user, code, deployment, store."""

import getpass
import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from tasks.tracking import provenance
from tests.support.checkout import ROOT
from tests.support.runs.small_run import SmallRun


def tags() -> dict[str, str]:
    return dict(provenance.provenance(SmallRun("provenance").run))


def test_a_run_names_its_deployment_store_report_user_and_release() -> None:
    assert (
        tags().items()
        >= {
            "mlflow.user": getpass.getuser(),
            "mlflow.source.type": "JOB",
            "mlflow.source.name": "astraflow/multi-policy",
            "astraflow.deployment": "astraflow/multi-policy",
            "astraflow.release": importlib.metadata.version("astraflow"),
            "astraflow.store": "memory://provenance",
            "astraflow.report": "memory://provenance/runs/tiny-1/report.html",
        }.items()
    )
    assert "astraflow.prefect_run" not in tags(), "it was called outside of a flow"


def test_a_flow_run_is_linked_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__UI_URL", "https://me:pw@prefect.example/runs/1")
    assert tags()["astraflow.prefect_run"] == "https://prefect.example/runs/1"


def test_the_commit_is_that_of_the_code_and_marks_changed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(provenance, "CODE", tmp_path)
    assert "mlflow.source.git.commit" not in tags() or ROOT in tmp_path.parents
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-qm", "first")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert tags()["mlflow.source.git.commit"] == commit
    (tmp_path / "code.py").write_text("2")
    assert tags()["mlflow.source.git.commit"] == f"{commit}-dirty"


def test_a_user_without_a_name_has_no_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert "mlflow.user" not in tags()
