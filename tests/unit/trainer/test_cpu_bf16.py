import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from storage.errors import ConfigError
from trainer import cpu_bf16


def test_the_probe_succeeds_with_the_safe_instruction_set() -> None:
    assert cpu_bf16.survives_bf16(cpu_bf16.SAFE_ISA)


@pytest.fixture(autouse=True)
def _unchecked() -> Iterator[None]:
    cpu_bf16.check_bf16.cache_clear()
    yield
    cpu_bf16.check_bf16.cache_clear()


@pytest.mark.parametrize(
    ("environment", "isa"),
    [
        (None, None),  # whatever this process was started with: the CPU itself is probed
        ({}, "AVX2"),
        (cpu_bf16.SAFE_ISA, "AVX512_CORE_FP16"),
    ],
)
@pytest.mark.parametrize("status", [0, -4])
def test_the_probe_s_process_has_the_instruction_set_that_is_asked_about(
    environment: dict[str, str] | None,
    isa: str | None,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen: dict[str, str] = {}

    def run(command: list[str], env: dict[str, str], **settings: object) -> object:
        assert command[0] == sys.executable
        seen.update(env)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    assert cpu_bf16.survives_bf16(environment) == (status == 0)
    assert seen.get("ONEDNN_MAX_CPU_ISA") == isa
    assert (seen["OMP_NUM_THREADS"], seen["PATH"]) == ("1", os.environ["PATH"])


@pytest.mark.parametrize(
    ("isa", "reports", "survives", "is_refused"),
    [
        (None, True, False, True),
        (None, True, True, False),
        (None, False, False, False),
        ("AVX2", True, False, False),
    ],
)
def test_a_cpu_is_refused_whose_instructions_end_the_process_unless_they_are_limited(
    isa: str | None,
    reports: bool,
    survives: bool,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if isa is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    monkeypatch.setattr(cpu_bf16, "reports_bf16", lambda: reports)
    monkeypatch.setattr(cpu_bf16, "survives_bf16", lambda: survives)
    if is_refused:
        with pytest.raises(
            ConfigError,
            match=r"^train\.optimizer: muon needs .*; set ONEDNN_MAX_CPU_ISA=AVX512_CORE",
        ):
            cpu_bf16.check_bf16("train.optimizer: muon")
    else:
        cpu_bf16.check_bf16("train.optimizer: muon")
