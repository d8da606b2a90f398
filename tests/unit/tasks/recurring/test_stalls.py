"""Limits of a night's steps: by progress, not by the clock."""

import asyncio
import threading

import pytest

from storage.errors import AstraFlowError
from tasks.recurring import stalls
from tasks.recurring.stalls import CPU_LIMIT_S, IDLE_LIMIT_S, StepWatch, run_step

HOUR_S = 3600.0


class Machine:
    """A clock, and the CPU time of a process."""

    def __init__(self) -> None:
        self.now_s = self.used_s = 0.0
        self.watch = StepWatch("the contest of tiny-1", lambda _: self.used_s, lambda: self.now_s)
        self.watch.look()

    def pass_by(self, time_s: float, cpu_s: float, looks: int = 100) -> None:
        for _ in range(looks):
            self.now_s += time_s / looks
            self.used_s += cpu_s / looks
            self.watch.look()


def test_a_slow_step_that_uses_cpu_time_is_waited_for() -> None:
    Machine().pass_by(100 * HOUR_S, cpu_s=0.9 * CPU_LIMIT_S, looks=1000)


def test_a_step_that_waits_between_its_parts_is_waited_for() -> None:
    machine = Machine()
    for _ in range(100):
        machine.pass_by(0.9 * IDLE_LIMIT_S, cpu_s=0.0)
        machine.watch.note_part()


def test_an_idle_step_ends_with_a_message_that_says_so() -> None:
    machine = Machine()
    machine.pass_by(0.9 * IDLE_LIMIT_S, cpu_s=0.0)
    with pytest.raises(
        AstraFlowError, match=r"the contest of tiny-1 made no progress for 6\d min.*no CPU time"
    ):
        machine.pass_by(0.3 * IDLE_LIMIT_S, cpu_s=0.0)


def test_a_step_that_uses_cpu_time_for_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.recurring.stalls.num_cpus", lambda: 2)
    machine = Machine()
    machine.pass_by(9 * HOUR_S, cpu_s=1.9 * CPU_LIMIT_S)
    machine.watch.note_part()
    machine.pass_by(9 * HOUR_S, cpu_s=1.9 * CPU_LIMIT_S)
    with pytest.raises(AstraFlowError, match="made no progress with 20 hours of CPU time"):
        machine.pass_by(HOUR_S, cpu_s=0.2 * CPU_LIMIT_S)


def test_the_flow_does_not_wait_for_the_thread_of_a_step_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stalls, "IDLE_LIMIT_S", -1.0)
    let_go = threading.Event()
    try:
        with pytest.raises(AstraFlowError, match="the report made no progress"):
            asyncio.run(run_step(let_go.wait, StepWatch("the report"), look_s=0.01))
    finally:
        let_go.set()


def test_a_step_returns_its_result_or_raises_its_error() -> None:
    assert asyncio.run(run_step(lambda: 7, StepWatch("a step"))) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_step(lambda: 1 / 0, StepWatch("a step")))


def test_the_cpu_time_of_this_process_grows() -> None:
    before = stalls.own_cpu_s()
    while stalls.own_cpu_s() - before < 0.05:
        sum(range(100_000))
