"""Waiting for a component of the stack: without a time limit while it works; an error if it hangs,
loops or is dead.
"""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from deployments.stack import processes, readiness
from storage.errors import ConfigError

BUSY = "import time\nend_s = time.monotonic() + 900\nwhile time.monotonic() < end_s: pass"
IDLE = "import time; time.sleep(3600)"
BUSY_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


class Started:
    """A process of a test, stopped at its end."""

    def __init__(self, program: str, folder: Path) -> None:
        self.process = processes.start(
            "part", [sys.executable, "-c", program], os.environ, folder / "part.log", folder
        )

    def __enter__(self) -> processes.Process:
        return self.process

    def __exit__(self, *_: object) -> None:
        processes.stop([self.process], grace_s=0.0)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "CPU_STEP_S", 0.1)
    monkeypatch.setattr(readiness, "MEASURE_INTERVAL_S", 0.02)
    monkeypatch.setattr(readiness, "POLL_S", 0.02)


@pytest.mark.parametrize("program", [BUSY, BUSY_CHILD])
def test_the_cpu_time_of_a_component_includes_its_descendants(tmp_path: Path, program: str) -> None:
    with Started(program, tmp_path) as part:
        progress = readiness.Progress(part)
        while progress.cpu_s < 0.5:
            time.sleep(0.02)
            progress.measure()
    assert processes.cpu_s(part) == 0.0, "it has ended"


def test_progress_in_cpu_time_resets_the_stall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s, now_s = [10.0], [100.0]
    monkeypatch.setattr(readiness.processes, "cpu_s", lambda process: used_s[0])
    progress = readiness.Progress(
        processes.Process("part", 1, 0.0, ""), clock=lambda: now_s[0], share=lambda: 1.0
    )
    now_s[0], used_s[0] = 150.0, 10.09
    progress.measure()
    assert (progress.stalled_s, progress.cpu_s) == (50.0, 0.0)
    used_s[0] = 10.25
    progress.measure()
    assert (progress.stalled_s, progress.cpu_s) == (0.0, 0.25)
    now_s[0], used_s[0] = 170.0, 4.0  # a descendant has ended
    progress.measure()
    now_s[0] = 171.0
    assert (progress.stalled_s, progress.cpu_s) == (1.0, 0.25)


def test_the_progress_step_is_smaller_on_a_loaded_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s = [10.0]
    monkeypatch.setattr(readiness.processes, "cpu_s", lambda process: used_s[0])
    progress = readiness.Progress(
        processes.Process("part", 1, 0.0, ""), clock=lambda: 100.0, share=lambda: 0.1
    )
    used_s[0] = 10.0 + 0.09 * readiness.CPU_STEP_S
    progress.measure()
    assert progress.cpu_s == 0.0
    used_s[0] = 10.0 + 0.11 * readiness.CPU_STEP_S
    progress.measure()
    assert progress.cpu_s == pytest.approx(0.11 * readiness.CPU_STEP_S)


def test_an_idle_component_gives_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with (
        Started(f"print('waits for a lock', flush=True); {IDLE}", tmp_path) as part,
        pytest.raises(
            ConfigError,
            match=r"(?s)^the part is not ready after \d+ s, and made no progress .*\n.*waits for a lock",
        ),
    ):
        readiness.wait_until(lambda: False, "the part", part, stall_limit_s=5.0)


def test_a_component_that_works_is_waited_for_beyond_the_limit_of_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness.Progress, "stalled_s", 0.0)  # it has just made progress
    began = time.monotonic()
    with Started(IDLE, tmp_path) as part:
        readiness.wait_until(
            lambda: time.monotonic() - began > 0.5, "the part", part, stall_limit_s=0.1
        )


def test_a_component_that_uses_no_cpu_time_is_waited_for_beyond_the_cpu_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness.processes, "cpu_s", lambda process: 0.0)
    monkeypatch.setattr(readiness.Progress, "stalled_s", 0.0)
    with Started(IDLE, tmp_path) as part:
        began = time.monotonic()
        readiness.wait_until(
            lambda: time.monotonic() - began > 0.5, "the part", part, cpu_limit_s=0.1
        )


def test_a_component_that_works_without_result_gives_an_error_after_a_cpu_limit(
    tmp_path: Path,
) -> None:
    with (
        Started(BUSY, tmp_path) as part,
        pytest.raises(ConfigError, match=r"not ready after \d+ s of CPU time; the end of"),
    ):
        readiness.wait_until(lambda: False, "the part", part, cpu_limit_s=0.6)


def test_a_dead_component_gives_an_error_immediately(tmp_path: Path) -> None:
    with (
        Started("print('no such port'); raise SystemExit(3)", tmp_path) as part,
        pytest.raises(
            ConfigError, match=r"(?s)^the part ended before it was ready; .*no such port"
        ),
    ):
        readiness.wait_until(lambda: False, "the part", part)


def test_the_awaited_component_is_reported_repeatedly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "SAY_INTERVAL_S", 0.3)
    messages: list[str] = []
    for program, state in ((BUSY, "using CPU time"), (IDLE, "idle")):
        messages.clear()
        words = re.compile(rf"the part is not ready yet \(\d+ s, {state}\)")

        def told_twice(words: re.Pattern[str] = words) -> bool:
            return sum(words.fullmatch(item) is not None for item in messages) >= 2

        with Started(program, tmp_path) as part:
            readiness.wait_until(told_twice, "the part", part, messages.append)
