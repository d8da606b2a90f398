"""The contract of a reward, the table of the built-in ones, and how a recipe's reward is built."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from rollout.agents.failures import RewardFailedError, error_text
from storage.errors import ConfigError
from storage.import_path import FOREIGN_ERRORS, PluginKind, foreign_code, resolve
from storage.records.rollouts import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """Reward of one answer. Example: `Judgement(0.5, {"tests_passed": 3.0})`."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Summed over the answers of an episode, and added to its metrics."""


class Reward(Protocol):
    """Judge final answers. Built as `Name(timeout_s)`; many answers are judged concurrently."""

    async def score(self, answer: str, prompt: Prompt) -> Judgement:
        """Compute the reward of an answer to `prompt`.

        Raises where there is no verdict for a reason other than the answer; the episode has then
        failed.
        """
        ...

    def close(self) -> None:
        """Release processes and threads. Called once, while no answer is being judged."""
        ...


REWARDS: Final[Mapping[str, Callable[[float], Reward] | str]] = {
    "math": "rollout.rewards.math_reward:MathReward"
}
"""Built-in rewards by import path; any other reward is named by its own import path."""


REWARD: Final = PluginKind(
    "reward", Reward, "docs/extending/workflows.md", constructor_args=("timeout_s",)
)


def find_reward(name: str) -> Callable[[float], Reward]:
    """Return the class of a reward; ConfigError for an unknown name or a class that is no
    reward.
    """
    return resolve(name, REWARDS, REWARD)


def make_reward(name: str, timeout_s: float) -> Reward:
    """Build the reward that `rollout.workflow.reward` names; ConfigError as for `find_reward`, and
    where the constructor raises.

    Its `score` raises only RewardFailedError, TimeoutError, and ConfigError: a setting is wrong, or
    a package of the reward cannot be imported. Its `close` raises nothing; what it would raise is
    logged.
    """
    reward_class = resolve(name, REWARDS, REWARD, "rollout.workflow.reward")
    with foreign_code(f"rollout.workflow.reward: the constructor of {name}"):
        return _AttributedReward(reward_class(timeout_s))


class _AttributedReward:
    """A reward whose exceptions are distinguishable from those of the workflow that calls it."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    async def score(self, answer: str, prompt: Prompt) -> Judgement:
        try:
            return await self._reward.score(answer, prompt)
        except (RewardFailedError, TimeoutError, ConfigError):
            raise
        except Exception as error:  # other people's code
            raise RewardFailedError(error_text(error)) from error

    def close(self) -> None:
        try:
            self._reward.close()
        except FOREIGN_ERRORS:
            log.warning("close() of the reward failed", exc_info=True)
