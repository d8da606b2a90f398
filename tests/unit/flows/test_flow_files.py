"""Flow files follow the three rules of Prefect's loader of flows by path."""

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

FLOWS = ROOT / "flows"
FILES = sorted(path for path in FLOWS.glob("*.py") if path.stem != "__init__")


def test_no_flow_file_has_the_name_of_an_importable_module() -> None:
    # Prefect leaves flows/ at the front of sys.path: `flows/queue.py` would replace the standard
    # module for the whole process.
    installed = set(importlib.metadata.packages_distributions())
    rooms = {
        "storage",
        "data_ops",
        "rollout",
        "trainer",
        "tasks",
        "flows",
        "deployments",
        "benchmarks",
        "tests",
    }
    taken = installed - {"flows"} | rooms | set(sys.stdlib_module_names)
    assert [path.name for path in FILES if path.stem in taken] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_flow_file_contains_only_flows(path: Path) -> None:
    tree = ast.parse(path.read_text())
    others = [
        ast.unparse(node)[:60]
        for node in tree.body
        if not isinstance(
            node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef
        )
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    assert others == []
    functions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert functions
    assert all(
        any("flow" in ast.unparse(mark) for mark in function.decorator_list)
        for function in functions
    )
    assert all(node.level == 0 for node in tree.body if isinstance(node, ast.ImportFrom))
