"""The tool behind `make mutants`: its mutations, and its report on the tests of a small project."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from tests.mutants import trials
from tests.mutants.mutations import Mutant, mutants
from tests.support.checkout import ROOT


def changes(source: str) -> list[tuple[str, str]]:
    """(before, after) of every mutant of a source, in their order."""
    text = dedent(source).lstrip()
    return [item.change(text) for item in mutants("a.py", text)]


def one_of(source: str, after: str) -> Mutant:
    return next(item for item in mutants("a.py", source) if item.change(source)[1] == after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a == b != c", ["x = a != b != c", "x = a == b == c"]),
        ("x = (a) in (b)", ["x = (a) not in (b)"]),
        ("x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        ("x = not a", ["x = a"]),
        ("x = 7", ["x = 8"]),
        ("x = True", ["x = False"]),
        ("x = a + b - c", ["x = a - b - c", "x = a + b + c"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("x = f(a, b, k=c)", ["x = f(b, a, k=c)", "x = f(a, b, )"]),
        ("x = zip(a, b, strict=True)", ["x = zip(b, a, strict=True)"]),
        (
            "x = zip(a, b, strict=False)",
            ["x = zip(b, a, strict=False)", "x = zip(a, b, )", "x = zip(a, b, strict=True)"],
        ),
        ("x = f(strict=True)", ["x = f()", "x = f(strict=False)"]),
        ("x = a if b else c", ["x = a if not (b) else c"]),
        ("x = [a for a in b if a]", ["x = [a for a in b if not (a)]"]),
    ],
)
def test_an_expression_is_changed_in_one_place_at_a_time(before: str, after: list[str]) -> None:
    assert [found for _, found in changes(before)] == after


def test_statements_are_dropped_swapped_and_their_conditions_negated() -> None:
    source = """
        def f(self, a):
            self.a = a
            go(a)
            if a:
                raise ValueError("no")
            a += b
            return a == b
    """
    assert [results for _, results in changes(source)] == [
        "go(a) self.a = a",
        "pass",  # self.a = a
        "pass",  # go(a)
        "if not (a):",
        "pass",  # raise
        "pass",  # +=
        "return False",
        "return True",
        "return a != b",
    ]


def test_strings_annotations_decorators_and_log_calls_are_not_changed() -> None:
    source = '''
        """A docstring with 1."""
        from a import b

        @decorated(1)
        def f(a: "List[1]" = None) -> Literal[1]:
            """Another, with 2."""
            log.info("%d of %d", 3, 4)
            x: Final[1]
            return f"{a} {1}"
    '''
    assert [found for _, found in changes(source)] == ["return None"]


def test_a_mutant_is_named_by_its_source_text_independent_of_its_line() -> None:
    source = "def f(a):\n    return a < 1\n"
    moved = "\n\nx = y\n" + source
    result = [(item.function, *item.change(source)) for item in mutants("a.py", source)]
    assert (
        result
        == [(item.function, *item.change(moved)) for item in mutants("a.py", moved)][: len(result)]
    )
    assert result[0] == ("f", "return a < 1", "return False")


def test_positions_count_characters_also_after_multibyte_letters() -> None:
    assert changes('x = "πρ→", a < b\n') == [('x = "πρ→", a < b', 'x = "πρ→", a <= b')]


def test_each_mutant_of_a_package_can_be_parsed_and_differs_from_its_source() -> None:
    for path in sorted((ROOT / "storage" / "run").rglob("*.py")):
        source = path.read_text()
        for item in mutants(path.name, source):
            compile(item.applied(source), path.name, "exec")
            assert item.applied(source) != source


def test_a_probe_marks_the_statement_or_its_function() -> None:
    source = (
        "def f(a):\n    b = a\n    if a < 1:\n        return 1\n    elif a < 3:\n        return 4\n"
    )
    marked = one_of(source, "return 2").probed(source, "/there")
    assert marked.splitlines()[3] == "        open('/there', 'w').close()"
    of_branch = one_of(source, "elif a <= 3:").probed(source, "/there")
    assert of_branch.splitlines()[1] == "    open('/there', 'w').close()"
    compiled = f"@njit(cache=True)\n{source}"
    assert one_of(compiled, "return 2").probed(compiled, "/there") == one_of(
        compiled, "return 2"
    ).applied(compiled)


def test_test_files_are_found_by_their_imports(tmp_path: Path) -> None:
    (tmp_path / "tests/unit").mkdir(parents=True)
    (tmp_path / "storage/coordination").mkdir(parents=True)
    (tmp_path / "storage/coordination/leases.py").write_text("from storage import layout\n")
    (tmp_path / "storage/layout.py").write_text("from storage import import_path\n")
    (tmp_path / "tests/unit/test_a.py").write_text(
        "from storage.coordination import leases\nfrom storage.run import orders\nimport "
        "data_ops.dataflow.ledger\n"
    )
    (tmp_path / "tests/unit/test_b.py").write_text(
        "def test():\n    from storage.store.object_store import y\n"
    )
    result = trials.importing(tmp_path)
    assert {
        "storage.coordination.leases": True,
        "storage.run.orders": True,
        "data_ops.dataflow.ledger": True,
        "storage.layout": False,  # which `leases` imports
    }.items() <= result["tests/unit/test_a.py"].items()
    assert "storage.store.object_store" in result["tests/unit/test_b.py"]
    assert "storage.coordination.leases" not in result["tests/unit/test_b.py"]
    assert "storage.import_path" not in result["tests/unit/test_a.py"]


def test_a_busy_trial_is_killed_by_cpu_time_and_a_silent_one_by_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spin() -> int:
        while True:
            pass

    def wait() -> int:
        time.sleep(600.0)
        return 0

    assert trials._forked(tmp_path, lambda: 3, cpu_max_s=60.0) == 3
    assert trials._forked(tmp_path, spin, cpu_max_s=0.5) == -signal.SIGKILL
    monkeypatch.setattr(trials, "STALLED_S", 0.5)
    assert trials._forked(tmp_path, wait, cpu_max_s=60.0) == -signal.SIGKILL


def test_a_trial_that_waits_for_a_cpu_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's counters are replaced: no test can take the CPU from a process for long."""

    def wait() -> int:
        time.sleep(1.0)
        return 0

    start_s = time.monotonic()
    monkeypatch.setattr(trials, "STALLED_S", 0.2)
    monkeypatch.setattr(trials, "_cpu_s", lambda _: 0.0)
    monkeypatch.setattr(trials, "_queued_s", lambda _: {1: time.monotonic() - start_s})
    assert trials._forked(tmp_path, wait, cpu_max_s=60.0) == 0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's counters")
