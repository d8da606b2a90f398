import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from storage.machine.temporary_folders import temporary_folder

HOLD = """
import os, sys
from pathlib import Path
from storage.machine.temporary_folders import temporary_folder
with temporary_folder("held-", Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("1")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_for_its_user_alone_and_deleted_at_the_end(tmp_path: Path) -> None:
    with temporary_folder("held-", tmp_path) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "inside").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_killed_process_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    held = Path(holder.stdout.readline().strip())
    with temporary_folder("held-", tmp_path):
        assert (held / "weights").read_text() == "1"
    holder.kill()
    holder.communicate()
    assert held.exists()
    with temporary_folder("held-", tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_folders_of_others_and_other_prefixes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    parent = tmp_path / "parent"
    (parent / "other-1").mkdir(parents=True)
    (parent / "held-link").symlink_to(outside)
    (parent / "held-theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with temporary_folder("held-", parent):
        pass
    assert {path.name for path in parent.iterdir()} == {"other-1", "held-link", "held-theirs"}
    assert outside.exists()


def test_a_folder_without_a_parent_is_in_the_folder_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("held-") as folder:
        assert folder.parent == tmp_path
