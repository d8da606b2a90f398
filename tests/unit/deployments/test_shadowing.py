import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments import shadowing
from deployments.paths import PROJECT


def call(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python process that finds the folder first, then the project."""
    path = os.pathsep.join([str(folder), str(PROJECT)])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, "ASTRAFLOW_HOME": str(folder / "home"), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_nothing_shadows_the_packages_here() -> None:
    assert shadowing.fault() == ""


@pytest.mark.parametrize(
    ("own", "found"), [("tasks/__init__.py", "tasks"), ("storage.py", "storage.py")]
)
@pytest.mark.parametrize(
    "command", [["deployments.cli.app", "--help"], ["deployments.registration.flow_entrypoint"]]
)
def test_a_shadowing_folder_or_file_is_named(
    tmp_path: Path, own: str, found: str, command: list[str]
) -> None:
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("raise SystemExit('this ran')")
    done = call(tmp_path, "-m", *command)
    name = found.removesuffix(".py")
    assert done.returncode == 2
    assert done.stderr == (
        f"{tmp_path / found} is imported instead of AstraFlow's package {PROJECT / name}; rename it, "
        "remove its folder from PYTHONPATH, or start AstraFlow in another folder\n"
    )


def test_a_folder_without_python_files_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    assert call(tmp_path, "-m", "deployments.cli.app", "--help").returncode == 0


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from deployments import shadowing;"
        "shadowing.PACKAGES = ('no_such_package_of_ours',);"
        "print(shadowing.fault(Path('/there')))"
    )
    assert call(tmp_path, "-c", code).stdout == (
        "AstraFlow's package /there/no_such_package_of_ours cannot be imported; install AstraFlow again\n"
    )
