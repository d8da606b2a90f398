"""The built-in reward for mathematical answers.

    last \\boxed{…} ─┬─ short lists, numbers, equal spellings ──▶ compared here, exactly
                    └─ everything else                       ──▶ with math-verify, in a child

An unreadable answer has the reward 0. Without a verdict, because a comparison took too long or its
process died, the reward raises and the episode fails.
"""

from functools import lru_cache
from typing import Final

from rollout.agents.episode_time import stopped_time
from rollout.rewards.box import last_box
from rollout.rewards.judge_pool import JudgePool
from rollout.rewards.math_answers.comparison import CHARS_MAX, equal, is_quick
from rollout.rewards.reward import Judgement
from storage.coordination.system_threads import in_system_thread
from storage.errors import ConfigError
from storage.records.rollouts import Prompt

INLINE_CHARS_MAX: Final = 4_000
"""A longer answer is searched for its box in a thread, so that the event loop is not blocked."""


class MathReward:
    """1.0 where the last `\\boxed{…}` of the answer equals the prompt's `answer`, else 0.0."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: CPU seconds that one comparison by math-verify may use."""
        self._judges = JudgePool(timeout_s)

    async def score(self, answer: str, prompt: Prompt) -> Judgement:
        """Compare the boxed answer; JudgeTimeoutError or JudgeFailedError without a verdict."""
        reference = _reference(prompt)
        boxed = (
            last_box(answer)
            if len(answer) <= INLINE_CHARS_MAX
            else await in_system_thread(last_box, answer)
        )
        if boxed is None or not boxed.strip() or len(boxed) > CHARS_MAX:
            return Judgement(0.0)
        is_inline = is_quick(boxed) and is_quick(reference)
        verdict = equal(boxed, reference) if is_inline else None
        if verdict is None:
            async with stopped_time():
                verdict = await self._judges.equal(boxed, reference)
        return Judgement(float(verdict))

    def close(self) -> None:
        self._judges.close()


def _reference(prompt: Prompt) -> str:
    if "answer" not in prompt.fields:
        raise ConfigError(
            f"prompt {prompt.id} has no field `answer` to judge by (it has "
            f"{', '.join(prompt.fields)}); name its column in prompts.answer"
        )
    return _final(str(prompt.fields["answer"]))


@lru_cache(maxsize=4096)
def _final(reference: str) -> str:
    """Return the final answer of a reference, which may be a worked solution with a box."""
    return last_box(reference) or reference
