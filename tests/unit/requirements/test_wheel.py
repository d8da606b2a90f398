"""The wheel: what it contains, and that a recipe and the command line work from it alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.unit.test_house import WITH_BENCHMARKS

UNBUILT = ("tests", "docs", "requirements", "docker", "build", "dist")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """It is built from a copy, since a build writes into its folder."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    ignored = shutil.ignore_patterns(*UNBUILT, ".*", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(copy)],
        check=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    yield next(folder.glob("astraflow-*.whl"))
    shutil.rmtree(folder)


def test_it_contains_every_module_recipe_and_data_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(path.relative_to(ROOT))
        for package in [*WITH_BENCHMARKS, "recipes"]
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"{package}/py.typed" for package in WITH_BENCHMARKS} <= expected
    assert "recipes/multi_policy_tiny.yaml" in expected
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_a_recipe_and_the_command_line_work_from_it(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "site"),
        "ASTRAFLOW_STORE": "",
        "ASTRAFLOW_HOME": str(tmp_path / "home"),
    }
    code = (
        "import storage; print(storage.__file__);"
        "from tasks.recipes.loader import load; print(load('multi_policy_tiny').name)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.split() == [str(tmp_path / "site" / "storage" / "__init__.py"), "tiny"]
    helped = subprocess.run(
        [sys.executable, "-m", "deployments.cli.app", "--version"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert helped.stdout == f"astraflow {wheel.name.split('-')[1]}\n"
