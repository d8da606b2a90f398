import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest

from rollout.judge_pool import Judge, JudgePool, JudgeTimeoutError

ENDLESS = "9^{9^{9^{9}}}"
"""sympy works at it for longer than any test."""


@pytest.fixture
def pool() -> Iterator[JudgePool]:
    made = JudgePool(timeout_s=10.0, judges_max=1)
    yield made
    made.close()


def judge_of(pool: JudgePool) -> Judge:
    (judge,) = pool._idle
    return judge


async def test_one_child_answers_question_after_question(pool: JudgePool) -> None:
    assert await pool.equal("\\frac12", "0.5")
    child = judge_of(pool).pid
    assert not await pool.equal("\\frac13", "0.5")
    assert judge_of(pool).pid == child


async def test_no_more_children_than_allowed() -> None:
    pool = JudgePool(timeout_s=10.0, judges_max=2)
    try:
        answers = await asyncio.gather(*(pool.equal(f"\\frac{{{n}}}{{2}}", "1.5") for n in range(8)))
        assert answers == [n == 3 for n in range(8)]
        assert 1 <= len(pool._idle) <= 2
    finally:
        pool.close()


async def test_a_comparison_that_takes_too_long_is_cut_and_the_next_one_works() -> None:
    pool = JudgePool(timeout_s=0.3, judges_max=1)
    try:
        with pytest.raises(JudgeTimeoutError):
            await pool.equal(ENDLESS, "1")
        pool._timeout_s = 10.0
        assert await pool.equal("\\frac12", "0.5")
    finally:
        pool.close()


def test_the_pool_works_outside_the_main_thread_and_in_several_event_loops(pool: JudgePool) -> None:
    found: list[bool] = []

    def judge() -> None:
        found.append(asyncio.run(pool.equal("\\frac12", "0.5")))

    for _ in range(2):
        thread = threading.Thread(target=judge)
        thread.start()
        thread.join()
    assert found == [True, True]


async def test_a_child_killed_in_the_middle_is_replaced_and_asked_again(pool: JudgePool) -> None:
    await pool.equal("\\frac12", "0.5")
    child = judge_of(pool).pid
    os.kill(child, signal.SIGSTOP)  # it has the question, and cannot have answered when it dies
    question = asyncio.create_task(pool.equal("\\frac12", "0.5"))
    await asyncio.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    assert await question
    assert judge_of(pool).pid != child


async def test_closing_ends_the_children() -> None:
    pool = JudgePool(timeout_s=10.0, judges_max=1)
    await pool.equal("\\frac12", "0.5")
    child = judge_of(pool).pid
    pool.close()
    assert not psutil.pid_exists(child)


def test_a_child_leaves_when_its_parent_is_gone() -> None:
    judge = Judge()
    assert judge._child.stdin is not None
    judge._child.stdin.close()  # what the kernel does when the parent dies
    assert judge._child.wait(10.0) == 0
    judge.close()


def test_a_child_has_no_keys_and_no_secrets_and_carries_the_mark_of_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("ASTRAFLOW_STACK", "marked")
    judge = Judge()
    inherited = psutil.Process(judge.pid).environ()
    judge.close()
    assert "hidden" not in inherited.values()
    assert inherited["ASTRAFLOW_STACK"] == "marked"