def test_the_wait_for_a_cpu_is_counted_for_the_process_and_its_children() -> None:
    on_one_cpu = (
        "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    )
    spinning = [subprocess.Popen([sys.executable, "-c", on_one_cpu]) for _ in range(2)]
    try:
        waiting: set[int] = set()
        deadline_s = time.monotonic() + 60.0
        while len(waiting) < 2 and time.monotonic() < deadline_s:
            waits_s = trials._queued_s(psutil.Process())
            waiting = {child.pid for child in spinning if waits_s.get(child.pid, 0.0) > 0.02}
            time.sleep(0.01)
    finally:
        for child in spinning:
            child.kill()
            child.wait()
    assert len(waiting) == 2
    assert threading.get_native_id() in waits_s


def test_a_process_that_ends_while_it_is_counted_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # it ends after this check
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        watched = psutil.Process(child.pid)
    monkeypatch.setattr(watched, "children", lambda recursive: [])
    assert trials._queued_s(watched) == {}


MODULE = """
LIMIT = 3


def tested(a, b):
    return a + b


def called(a):
    return a < 10


def unreached(a):
    if a:
        return "x"
    return a + a


def untested(a):
    return a * a
"""
TEST = """
from storage import small


def test_all():
    assert small.tested(2, 3) == 5
    assert small.called(1)
    assert small.unreached(True) == "x"
    assert small.LIMIT == 3
"""


MAIN = """
import sys
from tests.mutants import __main__, trials

trials.PRELOADED = ()  # the small project imports none of them
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_the_report_of_a_small_project_has_killed_surviving_and_uncovered_mutants(
    tmp_path: Path,
) -> None:
    for name, text in (
        ("storage/small.py", MODULE),
        ("tests/unit/storage/test_small.py", TEST),
        ("pytest.ini", "[pytest]\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    command = [
        sys.executable,
        "-c",
        MAIN,
        "--sample",
        "0",
        "--jobs",
        "1",
        "--json",
        "found.json",
        "storage",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = {
        (row["function"], row["after"]): row["fate"]
        for row in json.loads((tmp_path / "found.json").read_text())
    }
    assert result == {
        ("", "LIMIT = 4"): "noticed",
        ("tested", "return None"): "noticed",
        ("tested", "return a - b"): "noticed",
        ("called", "return False"): "noticed",
        ("called", "return True"): "survived",
        ("called", "return a <= 10"): "survived",
        ("called", "return a < 11"): "survived",
        ("unreached", "if not (a):"): "noticed",
        ("unreached", "return None"): "not covered",
        ("unreached", "return a - a"): "not covered",
        ("untested", "return None"): "not covered",
        ("untested", "return a + a"): "not covered",
    }
    assert "| storage/small.py | 5 | 3 | 4 | 0 | 42% |" in ended.stdout
    assert re.search(
        r"survived, 1 tests\nstorage/small\.py:10 called\n  - return a < 10\n  \+ return a < 11\n",
        ended.stdout,
    )
    assert {path: path.read_bytes() for path in before} == before
