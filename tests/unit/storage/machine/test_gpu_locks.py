import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from storage.errors import ConfigError
from storage.machine import gpu_locks
from storage.machine.gpu_locks import GpuBusyError, descriptors, held_gpus, reserve_gpus

HOLD = """
import subprocess, sys
from pathlib import Path
from storage.machine import gpu_locks
gpu_locks.FOLDER = Path(sys.argv[1])
with gpu_locks.held_gpus("trainer-solver of runs/tiny-1", eval(sys.argv[2]), float(sys.argv[3])):
    if sys.argv[4] == "child":
        child = subprocess.Popen(["sleep", "3600"], stdout=subprocess.DEVNULL, pass_fds=gpu_locks.descriptors())
        print(child.pid, flush=True)
    else:
        print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "gpus"


@contextmanager
def other_process(
    folder: Path, gpus: list[int], share: float = 1.0, kind: str = ""
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds GPUs, and the line that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(gpus), str(share), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_a_gpu_of_another_process_is_refused_with_its_name_and_pid(folder: Path) -> None:
    with other_process(folder, [0, 2]) as (process, _):
        with pytest.raises(GpuBusyError) as raised, held_gpus("a worker", [1, 2]):
            pass
        words = f"GPU 2 (2) is used by trainer-solver of runs/tiny-1 (process {process.pid} or a child of it, share 1)"
        assert words in str(raised.value)
        with held_gpus("a worker", [1]):  # nothing of the refused claim is left
            assert len(descriptors()) == 1


def test_shares_that_add_up_to_one_use_a_gpu_together(folder: Path) -> None:
    with other_process(folder, [0], 0.6):
        with held_gpus("a worker", [0], 0.4):
            pass
        with (
            pytest.raises(GpuBusyError, match=r"share 0\.6\), and a share of 0\.41 is wanted"),
            held_gpus("w", [0], 0.41),
        ):
            pass


def test_a_killed_process_leaves_its_gpu_free_and_its_file_is_deleted(folder: Path) -> None:
    with other_process(folder, [0]) as (process, _):
        process.kill()
        process.communicate()
        assert len(list(folder.glob("0.*"))) == 1
        with held_gpus("a worker", [0]):
            assert [path.name.split(".")[1] for path in folder.glob("0.*")] == [str(os.getpid())]


def test_a_gpu_is_free_when_the_child_processes_of_its_holder_have_ended(folder: Path) -> None:
    with other_process(folder, [0], kind="child") as (process, line):
        child = psutil.Process(int(line))
        process.kill()
        process.communicate()
        with (
            pytest.raises(GpuBusyError, match=f"process {process.pid} or a child of it"),
            held_gpus("a worker", [0]),
        ):
            pass
        child.kill()
        child.wait()
        with held_gpus("a worker", [0]):
            pass


def test_a_process_may_hold_a_gpu_twice_and_frees_it_at_the_end(folder: Path) -> None:
    with held_gpus("a", [0]):
        with held_gpus("b", [0, 1]):
            assert len(descriptors()) == 3
        assert len(descriptors()) == 1
    assert descriptors() == ()
    with other_process(folder, [0]) as (_, line):
        assert line == "held"


def test_a_gpu_is_known_by_its_name_and_not_by_its_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_process(folder, [6]):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
        with held_gpus("a worker", [0]):
            pass
        with pytest.raises(GpuBusyError, match=r"GPU 1 \(6\) is used"), held_gpus("a worker", [1]):
            pass


def test_no_gpus_need_no_folder(folder: Path) -> None:
    with held_gpus("a worker", []):
        assert not folder.exists()


@pytest.mark.parametrize("record", ["", "[]", '{"holder": "x", "pid": 1, "share": 7}', "{"])
def test_a_record_that_cannot_be_read_counts_as_a_whole_gpu(folder: Path, record: str) -> None:
    with other_process(folder, [0], 0.1):
        (path,) = folder.glob("0.*")
        path.write_text(record)
        with (
            pytest.raises(GpuBusyError, match=r"unreadable record .*share 1\)"),
            held_gpus("a worker", [0], 0.1),
        ):
            pass


def test_a_folder_that_others_may_use_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    with (
        pytest.raises(ConfigError, match=r"must be a folder of this user alone \(mode 0700\)"),
        held_gpus("w", [0]),
    ):
        pass
    folder.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "theirs")
    with (
        pytest.raises(ConfigError, match="must be a folder of this user alone"),
        held_gpus("w", [0]),
    ):
        pass


RESERVE = """
import os, sys
from pathlib import Path
from storage.machine import gpu_locks
gpu_locks.FOLDER = Path(sys.argv[1])
gpu_locks.reserve_gpus("worker-rollout", sys.argv[2].split(","))
starts_a_child = "import subprocess; child = subprocess.Popen(['sleep', '3600'], stdout=subprocess.DEVNULL); print(child.pid, flush=True); input()"
os.execv(sys.executable, [sys.executable, "-c", starts_a_child])
"""


@contextmanager
def worker_with(folder: Path, names: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that reserved GPUs and then became another program, and that program's child."""
    process = subprocess.Popen(
        [sys.executable, "-c", RESERVE, str(folder), names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    child = int(process.stdout.readline())
    try:
        yield process, child
    finally:
        process.kill()
        process.communicate()
        psutil.Process(child).kill()


def test_a_second_worker_of_a_pool_gets_no_gpu_of_the_first(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "worker-rollout.1").write_text("the record of a worker that has ended" * 9)
    with worker_with(folder, "0,1") as (process, child):
        message = (
            rf"GPU 1 \(1\) belongs to another worker-rollout \(process {process.pid}\); end it"
        )
        with pytest.raises(GpuBusyError, match=message):
            reserve_gpus("worker-rollout", ["2", "1"])
        with worker_with(folder, "2"):  # nothing of the refused reservation is left
            pass
        reserve_gpus("worker-trainers", ["1"])  # of another pool: members may share a GPU
        with held_gpus("a worker", [0, 1]):  # a reservation is no use
            pass
        process.kill()
        process.communicate()
        assert psutil.pid_exists(child)
        reserve_gpus("worker-rollout", ["1"])  # the child of the ended worker has no part in it


def test_a_worker_without_named_gpus_reserves_none(folder: Path) -> None:
    reserve_gpus("worker-rollout", [])
    assert not folder.exists()
