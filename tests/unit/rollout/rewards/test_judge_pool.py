import asyncio
import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rollout.rewards import judge_pool
from rollout.rewards.judge_pool import JudgePool
from rollout.rewards.judge_process import (
    Judge,
    JudgeDiedError,
    JudgeFailedError,
    JudgeTimeoutError,
)
from storage.errors import ConfigError
from storage.machine import limited_process
from storage.machine.limited_process import ENVIRONMENT
from tests.support.patience import PATIENCE_S

ENDLESS = "9^{9^{9^{9}}}+x"
"""sympy works at it for longer than any test."""


@pytest.fixture
def pool() -> Iterator[JudgePool]:
    made = JudgePool(timeout_s=30.0, judges_max=1)
    yield made
    made.close()


def judge_of(pool: JudgePool) -> Judge:
    (judge,) = pool._idle
    return judge


async def until_busy(pool: JudgePool) -> None:
    """Wait until a child has a question; the pool has no event for it."""
    while not pool._busy:  # noqa: ASYNC110 -- it is set in a thread
        await asyncio.sleep(0.01)


async def test_one_child_process_answers_several_questions(pool: JudgePool) -> None:
    assert await pool.equal("x+1", "1+x")
    child = judge_of(pool).pid
    assert not await pool.equal("x+2", "1+x")
    assert judge_of(pool).pid == child


async def test_the_number_of_child_processes_is_limited() -> None:
    pool = JudgePool(timeout_s=30.0, judges_max=2)
    try:
        answers = await asyncio.gather(*(pool.equal(f"x+{n}", "3+x") for n in range(8)))
        assert answers == [n == 3 for n in range(8)]
        assert 1 <= len(pool._idle) <= 2
    finally:
        pool.close()


async def test_a_comparison_over_its_time_limit_is_killed_and_the_next_one_works() -> None:
    pool = JudgePool(timeout_s=0.3, judges_max=1)
    try:
        for _ in range(2):  # a timeout is not a verdict, so it is not cached
            with pytest.raises(JudgeTimeoutError, match=r"no verdict within 0\.3 s of CPU time"):
                await pool.equal(ENDLESS, "1+x")
        pool._timeout_s = 30.0
        assert await pool.equal("x+1", "1+x")
    finally:
        pool.close()


async def test_time_in_the_queue_does_not_count_as_judging_time() -> None:
    pool = JudgePool(timeout_s=0.6, judges_max=1)
    try:
        slow = [asyncio.create_task(pool.equal(f"{ENDLESS}+{n}", "1+x")) for n in range(2)]
        await asyncio.sleep(0)
        assert await pool.equal("x+1", "1+x")
        assert all(
            isinstance(error, JudgeTimeoutError)
            for error in await asyncio.gather(*slow, return_exceptions=True)
        )
    finally:
        pool.close()


async def test_the_same_question_is_asked_once(
    pool: JudgePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[str, str]] = []
    ask = Judge.ask

    def counted(judge: Judge, answer: str, reference: str, timeout_s: float) -> bool:
        requested.append((answer, reference))
        return ask(judge, answer, reference, timeout_s)

    monkeypatch.setattr(Judge, "ask", counted)
    assert await asyncio.gather(*(pool.equal("x+1", "1+x") for _ in range(8))) == [True] * 8
    assert await pool.equal("x+1", "1+x")
    assert not await pool.equal("1+x", "x+2")
    assert requested == [("x+1", "1+x"), ("1+x", "x+2")]
    assert pool._in_progress == {}


async def test_verdicts_are_cached_up_to_a_limit_and_evicted_by_last_use() -> None:
    pool = JudgePool(timeout_s=30.0, judges_max=1, verdicts_max=2)
    try:
        await pool.equal("x+1", "a")
        await pool.equal("x+2", "a")
        await pool.equal("x+1", "a")
        await pool.equal("x+3", "a")
        assert list(pool._verdicts) == [("x+1", "a"), ("x+3", "a")]
    finally:
        pool.close()


