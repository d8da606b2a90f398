"""What a workflow's agents use of a chat: messages to tokens and back."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

Message: TypeAlias = Mapping[str, str]
"""Example: `{"role": "user", "content": "7+8-3=?"}`."""


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


class Chat(Protocol):
    """A tokenizer, its chat template, and the tokens that end an answer.

    `template_chat.py` explains the methods. All of them raise ConfigError for a text that the base
    model's files cannot convert.
    """

    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""

    async def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a new conversation, up to the start of the model's answer."""
        ...

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], last_token: int
    ) -> list[int]:
        """Return the tokens after an answer, whose last one is `last_token`."""
        ...

    async def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer without special tokens, such as the end of turn."""
        ...

    def close(self) -> None:
        """Free what the chat holds: its process."""
        ...
