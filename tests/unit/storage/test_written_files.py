"""Files from stored objects are written by one module only, which cannot write outside its folder."""

import ast
import os
from pathlib import Path

import pytest

from storage.errors import CorruptError
from storage.written_files import write_inside
from tests.support.checkout import ROOT

ROOMS = ("storage", "data_ops", "rollout", "trainer", "tasks", "flows")
"""Who reads stored objects. What `deployments` writes is named by itself or by a person: logs, the
stack's record, `--out`.
"""
WRITERS = {
    "storage/written_files.py write_inside open": "the one way: opens",
    "storage/written_files.py write_inside os.open": "a temporary file,",
    "storage/written_files.py write_inside os.replace": "and gives it its name",
    "storage/store/local.py _temporary open": "the store itself: below its root, no link followed",
    "storage/store/local.py _temporary os.open": "the same",
    "storage/store/local.py create os.link": "the same",
    "storage/store/local.py write os.replace": "the same",
    "storage/store/local.py _open_file os.open": "opens for reading, by the flags it is given",
    "tasks/maintenance/export_folder.py write os.replace": "renames what `write_inside` wrote, by the same names",
    "tasks/maintenance/export_folder.py write rmtree": "deletes the temporary folder of its own making",
    "storage/machine/child_limits.py open_replies os.fdopen": "the pipe to the parent",
    "trainer/engines/ranks/messages.py content_of os.fdopen": "a file in memory, without a name",
    "storage/machine/temporary_folders.py temporary_folder rmtree": "the temporary folder of its own making",
    "storage/machine/temporary_folders.py _delete_abandoned rmtree": "those of killed processes, by their prefix",
    "storage/machine/gpus.py _queried which": "looks for a program and writes nothing",
    "storage/machine/gpu_locks.py _take os.open": "a lock in a folder of its own, named after a GPU of the machine",
    "storage/store/source_files.py fetch open": "a copy in a temporary folder, under a name that the caller numbers",
    "storage/machine/gpu_locks.py _open_for_good os.open": "the same lock",
    "tasks/tracking/loadable_models.py _save_copy rmtree": "a part of the temporary folder of its own making",
    "tasks/tracking/loadable_models.py _save_copy rename": "the same",
    "tasks/reports/episodes_page.py write_page rmtree": "its own temporary folder, and an earlier page, which it recognizes",
    "tasks/reports/episodes_page.py write_page os.replace": "the folder that the user named",
    "tasks/reports/episodes_page.py _write write_text": "a fixed name",
    "tasks/reports/episodes_page.py _write_call open": "a number in a fixed name",
    "rollout/engines/sglang/server_process.py _launched open": "the log, in a new folder of its own",
}
"""Every call that may write a file → why its name cannot come from a stored object."""
MODES = frozenset("wax+")
NAMES = ("write_text", "write_bytes", "symlink_to", "hardlink_to", "rename", "touch", "mkstemp")
OF_OS = ("replace", "rename", "link", "symlink", "fdopen", "open")


def writing_calls(file: Path) -> list[str]:
    """`path function call` of every call that can create or change a file."""
    results = []

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = (
                child.name
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not function
                else function
            )
            if isinstance(child, ast.Call) and (word := written_by(child)):
                results.append(f"{file.relative_to(ROOT)} {function} {word}")
            visit(child, inside if not isinstance(child, ast.ClassDef) else "")

    visit(ast.parse(file.read_text()), "")
    return results


def written_by(call: ast.Call) -> str:
    """The name of the call if it can write a file, else ""."""
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if (
        last in NAMES
        or name.startswith("shutil.")
        or (name.startswith("os.") and last in OF_OS and not reads_only(call))
    ):
        return name if name.startswith("os.") else last
    if last == "open" and name != "os.open":
        modes = [
            ast.literal_eval(a)
            for a in [*call.args, *(k.value for k in call.keywords)]
            if isinstance(a, ast.Constant)
        ]
        if any(isinstance(mode, str) and len(mode) <= 3 and MODES & set(mode) for mode in modes):
            return "open"
    return ""


def reads_only(call: ast.Call) -> bool:
    """Whether an `os.open` can neither create nor write."""
    words = ast.unparse(call)
    return ast.unparse(call.func) == "os.open" and not any(
        flag in words for flag in ("O_CREAT", "O_WRONLY", "O_RDWR", "flags")
    )


def test_no_other_module_writes_files() -> None:
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    assert {call for file in files for call in writing_calls(file)} == set(WRITERS)


@pytest.mark.parametrize(
    "name", ["/tmp/EVIL", "../EVIL", "a/EVIL", "..", "", ".bashrc", "a\0", "a\nb"]
)
def test_a_name_that_leads_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CorruptError, match=r"cannot be written into .*/out: the name"):
        write_inside(tmp_path / "out", name, b"x")
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_a_symbolic_link_in_the_folder_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "theirs")
    write_inside(tmp_path / "out", "config.json", b"ours")
    assert (tmp_path / "theirs").read_bytes() == b"theirs"
    assert (tmp_path / "out" / "config.json").read_bytes() == b"ours"
    assert not (tmp_path / "out" / "config.json").is_symlink()
    assert os.listdir(tmp_path / "out") == ["config.json"]


def test_the_folder_is_created_and_can_be_a_symbolic_link(tmp_path: Path) -> None:
    write_inside(tmp_path / "new" / "folder", "a", b"1")
    (tmp_path / "link").symlink_to(tmp_path / "new" / "folder")
    write_inside(tmp_path / "link", "b", b"2")
    assert {path.name: path.read_bytes() for path in (tmp_path / "new" / "folder").iterdir()} == {
        "a": b"1",
        "b": b"2",
    }


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        write_inside(tmp_path, "a", b"x")
    assert os.listdir(tmp_path) == ["a"]
