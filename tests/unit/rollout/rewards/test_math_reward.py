import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from rollout.agents.episode_time import CURRENT, EpisodeLimit
from rollout.rewards import math_reward
from rollout.rewards.judge_process import JudgeTimeoutError
from rollout.rewards.math_reward import INLINE_CHARS_MAX, MathReward
from rollout.rewards.reward import Judgement
from storage.errors import ConfigError
from storage.records.rollouts import Prompt


@pytest.fixture
def reward() -> Iterator[MathReward]:
    made = MathReward(timeout_s=10.0)
    yield made
    made.close()


def prompt(answer: str) -> Prompt:
    return Prompt("p/0", {"question": "?", "answer": answer})


async def test_an_answer_has_reward_one_or_zero(reward: MathReward) -> None:
    assert await reward.score("so \\boxed{12}", prompt("12")) == Judgement(1.0)
    assert await reward.score("so \\boxed{13}", prompt("12")) == Judgement(0.0)
    assert await reward.score("so 12", prompt("12")) == Judgement(0.0)
    assert await reward.score("\\boxed{ }", prompt("12")) == Judgement(0.0)
    assert await reward.score("\\boxed{" + "1" * 2000 + "}", prompt("1" * 2000)) == Judgement(0.0)


async def test_plain_answers_start_no_process(reward: MathReward) -> None:
    await reward.score("\\boxed{12}", prompt("12"))
    assert reward._judges._idle == []


async def test_other_answers_are_sent_to_a_judge_process(reward: MathReward) -> None:
    assert await reward.score("\\boxed{1+x}", prompt("x+1")) == Judgement(1.0)
    assert await reward.score("\\boxed{2+x}", prompt("x+1")) == Judgement(0.0)
    assert len(reward._judges._idle) == 1


async def test_a_reference_can_be_a_worked_solution_with_a_box(reward: MathReward) -> None:
    assert await reward.score("\\boxed{0.6}", prompt("so it is \\boxed{0.6} meters")) == Judgement(
        1.0
    )


async def test_an_answer_over_the_judging_time_has_no_reward() -> None:
    impatient = MathReward(timeout_s=0.2)
    try:
        with pytest.raises(JudgeTimeoutError, match=r"no verdict within 0\.2 s of CPU time"):
            await impatient.score("\\boxed{9^{9^{9^{9}}}+x}", prompt("9^{9^{9^{8}}}+x"))
    finally:
        impatient.close()


class Queue:
    """Judges that are busy with other answers: notes whether the episode's time is running."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.deadlines: list[float | None] = []
        self._timeout = timeout

    async def equal(self, answer: str, reference: str) -> bool:
        self.deadlines.append(self._timeout.when())
        return True


async def test_an_episode_spends_no_time_while_its_answer_waits_for_a_judge(
    reward: MathReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(600.0) as timeout:
        queue, token = Queue(timeout), CURRENT.set(EpisodeLimit(timeout))
        try:
            with monkeypatch.context() as patched:
                patched.setattr(reward, "_judges", queue)
                assert await reward.score("\\boxed{1+x}", prompt("x+1")) == Judgement(1.0)
        finally:
            CURRENT.reset(token)
        assert queue.deadlines == [None]
        assert timeout.when() is not None


async def test_a_long_answer_is_searched_outside_the_event_loop(
    reward: MathReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    search = math_reward.last_box

    def searched(text: str) -> str | None:
        threads.append(threading.current_thread() is threading.main_thread())
        return search(text)

    monkeypatch.setattr(math_reward, "last_box", searched)
    box = "\\boxed{12}"
    math_reward._final("12")
    threads.clear()
    assert await reward.score(" " * (INLINE_CHARS_MAX - len(box)) + box, prompt("12")) == Judgement(
        1.0
    )
    assert await reward.score(
        " " * (INLINE_CHARS_MAX - len(box) + 1) + box, prompt("12")
    ) == Judgement(1.0)
    assert threads == [True, False]


SIDES = [f"{chr(97 + index % 26)}_{index // 26}" for index in range(160)]
MANY_PARTS = {
    "chain": ("=".join(SIDES), "=".join(reversed(SIDES))),
    "list of chains": (
        ",".join(f"x=y={index}z" for index in range(30)),
        ",".join(f"{index}z=x=y" for index in range(30)),
    ),
    "list": (",".join(f"{side}+1" for side in SIDES[:50]), ",".join(SIDES[:50])),
}


@pytest.mark.parametrize("kind", MANY_PARTS)
async def test_texts_of_many_parts_are_compared_outside_the_event_loop(
    reward: MathReward, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    gold, answer = MANY_PARTS[kind]
    async with asyncio.timeout(600.0) as timeout:
        with monkeypatch.context() as patched:
            patched.setattr(reward, "_judges", Queue(timeout))
            start_s = time.process_time()
            assert await reward.score(f"\\boxed{{{answer}}}", prompt(gold)) == Judgement(1.0)
    assert time.process_time() - start_s < 0.2  # about 1 ms; the comparison takes 0.7 s


async def test_a_repetition_of_100_kb_is_judged_in_less_than_a_second_of_cpu(
    reward: MathReward,
) -> None:
    start_s = time.process_time()
    for part in ("\\boxed{", "\\boxed{{}", "x = \\boxed{1 + ", "{\\boxed{"):
        assert await reward.score(part * (100_000 // len(part)), prompt("12")) == Judgement(0.0)
    assert time.process_time() - start_s < 4.0  # about 0.1 s; quadratic time would be minutes


async def test_a_prompt_without_a_reference_names_the_setting_of_its_key(
    reward: MathReward,
) -> None:
    with pytest.raises(
        ConfigError, match=r"p/0 has no field `answer`.*it has question.*prompts\.answer"
    ):
        await reward.score("\\boxed{1}", Prompt("p/0", {"question": "?"}))
