"""One question, one answer, one reward."""

from collections.abc import Mapping

from rollout.agents.chat import user
from rollout.agents.workflow import Agent
from rollout.rewards.reward import Reward
from rollout.workflows.templates import checked_template
from storage.records.rollouts import Episode, Prompt


class SingleTurn:
    """The solver answers once; its sequence and the episode get the reward of the answer."""

    roles: tuple[str, ...] = ("solver",)

    def __init__(self, reward: Reward, *, attempt_message: str = "{question}") -> None:
        self._reward = reward
        self._attempt_message = checked_template("attempt_message", attempt_message, ["question"])

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        message = self._attempt_message.format(question=prompt.fields["question"])
        attempt = await agents["solver"].respond([user(message)], name="attempt")
        score = await self._reward.score(attempt.text, prompt)
        metrics = {**score.metrics, "first_attempt": score.value, "final": score.value}
        return Episode(
            sequences=(attempt.context.sequence(score.value),), reward=score.value, metrics=metrics
        )
