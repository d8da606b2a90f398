"""A growing model context: its tokens, each with owner, weights version and log-probability.

    extend   ─▶  messages                 owner NOT_SAMPLED
    add      ─▶  an answer's tokens       owner: the policy; version and log-probability: the engine

Tokens are only ever appended, so what a trainer sees is exactly what the engine consumed and
produced.
"""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np

from rollout.agents.chat import Chat, Message
from storage.errors import ConfigError
from storage.records.rollouts import NOT_SAMPLED, FinishReason, Sequence
from storage.records.types import Float32, Int8, Int32

if TYPE_CHECKING:
    from rollout.engines.engine import Generation


class Context:
    """The tokens of one model context, until the workflow rewards it as a stored `Sequence`."""

    def __init__(self, chat: Chat, name: str = "") -> None:
        self.chat = chat
        self.name = name
        self.tokens: list[int] = []
        """[L] so far."""
        self._messages: list[Message] = []
        self._policies: list[str] = []
        self._owners: list[Int8] = []
        self._versions: list[Int32] = []
        self._logprobs: list[Float32] = []
        self._temperature: float | None = None
        self._finish_reason: FinishReason = "stop"

    async def extend(self, messages: Items[Message]) -> None:
        """Append the first messages, or those after the last answer.

        Only the new part of the template is tokenized.
        """
        before = list(self._messages)
        if before and before[-1]["role"] != "assistant":
            raise RuntimeError(
                f"context {self.name!r} waits for an answer; give all messages of a turn at once"
            )
        self._messages.extend(messages)  # now: a second call at the same time is refused
        try:
            tokens = await (
                self.chat.continuation(before, messages, self.tokens[-1])
                if before
                else self.chat.opening(messages)
            )
        except BaseException:
            del self._messages[len(before) :]
            raise
        self._append(tokens)

    def withdraw(self) -> None:
        """Remove the messages after the last answer, for which there is no space."""
        count = len(self._owners.pop())
        self._versions.pop()
        self._logprobs.pop()
        del self.tokens[len(self.tokens) - count :]
        while self._messages and self._messages[-1]["role"] != "assistant":
            self._messages.pop()

    def add(self, policy: str, generation: "Generation", text: str, temperature: float) -> None:
        """Append an answer of `policy`: its tokens by `generation`, and its `text`."""
        if self._temperature not in (None, temperature):
            raise ConfigError(
                f"context {self.name!r} is sampled at temperatures {self._temperature} and "
                f"{temperature}, but a sequence has one; give both policies the same "
                "sampling.temperature, or separate contexts"
            )
        self._temperature = temperature
        self._finish_reason = generation.finish_reason
        if policy not in self._policies:
            self._policies.append(policy)
        versions = np.full(len(generation.tokens), NOT_SAMPLED, dtype=np.int32)
        for span in generation.spans:
            versions[span.start : span.end] = span.version
        self._messages.append({"role": "assistant", "content": text})
        self._append(
            generation.tokens.tolist(), self._policies.index(policy), versions, generation.logprobs
        )

    def sequence(self, reward: float) -> Sequence:
        """Return the record of this context.

        Greedy tokens (temperature 0) have no probability and are masked out of the loss.
        """
        owners = np.concatenate(self._owners)
        temperature = 1.0 if self._temperature is None else self._temperature
        return Sequence(
            tokens=np.asarray(self.tokens, dtype=np.int32),
            loss_mask=(owners != NOT_SAMPLED) & (temperature > 0),
            logprobs=np.concatenate(self._logprobs),
            owners=owners,
            versions=np.concatenate(self._versions),
            policies=tuple(self._policies),
            reward=reward,
            temperature=temperature,
            name=self.name,
            finish_reason=self._finish_reason,
        )

    def _append(
        self,
        tokens: list[int],
        owner: int = NOT_SAMPLED,
        versions: Int32 | None = None,
        logprobs: Float32 | None = None,
    ) -> None:
        count = len(tokens)
        self.tokens.extend(tokens)
        self._owners.append(np.full(count, owner, dtype=np.int8))
        self._versions.append(
            np.full(count, NOT_SAMPLED, dtype=np.int32) if versions is None else versions
        )
        self._logprobs.append(
            np.zeros(count, dtype=np.float32) if logprobs is None else logprobs.astype(np.float32)
        )
