from collections.abc import Iterator

import pytest

from rollout.rewards import MathReward, Score, equal_at_sight, last_box, make_reward
from storage.errors import ConfigError
from storage.records import Prompt


@pytest.fixture
def reward() -> Iterator[MathReward]:
    made = MathReward(timeout_s=10.0)
    yield made
    made.close()


def prompt(answer: str) -> Prompt:
    return Prompt("p/0", {"question": "?", "answer": answer})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("so \\boxed{12}.", "12"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{3} and \\boxed{4", "3"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{}", ""),
        ("12", None),
        ("\\boxed{12", None),
        ("", None),
    ],
)
def test_the_last_box_whose_braces_balance_is_the_answer(text: str, found: str | None) -> None:
    assert last_box(text) == found


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("12", "12", True),
        ("12", "13", False),
        ("-3", "-3", True),
        ("3", "-3", False),
        ("+7", "7", True),
        ("007", "7", True),
        ("12.0", "12", True),
        ("12.", "12", True),
        (".5", "0.50", True),
        ("0.33", "0.333", False),
        ("1,200", "1200", True),
        ("1,234,567.5", "1234567.50", True),
        ("1{,}200", "1200", True),
        ("1,\\!200", "1200", True),
        ("1 200", "1200", True),
        ("1 2", "12", False),
        ("5 12", "12", False),
        (" 12 ", "12", True),
        ("12,00", "1200", None),
        ("$12$", "12", True),
        ("\\frac{1}{2}", "\\frac{1}{2}", True),
        ("x + 1", "x+1", True),
        ("\\frac{1}{2}", "0.5", None),
        ("0.5", "\\frac{1}{2}", None),
        ("50\\%", "50", None),
        ("x=12", "12", None),
        ("7+8=12", "12", None),
        ("3\\times10^{5}", "300000", None),
        ("7+8-3", "12", False),
        ("15-3", "12", False),
        ("12=7+8-3", "12", False),
        ("7+8-3=", "12", False),
        ("3\\cdot4", "12", False),
        ("3*4", "12", False),
        ("3 \\times 4", "12", False),
        ("(7)+(5)", "12", False),
        ("twelve", "12", False),
        ("x+1", "1+x", None),
        ("१२", "12", None),
    ],
)
def test_plain_answers_are_decided_without_a_library(answer: str, reference: str, equal: bool | None) -> None:
    assert equal_at_sight(answer, reference) is equal


async def test_an_answer_is_worth_one_or_nothing(reward: MathReward) -> None:
    assert await reward.score("so \\boxed{12}", prompt("12")) == Score(1.0)
    assert await reward.score("so \\boxed{13}", prompt("12")) == Score(0.0)
    assert await reward.score("so 12", prompt("12")) == Score(0.0)
    assert await reward.score("\\boxed{ }", prompt("12")) == Score(0.0)
    assert await reward.score("\\boxed{" + "1" * 2000 + "}", prompt("1" * 2000)) == Score(0.0)


async def test_plain_answers_start_no_process(reward: MathReward) -> None:
    await reward.score("\\boxed{12}", prompt("12"))
    assert reward._judges._idle == []


async def test_other_answers_go_to_a_judge(reward: MathReward) -> None:
    assert await reward.score("\\boxed{\\frac{1}{2}}", prompt("0.5")) == Score(1.0)
    assert await reward.score("\\boxed{\\frac{1}{3}}", prompt("0.5")) == Score(0.0)
    assert len(reward._judges._idle) == 1


async def test_a_reference_may_be_a_worked_solution_with_its_own_box(reward: MathReward) -> None:
    assert await reward.score("\\boxed{0.6}", prompt("so it is \\boxed{0.6} meters")) == Score(1.0)


async def test_an_answer_that_takes_too_long_to_judge_is_worth_nothing_and_counted() -> None:
    impatient = MathReward(timeout_s=0.2)
    try:
        score = await impatient.score("\\boxed{9^{9^{9^{9}}}+\\frac{1}{2}}", prompt("9^{9^{9^{8}}}+1"))
    finally:
        impatient.close()
    assert score == Score(0.0, {"reward_timeouts": 1.0})


async def test_a_prompt_without_a_reference_says_which_setting_names_it(reward: MathReward) -> None:
    with pytest.raises(ConfigError, match=r"p/0 has no field `answer`.*it has question.*prompts\.answer"):
        await reward.score("\\boxed{1}", Prompt("p/0", {"question": "?"}))


def test_rewards_are_named_by_the_table_or_by_import_path() -> None:
    for name in ("math", "rollout.rewards:MathReward"):
        made = make_reward(name, 1.0)
        assert isinstance(made, MathReward)
        made.close()
    with pytest.raises(ConfigError, match="'maths' is not known; use one of math"):
        make_reward("maths", 1.0)
