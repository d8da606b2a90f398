"""Rules of the project's layout: class names, sizes of folders, folders of tests."""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["importlinter"]["root_packages"]
WITH_BENCHMARKS = [*PACKAGES, "benchmarks"]
MODULES_MAX = 13


def modules(package: str) -> list[Path]:
    """Paths of the package's modules, relative to the checkout."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))


def test_public_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in (module for package in WITH_BENCHMARKS for module in modules(package)):
        for node in ast.parse((ROOT / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert len(places) > 200
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("package", WITH_BENCHMARKS)
def test_no_folder_has_more_modules_than_a_reader_can_survey(package: str) -> None:
    names = defaultdict(list)
    for path in modules(package):
        if path.name != "__init__.py":
            names[str(path.parent)].append(path.name)
    assert names
    assert {folder: files for folder, files in names.items() if len(files) > MODULES_MAX} == {}


def test_each_handler_of_any_error_has_its_reason() -> None:
    lines = [
        f"{path}:{number}: {line.strip()}"
        for package in WITH_BENCHMARKS
        for path in modules(package)
        for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1)
        if re.match(r"\s*except .*\bException\b", line)
    ]
    assert len(lines) > 20
    assert [line for line in lines if "  # " not in line] == []


def test_each_folder_of_unit_tests_mirrors_a_folder_of_the_project() -> None:
    unit = ROOT / "tests" / "unit"
    folders = sorted({path.parent.relative_to(unit) for path in unit.rglob("test_*.py")})
    assert Path("storage/weights") in folders
    homes = (ROOT, ROOT / "tests")
    assert [str(at) for at in folders if not any((home / at).is_dir() for home in homes)] == []
