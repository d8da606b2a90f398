"""A solver answers, a verifier judges the answer, and on `reject` the solver retries.

    solver ──attempt──▶ verifier ──approve──▶ final answer: the attempt
                            └─────reject──▶ solver ──retry──▶ final answer: the retry

Every answer has its own context. One episode measures both accuracies of an evaluation:
`first_attempt` is that of the solver alone, `final` that of both policies.
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
    """The workflow of a solver and a verifier.

    Rewards: an attempt's sequence gets the reward of its answer. A verdict gets 1 where it agrees
    with the attempt's reward (right from 0.5 on), else 0; an unreadable verdict gets 0 and counts
    as approval. The episode gets the reward of the final answer.
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
        values = {"question": prompt.fields["question"]}
        attempt = await agents["solver"].respond(
            [user(self._attempt_message.format(**values))], name="attempt"
        )
        values["attempt"] = attempt.text
        verdict = await agents["verifier"].respond(
            [user(self._verdict_message.format(**values))], name="verdict"
        )
        values["verdict"] = verdict.text

        first = final = await self._reward.score(attempt.text, prompt)
        decision = read_verdict(verdict.text)
        agrees = decision is not None and (decision == "approve") == (first.value >= 0.5)
        sequences = [attempt.context.sequence(first.value), verdict.context.sequence(float(agrees))]
        sums = Counter(first.metrics)
        if decision == "reject":
            retry = await agents["solver"].respond(
                [user(self._retry_message.format(**values))], name="retry"
            )
            final = await self._reward.score(retry.text, prompt)
            sequences.append(retry.context.sequence(final.value))
            sums.update(final.metrics)
        metrics = {
            **sums,
            "first_attempt": first.value,
            "final": final.value,
            "verdict_correct": float(agrees),
            "verdict_readable": float(decision is not None),
            "rejected": float(decision == "reject"),
            "retried": float(decision == "reject"),
        }
        return Episode(sequences=tuple(sequences), reward=final.value, metrics=metrics)


def read_verdict(text: str) -> Literal["approve", "reject"] | None:
    """Return the verdict in the last `<verify>` tag: `…<verify>reject</verify>` → `reject`.

    None where it contains neither word alone.
    """
    _, tag, content = text.rpartition(TAG)
    match = VERDICT.match(content) if tag else None
    if match is None:
        return None
    return "approve" if match[1] == "approve" else "reject"
