"""Trials of mutants: the nearest tests in a forked child process, over a copy of the tree.

    baseline   each test file, unchanged ──▶ functions that each test calls, and its CPU time
    trial      mutated file in a copy ──fork──▶ pytest on the tests that call its function,
                                                until the first failure

A mutant is tried with the test files of its module first. If it survives, it is tried with the
other test files that import the module, then with those that import a module which imports it. A
trial that uses far more CPU
time than its tests in the baseline, or none for a while, counts as noticed: it hangs. Time in which
it waits for a CPU of a loaded machine is not counted.
"""

import ast
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

PRELOADED = (
    "numpy", "pyarrow.ipc", "pydantic", "fsspec", "xxhash", "tenacity", "yaml",
    "numba", "httpx", "s3fs", "boto3", "moto.server", "tokenizers", "torch", "transformers",
)  # fmt: skip
"""Packages of tests and sources that are imported once, before the forks."""
PYTEST = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
FOLDERS = ("tests/unit", "tests/contract", "tests/property")
TRIAL_CPU_S = 60.0
"""Maximum CPU time (in the baseline) of the tests of one trial; the nearest tests come first."""
CPU_FACTOR, CPU_MARGIN_S = 4.0, 30.0
"""CPU limit of a trial: a factor of its tests' CPU time in the baseline, and a margin."""
STALLED_S, STALLED_SHARE = 45.0, 0.01
"""A trial that uses less than this share of a CPU for this long, in which it could have run, hangs."""
OUTPUT = ".output"
"""File in a copy of the tree: the output of the last child process."""

Function = tuple[str, str, int]
"""File, name and first line of a code object."""


@dataclass
class Tests:
    """Result of one test file in the baseline."""

    passed: bool
    output: str = ""
    """End of the output of a file that did not pass."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Test id → CPU time."""
    calls: dict[str, set[Function]] = field(default_factory=dict)
    """Test id → functions of the project that it calls; "" for what fixtures of the whole file call.
    """

    def calling(self, function: Function | None) -> list[str]:
        if function is None or function in self.calls.get("", ()):
            return list(self.cpu_s)
        return [test for test in self.cpu_s if function in self.calls[test]]


class Recorder:
    """A pytest plugin that records CPU time and calls of every test."""

    def __init__(self, root: Path) -> None:
        self.root = f"{root}/"
        self.found = Tests(passed=False)
        self._current: set[Function] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        test = item.nodeid.partition("[")[0]  # parametrised tests go together
        self._current = self.found.calls.setdefault(test, set())
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        start_s = _own_cpu_s()
        yield
        sys.settrace(None)
        self.found.cpu_s[test] = self.found.cpu_s.get(test, 0.0) + _own_cpu_s() - start_s

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = self._current
        if fixturedef.scope != "function":
            self._current = self.found.calls.setdefault("", set())
        yield
        self._current = before

    def _trace(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self.root):
            self._current.add(
                (code.co_filename.removeprefix(self.root), code.co_name, code.co_firstlineno)
            )


