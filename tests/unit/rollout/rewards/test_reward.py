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
