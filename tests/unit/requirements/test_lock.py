"""The locked versions for `make install`: they are within the ranges of pyproject.toml, and each
file has its hash.
"""

import hashlib
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.checkout import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""SHA-256 of https://www.apache.org/licenses/LICENSE-2.0.txt"""


def _entries(name: str) -> dict[str, str]:
    """Package → its entry in a file of `requirements/`."""
    lines = [
        line
        for line in (ROOT / "requirements" / name).read_text().splitlines()
        if not line.startswith("#")
    ]
    entries = re.split(r"^(?=[A-Za-z])", "\n".join(lines) + "\n", flags=re.MULTILINE)
    return {canonicalize_name(entry.partition("==")[0]): entry for entry in entries if entry}


def _version(entry: str) -> str:
    return entry.partition("==")[2].split()[0]


LOCKED, CUDA, TORCH = (_entries(name) for name in ("locked.txt", "cuda.txt", "torch.txt"))
DEEPSPEED, DOCS = _entries("deepspeed.txt"), _entries("docs.txt")
EXTRAS = runpy.run_path(str(ROOT / "requirements" / "lock.py"))["EXTRAS"]
DECLARED = [
    *PROJECT["build-system"]["requires"],
    *PROJECT["project"]["dependencies"],
    *(each for extra in EXTRAS for each in PROJECT["project"]["optional-dependencies"][extra]),
]


@pytest.mark.parametrize("declared", DECLARED)
def test_each_declared_package_is_locked_within_its_range(declared: str) -> None:
    requirement = Requirement(declared)
    entry = {**LOCKED, **TORCH}[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(_version(entry))


def test_the_packages_of_the_documentation_are_locked_apart() -> None:
    for declared in map(Requirement, PROJECT["project"]["optional-dependencies"]["docs"]):
        assert declared.specifier.contains(_version(DOCS[canonicalize_name(declared.name)]))
    assert "mkdocs" not in LOCKED


def test_each_locked_package_has_hashes() -> None:
    assert len(LOCKED) > 150
    for entry in (*LOCKED.values(), *CUDA.values(), *DOCS.values()):
        head, *hashes = entry.rstrip().split(" \\\n")
        assert re.fullmatch(r"[a-z0-9.-]+==[\w.+]+( ; .+)?", head), entry
        assert len(hashes) >= 1, entry
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in hashes), entry


def test_deepspeed_and_what_only_it_needs_are_locked_with_hashes() -> None:
    (declared,) = map(Requirement, PROJECT["project"]["optional-dependencies"]["deepspeed"])
    assert declared.specifier.contains(_version(DEEPSPEED[declared.name]))
    assert DEEPSPEED.keys() == {"deepspeed", "einops", "hjson", "ninja", "py-cpuinfo"}
    assert not DEEPSPEED.keys() & LOCKED.keys()
    for entry in DEEPSPEED.values():
        _, *hashes = entry.rstrip().split(" \\\n")
        assert len(hashes) >= 1, entry
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in hashes), entry


def test_only_torch_has_no_hash_and_its_cuda_packages_are_optional() -> None:
    assert list(TORCH) == ["torch"]
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+\n", TORCH["torch"])
    assert not [name for name in LOCKED if re.match("nvidia|cuda|triton|torch", name)]
    assert {"nvidia-cublas", "nvidia-nccl-cu13", "cuda-bindings", "triton"} < CUDA.keys()
    assert all("sys_platform == 'linux'" in entry for entry in CUDA.values())


def test_the_dependencies_of_torch_are_locked() -> None:
    needed = [Requirement(line) for line in importlib.metadata.requires("torch") or []]
    names = {
        canonicalize_name(item.name)
        for item in needed
        if item.marker is None or item.marker.evaluate({"extra": ""})
    }
    assert {"sympy", "networkx"} <= names
    assert names <= {*LOCKED, *CUDA}


def test_the_installed_versions_are_the_locked_ones() -> None:
    installed = {
        name: importlib.metadata.version(name)
        for name in ("prefect", "mlflow", "numpy", "pyarrow", "pydantic")
    }
    assert installed == {name: _version(LOCKED[name]) for name in installed}


def test_a_resolution_is_split_by_who_needs_a_package() -> None:
    split = runpy.run_path(str(ROOT / "requirements" / "lock.py"))["split"]
    item = "torch==2.13.0 \\\n    --hash=sha256:aa\n"
    others = [
        f"{name}==1.0 \\\n    --hash=sha256:bb\n"
        for name in ("nvidia-nccl-cu13", "cuda-bindings", "triton", "torchdata")
    ]
    assert split([*others, item]) == {
        "locked.txt": others[3],
        "cuda.txt": "".join(others[:3]),
        "torch.txt": "torch==2.13.0\n",
    }


def test_no_second_index_is_used_for_all_packages() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "EXTRA_INDEX" not in makefile
    uses = [
        line.strip()
        for line in makefile.splitlines()
        if line.startswith("\t") and "FROM_TORCH_INDEX" in line
    ]
    assert len(uses) == 3
    assert all("requirements/torch.txt" in line and "locked.txt" not in line for line in uses)


def _commands(target: str, folder: Path) -> list[str]:
    """What `make` would run for the target in a fresh clone; nothing is run."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH_INDEX"}
    }
    printed = subprocess.run(
        ["make", "--dry-run", target], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert printed.returncode == 0, printed.stderr
    return printed.stdout.splitlines()


def test_all_that_is_installed_has_hashes_but_torch_and_the_project(tmp_path: Path) -> None:
    installations = [line for line in _commands("install", tmp_path) if " -m pip install " in line]
    hashed = {
        name
        for line in installations
        for name in re.findall(r"requirements/(\w+)\.txt", line)
        if "--require-hashes --no-deps " in line
    }
    others = [line for line in installations if "--require-hashes" not in line]
    assert hashed == {"locked", "cuda", "deepspeed"}
    assert ["requirements/torch.txt" in line for line in others] == [True, False]
    assert all("--no-deps" in line for line in others)
    assert others[1].endswith("-e .")


def test_all_that_an_image_installs_has_hashes_but_torch_and_the_project() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    installations = re.findall(r"pip install (.*?)(?=&&|\n)", dockerfile)
    others = [each for each in installations if "--require-hashes" not in each]
    assert len(installations) - len(others) >= 4
    assert all("requirements/torch.txt" in each or "--editable ." in each for each in others)


def test_check_runs_every_tool(tmp_path: Path) -> None:
    commands = [line for line in _commands("check", tmp_path) if "pip install" not in line]
    for tool in ("ruff check .", "ruff format --check .", "deptry .", "mypy", "lint-imports"):
        assert f".venv/bin/{tool}" in commands
    assert any(line.startswith(".venv/bin/python -m pytest ") for line in commands)


def test_the_licence_is_the_apache_text_and_is_declared() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    assert (PROJECT["project"]["license"], PROJECT["project"]["license-files"]) == (
        "Apache-2.0",
        ["LICENSE"],
    )


def test_the_hooks_of_commits_have_the_locked_linter() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    linter = next(each for each in repositories if "ruff" in each["repo"])
    assert linter["rev"] == f"v{_version(LOCKED['ruff'])}"
