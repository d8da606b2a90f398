"""A solver answers, a verifier judges the answer, and on `reject` the solver tries once more with
the verifier's words before it.

    solver ──attempt──▶ verifier ──approve──▶ the attempt stands
                            └─────reject──▶ solver ──retry──▶ the retry stands

Every answer is a context of its own. Both numbers an evaluation wants come from one play:
`first_attempt` is the solver alone, `final` the two together.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal

from rollout.agents.chat import user
from rollout.agents.workflow import Agent
from rollout.rewards.reward import Reward
from rollout.workflows.templates import checked_template
from storage.records.rollouts import Episode, Prompt

TAG: Final = "<verify>"
VERDICT: Final = re.compile(r"\s*(approve|reject)\s*</verify>")


class ActorAndVerify:
    """Solver sequences are worth what their own attempt is worth. The verifier gets 1 where its
    verdict says what is true of the attempt it saw, else 0; a verdict that cannot be read is worth
    0 and counts as approval. The episode is worth its last attempt.

    An attempt counts as right from a reward of 0.5.
    """

    roles: tuple[str, ...] = ("solver", "verifier")

    def __init__(
        self,
        reward: Reward,
        *,
        attempt_message: str = "{question}",
        verdict_message: str = "{question}\n{attempt}",
        retry_message: str = "{question}\n{verdict}",
    ) -> None:
        self._reward = reward
        self._attempt_message = checked_template("attempt_message", attempt_message, ["question"])
        self._verdict_message = checked_template(
            "verdict_message", verdict_message, ["question", "attempt"]
        )
        self._retry_message = checked_template(
            "retry_message", retry_message, ["question", "attempt", "verdict"]
        )

    async def play(self, prompt: Prompt, agents: Mapping[str, Agent]) -> Episode:
        said = {"question": prompt.fields["question"]}
        attempt = await agents["solver"].respond(
            [user(self._attempt_message.format(**said))], name="attempt"
        )
        said["attempt"] = attempt.text
        verdict = await agents["verifier"].respond(
            [user(self._verdict_message.format(**said))], name="verdict"
        )
        said["verdict"] = verdict.text

        first = final = await self._reward.score(attempt.text, prompt)
        word = read_verdict(verdict.text)
        agrees = word is not None and (word == "approve") == (first.value >= 0.5)
        sequences = [attempt.context.sequence(first.value), verdict.context.sequence(float(agrees))]
        counted = Counter(first.metrics)
        if word == "reject":
            retry = await agents["solver"].respond(
                [user(self._retry_message.format(**said))], name="retry"
            )
            final = await self._reward.score(retry.text, prompt)
            sequences.append(retry.context.sequence(final.value))
            counted.update(final.metrics)
        metrics = {
            **counted,
            "first_attempt": first.value,
            "final": final.value,
            "verdict_correct": float(agrees),
            "verdict_readable": float(word is not None),
            "rejected": float(word == "reject"),
            "retried": float(word == "reject"),
        }
        return Episode(sequences=tuple(sequences), reward=final.value, metrics=metrics)


def read_verdict(text: str) -> Literal["approve", "reject"] | None:
    """The verdict in the last `<verify>` tag: `…<verify>reject</verify>` → `reject`; None where it
    says neither word.
    """
    _, tag, said = text.rpartition(TAG)
    found = VERDICT.match(said) if tag else None
    if found is None:
        return None
    return "approve" if found[1] == "approve" else "reject"
