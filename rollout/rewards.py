"""How an answer is judged.

    MathReward:  last \\boxed{…} ─┬─ the same text, or two plain numerals ──▶ decided here, exactly, in microseconds
                                 ├─ a sum or product nobody worked out   ──▶ 0
                                 └─ everything else                      ──▶ math-verify, in a child process

Knows prompts and answers; nothing of tokens, policies or workflows. A reward never raises for what a model wrote: an
answer that cannot be read is worth 0, and a judge that gives no verdict is worth 0 and counted in the episode's
metrics.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final, Protocol

from rollout.judge_pool import JudgeFailedError, JudgePool, JudgeTimeoutError
from storage.errors import ConfigError
from storage.naming import Kind, resolve
from storage.records import Prompt

BOX: Final = "\\boxed{"
ANSWER_CHARS_MAX: Final = 1_000
"""A longer final answer is taken for none: no reference of a known problem set has 200."""

NUMERAL: Final = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?")
UNFINISHED: Final = re.compile(r"[\d.)}\]][+−-][\w.(\\{]|(\*|\\times|\\cdot|×)(?!10\^)")
"""In a text without spaces: a sum, a difference, or a product other than one with a power of ten."""

THOUSANDS: Final = re.compile(r"(?<=\d)\s(?=\d{3}(\D|$))")
SPACES: Final = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
"""All but those between two digits: `1 2` is not 12."""


@dataclass(frozen=True)
class Score:
    """Example: `Score(1.0)`; a judge that took too long: `Score(0.0, {"reward_timeouts": 1.0})`."""

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Added up over the answers of an episode and set among its metrics."""


class Reward(Protocol):
    """Judges final answers. Built as `Name(timeout_s)`, and asked for many answers at once."""

    async def score(self, answer: str, prompt: Prompt) -> Score:
        """What the text of an answer to `prompt` is worth."""
        ...

    def close(self) -> None:
        """Lets go of processes and threads; called once, when no answer is being judged."""
        ...


class MathReward:
    """1.0 where the last `\\boxed{…}` of the answer equals the prompt's `answer`, else 0.0."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: the longest one comparison by math-verify may take."""
        self._judges = JudgePool(timeout_s)

    async def score(self, answer: str, prompt: Prompt) -> Score:
        reference = _reference(prompt)
        found = last_box(answer)
        if found is None or not found.strip() or len(found) > ANSWER_CHARS_MAX:
            return Score(0.0)
        equal = equal_at_sight(found, reference)
        if equal is not None:
            return Score(float(equal))
        try:
            return Score(float(await self._judges.equal(found, reference)))
        except JudgeTimeoutError:
            return Score(0.0, {"reward_timeouts": 1.0})
        except JudgeFailedError:
            return Score(0.0, {"reward_failures": 1.0})

    def close(self) -> None:
        self._judges.close()


def last_box(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` whose braces balance: `\\boxed{\\frac{1}{2}}` → `\\frac{1}{2}`. None
    without one."""
    at = text.rfind(BOX)
    while at >= 0:
        start, depth = at + len(BOX), 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start:end]
        at = text.rfind(BOX, 0, at)
    return None


def equal_at_sight(answer: str, reference: str) -> bool | None:
    """Whether two answers are equal where no algebra is needed to say so; None where it is.

    `1,200` equals `1200.0`; `0.33` is not `0.333`. To a plain number a sum or a product is no answer, though it be
    equal: a model that copies `7+8-3` out of the question into the box has worked out nothing.
    """
    answer, reference = _bare(answer), _bare(reference)
    if answer == reference:
        return True
    expected = _number(reference)
    if expected is None:
        return None
    given = _number(answer)
    if given is not None:
        return given == expected
    result = answer.rpartition("=")[2]
    if " " in result or UNFINISHED.search(result) or not any(letter.isdigit() for letter in result):
        return False
    return None


def _bare(text: str) -> str:
    """Without the dollars around it and without spaces, but for those between two numbers; with plain thousands commas."""
    text = text.strip().strip("$").replace("{,}", ",").replace(",\\!", ",")
    return SPACES.sub("", THOUSANDS.sub("", text))


def _number(text: str) -> Decimal | None:
    if any(letter.isdigit() for letter in text) and text.isascii() and NUMERAL.fullmatch(text):
        return Decimal(text.replace(",", ""))
    return None


def _reference(prompt: Prompt) -> str:
    if "answer" not in prompt.fields:
        raise ConfigError(
            f"prompt {prompt.id} has no field `answer` to judge by (it has {', '.join(prompt.fields)}); "
            "name the column that holds it in prompts.answer"
        )
    reference = str(prompt.fields["answer"])
    return last_box(reference) or reference


REWARDS: Final[Mapping[str, Callable[[float], Reward]]] = {"math": MathReward}
"""The built-in rewards; any other is named by its import path."""


REWARD: Final = Kind("reward", Reward, "docs/workflows.md", made_with=("timeout_s",))


def find_reward(name: str) -> Callable[[float], Reward]:
    """The class of a reward, not yet built. ConfigError for a name that leads to none."""
    return resolve(name, REWARDS, REWARD)


def make_reward(name: str, timeout_s: float) -> Reward:
    """The reward of a recipe's `rollout.workflow.reward`. ConfigError for a name that leads to none."""
    return resolve(name, REWARDS, REWARD, "rollout.workflow.reward")(timeout_s)
