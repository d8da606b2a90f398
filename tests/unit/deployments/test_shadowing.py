import os
import subprocess
import sys
import tomllib
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


OTHER = 65_534
"""A user id that is neither this user's nor root's."""


def settings_of(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    """Make this process one of another user than the owner of its files."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shadowing, "ROOT", user)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".numba_config.yaml", "cache_dir: /tmp/x\n"),
        ("prefect.toml", ""),
        (".env", "A=1\nprefect_logging_config_path=/tmp/x\n"),
        ("pyproject.toml", "[tool.prefect]\n"),
        ("pyproject.toml", '["tool"."pr\\u0065fect".logging]\n'),
        ("pyproject.toml", "tool = ''\n"),
        ("pyproject.toml", f"a = {'[' * 100_000}"),
        ("pyproject.toml", "no TOML"),
    ],
)
def test_settings_of_libraries_in_a_file_of_another_user_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    assert shadowing.foreign_settings(tmp_path) == ""  # one's own
    settings_of(monkeypatch, OTHER)
    assert shadowing.foreign_settings(tmp_path) == (
        f"{tmp_path / name} belongs to another user, and {shadowing.SETTINGS[name]} would read its "
        "settings from it, which can run code; start AstraFlow in another folder"
    )
    assert shadowing.foreign_settings(tmp_path, project=tmp_path) == ""


def test_other_files_of_another_user_are_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_of(monkeypatch, OTHER)
    assert shadowing.foreign_settings(tmp_path) == ""
    (tmp_path / ".env").write_text("MY_TOKEN=1\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "prefect-like"\n')
    (tmp_path / "prefect.yaml").write_text("name: mine\n")
    assert shadowing.foreign_settings(tmp_path) == ""


def test_a_pipe_and_a_large_file_of_another_user_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_of(monkeypatch, OTHER)
    os.mkfifo(tmp_path / ".env")
    assert str(tmp_path / ".env") in shadowing.foreign_settings(tmp_path)
    (tmp_path / ".env").unlink()
    (tmp_path / ".env").write_text("A" * shadowing.BYTES_MAX)
    assert shadowing.foreign_settings(tmp_path) == ""
    (tmp_path / ".env").write_text("A" * (shadowing.BYTES_MAX + 1))
    assert str(tmp_path / ".env") in shadowing.foreign_settings(tmp_path)


def test_files_of_root_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prefect.toml").write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    monkeypatch.setattr(shadowing, "ROOT", (tmp_path / "prefect.toml").stat().st_uid)
    assert shadowing.foreign_settings(tmp_path) == ""


def test_a_deleted_working_folder_has_no_settings(tmp_path: Path) -> None:
    code = (
        "import os, pathlib; pathlib.Path('gone').mkdir(); os.chdir('gone'); os.rmdir('../gone');"
        "from deployments import shadowing; shadowing.refuse(); print('went on')"
    )
    assert call(tmp_path, "-c", code).stdout == "went on\n"


def test_all_packages_of_the_project_are_looked_for() -> None:
    packaged = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]
    named = {each.partition("*")[0] for each in packaged["packages"]["find"]["include"]}
    assert {*shadowing.PACKAGES, "deployments", "benchmarks", "recipes"} == named


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("theirs", ["file", "link", "target"])
@pytest.mark.parametrize(
    "command", [["deployments.cli.app", "--help"], ["deployments.registration.flow_entrypoint"]]
)
def test_no_process_starts_beside_foreign_settings(
    tmp_path: Path, command: list[str], theirs: str
) -> None:
    settings = changed = tmp_path / "prefect.toml"
    if theirs == "file":
        settings.write_text("")
    else:
        (tmp_path / "target.toml").write_text("")
        settings.symlink_to("target.toml")
    if theirs == "target":
        changed = tmp_path / "target.toml"
    assert call(tmp_path, "-m", "deployments.cli.app", "--help").returncode == 0
    os.chown(changed, OTHER, OTHER, follow_symlinks=False)
    done = call(tmp_path, "-m", *command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{settings} belongs to another user")


def test_no_relative_folder_is_on_pythons_path(tmp_path: Path) -> None:
    code = "import sys; print([each for each in sys.path if not each.startswith('/')])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
