import os
from pathlib import Path

import pytest

from storage.errors import ConfigError
from storage.machine.gpus import (
    Gpu,
    GpuReading,
    free_share,
    identities,
    in_use,
    installed,
    names,
)

GIB = 2**30
TWO = (Gpu("GPU-aa11", 80 * GIB, 80 * GIB), Gpu("GPU-bb22", 80 * GIB, 20 * GIB))


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an nvidia-smi of our own first on PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [
        (None, [0, 3], ("0", "3")),
        ("4,6", [1], ("6",)),
        ("4, 6", [1, 0], ("6", "4")),
        ("GPU-aa11,MIG-1", [0, 1], ("GPU-aa11", "MIG-1")),
        ("4,-1,6", [0], ("4",)),
    ],
)
def test_gpus_are_counted_within_those_that_are_visible(
    visible: str | None, gpus: list[int], expected: tuple[str, ...]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert names(gpus, environment) == expected


@pytest.mark.parametrize(
    ("visible", "gpu", "count"), [("", 0, 0), ("4,6", 2, 2), ("4,-1,6", 1, 1), ("-1", 0, 0)]
)
def test_a_gpu_that_is_not_visible_is_refused(visible: str, gpu: int, count: int) -> None:
    words = f"GPU {gpu} cannot be used: CUDA_VISIBLE_DEVICES is '{visible}', which has {count} GPUs"
    with pytest.raises(ConfigError, match=words):
        names([gpu], {"CUDA_VISIBLE_DEVICES": visible})


def test_a_gpu_has_one_identity_by_number_by_uuid_and_by_the_start_of_it() -> None:
    assert identities(("1", "GPU-bb22", "GPU-b"), TWO) == ("GPU-bb22",) * 3
    assert identities(("GPU-",), TWO) == ("GPU-",)
    assert identities(("7", "MIG-GPU-1/0/0"), TWO) == ("7", "MIG-GPU-1_0_0")
    assert identities(("1",), ()) == ("1",)


def test_the_free_share_is_that_of_the_fullest_gpu() -> None:
    assert free_share(("0",), TWO) == 1.0
    assert free_share(("0", "GPU-bb22"), TWO) == 0.25
    assert free_share(("5",), TWO) == 1.0


def test_the_list_of_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, "echo 'GPU-aa11, 81920, 81920'; echo 'GPU-bb22, 81920, 20480'")
    assert installed() == TWO


def test_what_gpus_have_in_use_is_read_also_without_their_utilization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, monkeypatch, "echo '1024, 81920, 97'; echo '0, 81920, [N/A]'; echo \"$@\" >&2")
    assert in_use() == (GpuReading(GIB, 80 * GIB, 97.0), GpuReading(0, 80 * GIB, None))


@pytest.mark.parametrize("script", ["exit 9", "echo '[N/A], 3, 4'", "echo '1, 2'", "echo a"])
def test_a_failing_nvidia_smi_shows_nothing_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    stub(tmp_path, monkeypatch, script)
    assert in_use() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert in_use() == ()


@pytest.mark.parametrize("script", ["exit 9", "echo 'GPU-aa11, [N/A], 3'", "echo a"])
def test_a_failing_nvidia_smi_shows_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    stub(tmp_path, monkeypatch, script)
    assert installed() == ()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert installed() == ()
