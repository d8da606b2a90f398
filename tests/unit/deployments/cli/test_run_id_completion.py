import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.cli import run_id_completion
from storage.store.object_store import open_store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASTRAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    written = open_store(str(tmp_path / "store"))
    for run_id in ("tiny-1", "tiny-2", "big-1"):
        written.put(f"runs/{run_id}/run.json", b"not even JSON")
    return tmp_path / "store"


def test_run_ids_that_begin_with_the_word_are_suggested(store: Path) -> None:
    assert run_id_completion.suggest("tiny") == ["tiny-1", "tiny-2"]
    assert run_id_completion.suggest("") == ["big-1", "tiny-1", "tiny-2"]
    assert run_id_completion.suggest("x") == []


def test_a_folder_whose_name_is_no_run_id_is_not_suggested(store: Path) -> None:
    (store / "runs" / "$(reboot)").mkdir()
    (store / "runs" / "\x1b[2J").mkdir()
    assert run_id_completion.suggest("") == ["big-1", "tiny-1", "tiny-2"]


def test_only_the_last_run_ids_are_suggested(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_id_completion, "SUGGESTED_MAX", 2)
    assert run_id_completion.suggest("") == ["tiny-1", "tiny-2"]


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "ftp://nowhere", "file:///dev/null/x"])
def test_nothing_is_suggested_for_a_store_that_is_remote_or_cannot_be_read(
    store: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_STORE", url)
    assert run_id_completion.suggest("") == []


def test_a_shell_completes_the_run_of_a_command(store: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "from deployments.cli.app import app; app(prog_name='astraflow')"],
        env={
            **os.environ,
            "_ASTRAFLOW_COMPLETE": "complete_bash",
            "COMP_WORDS": "astraflow attach ti",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split() == ["tiny-1", "tiny-2"]
    assert shown.stderr == ""