async def test_a_cancelled_caller_does_not_cancel_the_verdict_for_the_others(
    pool: JudgePool,
) -> None:
    busy = asyncio.create_task(pool.equal("x+7", "1+x"))
    first = asyncio.create_task(pool.equal("x+1", "1+x"))
    second = asyncio.create_task(pool.equal("x+1", "1+x"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second
    assert not await busy
    assert first.cancelled()


def test_the_pool_works_outside_the_main_thread_and_in_several_event_loops(pool: JudgePool) -> None:
    results: list[bool] = []

    def judge() -> None:
        results.append(asyncio.run(pool.equal("x+1", "1+x")))

    for _ in range(2):
        thread = threading.Thread(target=judge)
        thread.start()
        thread.join()
    assert results == [True, True]


async def test_a_killed_child_is_replaced_and_the_question_repeated(pool: JudgePool) -> None:
    await pool.equal("x+1", "1+x")
    child = judge_of(pool).pid
    os.kill(
        child, signal.SIGSTOP
    )  # it has the question and cannot have answered before it is killed
    question = asyncio.create_task(pool.equal("x+2", "2+x"))
    await until_busy(pool)
    os.kill(child, signal.SIGKILL)
    assert await question
    assert judge_of(pool).pid != child


async def test_a_question_that_kills_every_child_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dying(Judge):
        def ask(self, answer: str, reference: str, timeout_s: float) -> bool:
            os.kill(self.pid, signal.SIGKILL)
            return super().ask(answer, reference, timeout_s)

    pool = JudgePool(timeout_s=30.0, judges_max=1)
    try:
        with monkeypatch.context() as replaced:
            replaced.setattr(judge_pool, "Judge", Dying)
            with pytest.raises(JudgeFailedError, match="2 judges died over one question"):
                await pool.equal("x+1", "1+x")
        assert await pool.equal("x+1", "1+x")  # a failure is not a verdict, so it is not cached
    finally:
        pool.close()


def test_children_that_died_while_idle_are_no_attempts_of_the_next_question() -> None:
    pool = JudgePool(timeout_s=30.0, judges_max=1)
    dead = [Judge(), Judge()]
    pool._idle = list(dead)
    try:
        for judge in dead:
            os.kill(judge.pid, signal.SIGKILL)
            os.waitid(os.P_PID, judge.pid, os.WEXITED | os.WNOWAIT)
        assert asyncio.run(pool.equal("x+1", "1+x"))
        assert judge_of(pool) not in dead
    finally:
        pool.close()


async def test_a_child_whose_memory_is_full_is_replaced_after_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_child(FULL, monkeypatch)
    pool = JudgePool(timeout_s=30.0, judges_max=1)
    try:
        assert await pool.equal("x+1", "1+x")
        assert pool._idle == []
        assert await pool.equal("x+2", "2+x")
    finally:
        pool.close()


async def test_after_a_child_without_an_answer_a_new_one_is_asked_and_no_used_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Used children end without an answer to a question that exceeds their memory."""
    with monkeypatch.context() as patched:
        used = [started(ENDING, patched, stall_s=30.0) for _ in range(3)]
    pool = JudgePool(timeout_s=30.0, judges_max=1)
    pool._idle = list(used)
    try:
        assert await pool.equal("x+1", "1+x")
        assert pool._idle[:2] == used[:2]
    finally:
        pool.close()


async def test_a_closed_pool_gives_no_further_verdict() -> None:
    pool = JudgePool(timeout_s=30.0, judges_max=1)
    pool.close()
    with pytest.raises(JudgeFailedError, match="the pool of judges was closed before the answer"):
        await pool.equal("x+1", "1+x")
    assert pool._in_progress == {}


async def test_closing_stops_the_child_processes() -> None:
    pool = JudgePool(timeout_s=30.0, judges_max=1)
    await pool.equal("x+1", "1+x")
    child = judge_of(pool).pid
    pool.close()
    assert not psutil.pid_exists(child)


async def test_closing_stops_the_running_comparison_and_the_queue() -> None:
    pool = JudgePool(timeout_s=1e6, judges_max=1)
    await pool.equal("x+1", "1+x")
    running, queued = (asyncio.create_task(pool.equal(f"{ENDLESS}+{n}", "1+x")) for n in range(2))
    await until_busy(pool)
    await asyncio.to_thread(pool.close)
    results = await asyncio.gather(running, queued, return_exceptions=True)
    assert [type(result) for result in results] == [JudgeFailedError, asyncio.CancelledError]


def test_a_child_exits_when_its_parent_is_dead() -> None:
    judge = Judge()
    assert judge._process._child.stdin is not None
    judge._process._child.stdin.close()  # the effect of the parent's death in the kernel
    assert judge._process._child.wait(PATIENCE_S) == 0
    judge.close()


def test_a_child_without_cpu_use_is_given_up() -> None:
    judge = Judge()
    try:
        os.kill(judge.pid, signal.SIGSTOP)
        judge._process._stall_s = 2.0
        with pytest.raises(JudgeDiedError):
            judge.ask("x+1", "1+x", 30.0)
    finally:
        judge.close()


SLOW = "import time\ntime.sleep(4)\nprint('{\"ready\": true}', flush=True)\ninput()"
SLEEPING = "import time\ntime.sleep(1000)"
CRASHING = "raise SystemExit(3)"
FULL = """print('{"ready": true}', flush=True)
input()
print('{"equal": true, "last": true}', flush=True)
"""
ENDING = """
print('{"ready": true}', flush=True)
input()
"""
UNABLE = """print('{"failed": "no sympy"}', flush=True)"""


def started(code: str, monkeypatch: pytest.MonkeyPatch, stall_s: float) -> Judge:
    """A judge whose child runs `code`."""
    replace_child(code, monkeypatch)
    return Judge(stall_s)


def replace_child(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every child run `code`."""
    popen = subprocess.Popen

    def replaced(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        return popen([command[0], "-c", code], **options)

    monkeypatch.setattr(limited_process.subprocess, "Popen", replaced)


def test_a_child_with_cpu_use_is_waited_for_without_a_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_s = itertools.count(1.0)
    monkeypatch.setattr(limited_process, "_cpu_s", lambda pid: next(used_s))
    started(SLOW, monkeypatch, stall_s=1.5).close()
    assert next(used_s) > 3.0


@pytest.mark.parametrize(
    ("code", "stall_s", "message"),
    [
        (SLEEPING, 1.5, "the math judge stopped working before it was ready"),
        (CRASHING, PATIENCE_S, "the math judge ended with status 3 before it was ready"),
    ],
)
def test_a_child_that_does_not_start_raises_an_error(
    code: str, stall_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JudgeFailedError, match=message):
        started(code, monkeypatch, stall_s)


def test_a_child_with_a_missing_package_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        ConfigError, match="answers cannot be judged: no sympy; install math-verify"
    ):
        started(UNABLE, monkeypatch, stall_s=60.0)


def test_the_running_child_has_only_the_reduced_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (
        "AWS_SECRET_ACCESS_KEY",
        "PREFECT_API_AUTH_STRING",
        "MLFLOW_TRACKING_PASSWORD",
        "HF_TOKEN",
    ):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("ASTRAFLOW_STACK", "home")
    judge = Judge()
    try:
        result = psutil.Process(judge.pid).environ()
    finally:
        judge.close()
    assert "secret" not in result.values()
    assert result["ASTRAFLOW_STACK"] == "home", (
        "`astraflow down` finds a child that is left over by this mark"
    )
    assert set(result) - {"LC_CTYPE"} <= ENVIRONMENT | {"PYTHONPATH"}