class Marker:
    """A pytest plugin that records the first failing test immediately."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.path.exists():
            self.path.write_text(report.nodeid)


def nearest(path: str) -> list[str]:
    """Test files that are named for the module `path`."""
    folder, _, name = path.rpartition("/")
    return [
        f"tests/unit/{folder}/test_{name}",
        f"tests/contract/test_{name}",
        f"tests/property/test_{name}",
    ]


def importing(root: Path) -> dict[str, dict[str, bool]]:
    """Test file → module that it imports, or that such a module imports → whether it does itself."""
    files = (path for folder in FOLDERS for path in sorted((root / folder).rglob("test_*.py")))
    direct = {path.relative_to(root).as_posix(): _imports(path) for path in files}
    modules = {
        name: root / f"{name.replace('.', '/')}.py" for names in direct.values() for name in names
    }
    further = {name: _imports(path) for name, path in modules.items() if path.is_file()}
    return {
        file: {
            name: name in names for name in names.union(*(further.get(name, ()) for name in names))
        }
        for file, names in direct.items()
    }


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def preload() -> None:
    """Import slow packages; skip those that are not installed."""
    for name in PRELOADED:
        with suppress(ImportError):
            __import__(name)


def baseline(root: Path, file: str) -> Tests:
    """Run the test file, unchanged, over the tree `root`."""
    out = root / ".baseline.json"
    out.unlink(missing_ok=True)

    def record() -> int:
        recorder = Recorder(root)
        code = int(pytest.main([*PYTEST, file], plugins=[recorder]))
        calls = {test: sorted(functions) for test, functions in recorder.found.calls.items()}
        out.write_text(json.dumps([recorder.found.cpu_s, calls]))
        return code

    passed = _forked(root, record, 600.0, kept=True) == 0
    output = (root / OUTPUT).read_text(errors="replace")[-1500:]
    if not passed or not out.exists():
        return Tests(False, output)
    cpu_s, calls = json.loads(out.read_text())
    return Tests(
        True,
        "",
        cpu_s,
        {test: {tuple(item) for item in functions} for test, functions in calls.items()},
    )


def trial(root: Path, tests: Sequence[str], cpu_s: float) -> str:
    """Run the tests over the mutated tree `root`. Return the test that failed, `hangs`, or "" when
    all passed.
    """
    marked = root / ".failed"
    marked.unlink(missing_ok=True)
    run = lambda: int(pytest.main([*PYTEST, "-x", *tests], plugins=[Marker(marked)]))  # noqa: E731
    code = _forked(root, run, cpu_s * CPU_FACTOR + CPU_MARGIN_S)
    if marked.exists():
        return marked.read_text()
    return (
        ""
        if code == 0
        else "hangs"
        if code == -signal.SIGKILL
        else f"the interpreter ended with {code}"
    )


def _forked(root: Path, work: Callable[[], int], cpu_max_s: float, kept: bool = False) -> int:
    """Exit code of `work` in a child process whose imports come from `root`; killed when it takes
    too long.
    """
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            _enter(root, not kept)
            code = work()
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    try:
        return _waited(pid, cpu_max_s)
    finally:
        with suppress(ProcessLookupError):  # files that the tests of a mutant left
            os.killpg(pid, signal.SIGKILL)


def _enter(root: Path, not_kept: bool) -> None:
    os.chdir(root)
    output = os.open(root / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [
        str(root),
        *(entry for entry in sys.path if entry not in ("", os.environ.get("PYTHONPATH"))),
    ]
    os.environ["PYTHONPATH"] = str(root)
    sys.dont_write_bytecode = not_kept
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1" if not_kept else ""


def _waited(pid: int, cpu_max_s: float) -> int:
    watched, queued_s = psutil.Process(pid), dict[int, float]()
    seen_cpu_s = since_s = 0.0
    start_s = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
        used_s = _cpu_s(watched)
        queued_s |= _queued_s(watched)
        able_s = time.monotonic() - start_s - sum(queued_s.values())
        if used_s - seen_cpu_s > STALLED_SHARE * STALLED_S:
            seen_cpu_s, since_s = used_s, able_s
        if used_s > cpu_max_s or able_s - since_s > STALLED_S:
            os.killpg(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _cpu_s(process: psutil.Process) -> float:
    """CPU time of the process, its children and their ended children."""
    total = 0.0
    with suppress(psutil.Error):
        for item in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                times = item.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def _queued_s(process: psutil.Process) -> dict[int, float]:
    """Thread → time that it was runnable and had no CPU, for the process and its children; empty
    where the kernel does not count it.
    """
    result: dict[int, float] = {}
    with suppress(psutil.Error):
        for item in [process, *process.children(recursive=True)]:
            with suppress(OSError):  # the process, or a thread of it, has ended
                for counted in Path(f"/proc/{item.pid}/task").glob("*/schedstat"):
                    result[int(counted.parent.name)] = int(counted.read_text().split()[1]) / 1e9
    return result


def _own_cpu_s() -> float:
    """CPU time of this process and of its ended children."""
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def chosen(results: Mapping[str, Tests], function: Function | None) -> tuple[list[str], float]:
    """Return the tests for a mutant within `function` (None: at module level) and their CPU time in
    the baseline: the fastest files first, within `TRIAL_CPU_S`.
    """
    picked = [
        (sum(tests.cpu_s[item] for item in ids), ids)
        for tests in results.values()
        if tests.passed and (ids := tests.calling(function))
    ]
    total_s, names = 0.0, []
    for cpu_s, ids in sorted(picked):
        if not names or total_s + cpu_s <= TRIAL_CPU_S:
            total_s += cpu_s
            names += ids
    return names, total_s
