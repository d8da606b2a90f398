"""Messages to tokens and back, through the tokenizer and chat template that lie beside a policy's
base model.

Knows nothing of policies, engines or versions. Text becomes tokens here and nowhere else, and each
text only once: a later turn is tokenized as the part of the template that follows the answer before
it, never as the whole conversation again.
"""

import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from storage.errors import ConfigError
from storage.formats.json_objects import parse
from storage.written_files import write_inside

Message: TypeAlias = Mapping[str, str]
"""Example: `{"role": "user", "content": "7+8-3=?"}`."""

STAND_IN: Final = "@@ANSWER@@"
"""Takes the place of an answer where the template is asked what it puts around one."""
OPENINGS_MAX: Final = 1_024
"""Conversations' beginnings whose tokens are remembered: all samples of a prompt begin alike."""


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


class Chat:
    """A tokenizer, its chat template, and the tokens that end an answer."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = ()) -> None:
        """`tokenizer`: a Hugging Face fast tokenizer with a chat template; `stop_ids`: what the
        model's own files name.
        """
        self._tokenizer = tokenizer
        self._remembered = lru_cache(OPENINGS_MAX)(self._opening)
        self._end_of_turn = self._find_end_of_turn()
        ends = [*stop_ids, *([] if self._end_of_turn is None else [self._end_of_turn])]
        self.stop_ids: tuple[int, ...] = tuple(sorted(set(ends)))
        """Tokens after which an answer is over."""

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a new conversation, up to where the model begins to answer."""
        return list(self._remembered(tuple(tuple(message.items()) for message in messages)))

    def continuation(
        self, before: Sequence[Message], new: Sequence[Message], last_token: int
    ) -> list[int]:
        """The tokens that follow an answer: the end of its turn, the `new` messages, the beginning
        of the next answer.

        `before` ends with the answered turn; `last_token` is the last token of that answer, so that
        an end of turn the model sampled itself is not said twice. ConfigError when the template
        cannot go on after an answer.
        """
        stand_in = [*before[:-1], {**before[-1], "content": STAND_IN}]
        closed = self._after_stand_in(self._render(stand_in, answer_next=False))
        continued = self._after_stand_in(self._render([*stand_in, *new], answer_next=True))
        if closed is None or continued is None or not continued.startswith(closed):
            raise ConfigError(
                "the chat template does not go on after an answer: with more messages it changes "
                "what stands behind "
                "the answer before them; use a workflow of single turns, or a template that only "
                "appends"
            )
        tokens = self._encode(continued)
        return tokens[1:] if tokens and last_token == self._end_of_turn == tokens[0] else tokens

    def text(self, tokens: Sequence[int]) -> str:
        """What an answer says, without the tokens that only structure a conversation."""
        said: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return said

    def _opening(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> tuple[int, ...]:
        return tuple(
            self._encode(self._render([dict(message) for message in messages], answer_next=True))
        )

    def _render(self, messages: Sequence[Message], *, answer_next: bool) -> str:
        from jinja2.exceptions import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=answer_next,
            )
        except (TemplateError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template refuses a conversation of {roles}: {error}; give the base "
                "model a "
                "chat_template.jinja that knows these roles, or use a workflow that does without "
                "them"
            ) from error
        return text

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.backend_tokenizer.encode(
            text, add_special_tokens=False
        ).ids
        return tokens

    def _after_stand_in(self, rendered: str) -> str | None:
        pieces = rendered.split(STAND_IN)
        return pieces[1] if len(pieces) == 2 else None

    def _find_end_of_turn(self) -> int | None:
        """The special token that the template puts behind an answer; None when it puts plain text
        or nothing there.
        """
        asked = [user("?"), {"role": "assistant", "content": STAND_IN}]
        after = self._after_stand_in(self._render(asked, answer_next=False))
        tokens = self._encode(after) if after else []
        return tokens[0] if tokens and tokens[0] in self._tokenizer.all_special_ids else None


def load_chat(files: Mapping[str, bytes]) -> Chat:
    """The chat of a base model from its files by name: `tokenizer.json`, `tokenizer_config.json`,
    `chat_template.jinja`, `config.json`, `generation_config.json`, … ConfigError when they make no
    tokenizer, CorruptError for one that is no JSON object.
    """
    with tempfile.TemporaryDirectory(prefix="astraflow-chat-") as folder:
        for name, body in files.items():
            write_inside(Path(folder), name, body)
        try:
            tokenizer = _tokenizer_class(files).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # tokenizers raises this very class; what a file may make of transformers is not known
            raise ConfigError(
                f"the base model's files ({', '.join(sorted(files)) or 'none'}) make no tokenizer: "
                f"{error}; "
                "the model's folder needs tokenizer.json, tokenizer_config.json and a chat template"
            ) from error
    return Chat(tokenizer, _named_stop_ids(files, tokenizer))


def _tokenizer_class(files: Mapping[str, bytes]) -> Any:
    """AutoTokenizer, or the class it would choose where the files name it: importing AutoTokenizer
    takes two CPU seconds.
    """
    named = parse(files.get("tokenizer_config.json", b"{}"), "tokenizer_config.json").get(
        "tokenizer_class"
    )
    if named == "PreTrainedTokenizerFast" and "tokenizer.json" in files:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _named_stop_ids(files: Mapping[str, bytes], tokenizer: Any) -> list[int]:
    """End tokens as the model's files name them: a number, a list of numbers, or nothing."""
    named = [
        parse(files[name], name).get("eos_token_id")
        for name in ("generation_config.json", "config.json")
        if name in files
    ]
    named.append(tokenizer.eos_token_id)
    tokens = [
        token
        for entry in named
        if entry is not None
        for token in (entry if isinstance(entry, list) else [entry])
    ]
    if wrong := [token for token in tokens if type(token) is not int]:
        raise ConfigError(
            f"the base model's files name the end token {str(wrong[0])[:80]!r}; eos_token_id is "
            "one whole number or more"
        )
    return tokens
