import pytest

from rollout.rewards.math_reward import MathReward
from rollout.rewards.reward import Judgement, find_reward, make_reward
from storage.errors import ConfigError
from storage.records.rollouts import Prompt


async def test_rewards_are_selected_by_name_or_by_import_path() -> None:
    for name in ("math", "rollout.rewards.math_reward:MathReward"):
        assert find_reward(name) is MathReward
        reward = make_reward(name, 1.0)
        prompt = Prompt("p/0", {"question": "?", "answer": "12"})
        assert await reward.score("\\boxed{12}", prompt) == Judgement(1.0)
        reward.close()


def test_an_unknown_reward_is_refused_with_its_key_and_a_list_of_rewards() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.workflow\.reward: 'maths' is not known; use one of math"
    ):
        make_reward("maths", 1.0)


class WithoutTests:
    """A reward whose constructor raises."""

    def __init__(self, timeout_s: float) -> None:
        raise FileNotFoundError("no tests.json")

    async def score(self, answer: str, prompt: Prompt) -> Judgement: ...

    def close(self) -> None: ...


class ClosesBadly(WithoutTests):
    def __init__(self, timeout_s: float) -> None: ...

    def close(self) -> None:
        raise RuntimeError("close is bad")


def test_an_error_of_the_constructor_names_the_reward() -> None:
    name = f"{__name__}:WithoutTests"
    with pytest.raises(
        ConfigError,
        match=rf"^rollout\.workflow\.reward: the constructor of {name} failed: FileNotFoundError: no",
    ):
        make_reward(name, 1.0)


def test_a_close_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    make_reward(f"{__name__}:ClosesBadly", 1.0).close()
    assert caplog.messages == ["close() of the reward failed"]
    assert "RuntimeError: close is bad" in caplog.text
