"""How an answer is judged.

    MathReward:  last \\boxed{…} ─┬─ lists, numbers, the same spelling ──▶ decided here, exactly, in microseconds
                                 └─ everything else                   ──▶ math-verify, in a child process

Knows prompts and answers; nothing of tokens, policies or workflows. An answer that cannot be read
is worth 0. Where there is no verdict, because a judge took too long or died, a reward raises: the
episode has then failed, and is neither rewarded nor trained on.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol

from rollout.agents.episode_time import stopped_time
from rollout.rewards.judge_pool import JudgePool
from rollout.rewards.math_answers.box import last_box
from rollout.rewards.math_answers.comparison import CHARS_MAX, equal
from storage.errors import ConfigError
from storage.import_path import PluginKind, resolve
from storage.records.rollouts import Prompt

INLINE_CHARS_MAX: Final = 4_000
"""A longer answer is searched for its box in a thread, so that the event loop goes on."""


@dataclass(frozen=True)
class Judgement:
    """Example: `Judgement(0.5, {"tests_passed": 3.0})`."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Added up over the answers of an episode and set among its metrics."""


class Reward(Protocol):
    """Judges final answers. Built as `Name(timeout_s)`, and asked for many answers at once."""

    async def score(self, answer: str, prompt: Prompt) -> Judgement:
        """What the text of an answer to `prompt` is worth.

        Raises where there is no verdict for a reason other than the answer; the episode is then
        recorded as failed.
        """
        ...

    def close(self) -> None:
        """Lets go of processes and threads; called once, when no answer is being judged."""
        ...


class MathReward:
    """1.0 where the last `\\boxed{…}` of the answer equals the prompt's `answer`, else 0.0. Raises
    JudgeTimeoutError or JudgeFailedError where there is no verdict.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: CPU seconds that one comparison by math-verify may use."""
        self._judges = JudgePool(timeout_s)

    async def score(self, answer: str, prompt: Prompt) -> Judgement:
        reference = _reference(prompt)
        found = (
            last_box(answer)
            if len(answer) <= INLINE_CHARS_MAX
            else await asyncio.to_thread(last_box, answer)
        )
        if found is None or not found.strip() or len(found) > CHARS_MAX:
            return Judgement(0.0)
        verdict = equal(found, reference)
        if verdict is None:
            async with stopped_time():
                verdict = await self._judges.equal(found, reference)
        return Judgement(float(verdict))

    def close(self) -> None:
        self._judges.close()


def _reference(prompt: Prompt) -> str:
    if "answer" not in prompt.fields:
        raise ConfigError(
            f"prompt {prompt.id} has no field `answer` to judge by (it has "
            f"{', '.join(prompt.fields)}); "
            "name the column that holds it in prompts.answer"
        )
    return _final(str(prompt.fields["answer"]))


@lru_cache(maxsize=4096)
def _final(reference: str) -> str:
    """A reference may be a worked solution with its answer in a box."""
    return last_box(reference) or reference


REWARDS: Final[Mapping[str, Callable[[float], Reward]]] = {"math": MathReward}
"""The built-in rewards; any other is named by its import path."""


REWARD: Final = PluginKind("reward", Reward, "docs/workflows.md", made_with=("timeout_s",))


def find_reward(name: str) -> Callable[[float], Reward]:
    """The class of a reward, not yet built. ConfigError for a name that leads to none."""
    return resolve(name, REWARDS, REWARD)


def make_reward(name: str, timeout_s: float) -> Reward:
    """The reward of a recipe's `rollout.workflow.reward`. ConfigError for a name that leads to
    none.
    """
    return resolve(name, REWARDS, REWARD, "rollout.workflow.reward")(timeout_s)
