"""Conversion of messages to tokens and back, by a base model's tokenizer and chat template.

Text becomes tokens only here, and each text only once: a later turn is tokenized as the part of the
template that follows the answer before it, never as the whole conversation again.
"""

import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from rollout.agents.chat import Message, user
from rollout.agents.failures import error_text
from storage.errors import AstraFlowError, ConfigError, CorruptError
from storage.formats import tokenizer_files
from storage.formats.json_objects import parse
from storage.formats.model_config import MODEL_CONFIG
from storage.machine.temporary_folders import temporary_folder
from storage.written_files import write_inside

PLACEHOLDER: Final = f"@@{secrets.token_hex(16)}@@"
"""Stands for an answer in a conversation that is rendered to find the text around the answer. No
question and no model can contain it.
"""
GENERATION_CONFIG: Final = "generation_config.json"
CHAT_FILES: Final = frozenset((*tokenizer_files.FILES, MODEL_CONFIG, GENERATION_CONFIG))
"""Files of a base model that `load_chat` reads."""
STOP_IDS_MAX: Final = 256
"""End tokens that a model's files may name: each sampled token is compared with all of them. Common
models name up to five.
"""
TOKENS_MIN, TOKENS_PER_CHAR = 2**14, 2**6
"""Tokens of messages: so many in any case, since a template may begin with a text of its own, and
so many for each of their characters. A character may have four bytes, and become 18.
"""
CHARS_MIN, CHARS_PER_TOKEN = 2**10, 2**8
"""Characters of an answer: so many in any case, and so many for each token. The longest tokens of
common models have some hundred spaces.
"""
OPENINGS_MAX: Final = 1_024
"""First messages whose tokens are cached: all samples of a prompt begin alike."""


class TemplateChat:
    """A tokenizer, its chat template, and the tokens that end an answer."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = ()) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: a Hugging Face fast tokenizer with a chat template.
            stop_ids: end tokens that the model's files name.
        """
        self._tokenizer = tokenizer
        self._cached_opening = lru_cache(OPENINGS_MAX)(self._opening)
        self._end_of_turn = self._find_end_of_turn()
        ends = [*stop_ids, *([] if self._end_of_turn is None else [self._end_of_turn])]
        self.stop_ids: tuple[int, ...] = tuple(sorted(set(ends)))
        """Tokens that end an answer."""

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a new conversation, up to the start of the model's answer."""
        tokens = self._cached_opening(tuple(tuple(message.items()) for message in messages))
        return tokens.tolist()

    def continuation(
        self, before: Sequence[Message], new: Sequence[Message], last_token: int
    ) -> list[int]:
        """Return the tokens after an answer: end of turn, `new` messages, start of the next answer.

        Args:
            before: the conversation, up to and including the answer.
            new: the messages to append.
            last_token: the last token of the answer; if the model sampled the end of turn itself,
                it is not repeated.

        Raises:
            ConfigError: the template does not only append to a conversation.
        """
        answered = [*before[:-1], {**before[-1], "content": PLACEHOLDER}]
        closed = self._after_placeholder(self._render(answered, answer_next=False))
        continued = self._after_placeholder(self._render([*answered, *new], answer_next=True))
        if closed is None or continued is None or not continued.startswith(closed):
            raise ConfigError(
                "the chat template cannot continue after an answer: with more messages it changes "
                "the text after the answer before them; use a workflow of single turns, or a "
                "template that only appends"
            )
        tokens = self._encode(continued, new)
        return tokens[1:] if tokens and last_token == self._end_of_turn == tokens[0] else tokens

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer without special tokens, such as the end of turn."""
        try:
            text: str = self._tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        except BaseException as error:
            if not tokenizer_files.is_failure(error):
                raise
            raise ConfigError(
                f"the tokenizer fails at an answer of {len(tokens):,} tokens: "
                f"{error_text(error)}; correct the base model's tokenizer.json"
            ) from error
        num_max = CHARS_MIN + CHARS_PER_TOKEN * len(tokens)
        if len(text) > num_max:
            raise ConfigError(
                f"an answer of {len(tokens):,} tokens became {len(text):,} characters; at most "
                f"{num_max:,} are read; correct the base model's tokenizer.json"
            )
        return text

    def _opening(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> "array[int]":
        rendered = self._render([dict(message) for message in messages], answer_next=True)
        return array("I", self._encode(rendered, [dict(message) for message in messages]))

    def _render(self, messages: Sequence[Message], *, answer_next: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=answer_next,
            )
        except Exception as error:  # a template is a program, which may fail in any way
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template refuses a conversation of {roles}: {error_text(error)}; give "
                "the base model a chat_template.jinja with these roles, or use a workflow without "
                "them"
            ) from error
        return text

    def _encode(self, text: str, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a rendered text, of which `messages` are a part."""
        backend = self._tokenizer.backend_tokenizer
        try:
            # Not `encode`, which also computes the place of each token in the text.
            encoded = backend.encode_batch_fast([text], add_special_tokens=False)[0]
        except BaseException as error:  # tokenizers raises Exception; a panic is none
            if not tokenizer_files.is_failure(error):
                raise
            raise ConfigError(
                f"the tokenizer fails at a text of {len(text):,} characters: {error_text(error)}; "
                "correct the base model's tokenizer.json, or its chat template"
            ) from error
        tokens: list[int] = encoded.ids
        num_chars = sum(len(str(text)) for message in messages for text in message.values())
        num_max = TOKENS_MIN + TOKENS_PER_CHAR * num_chars
        if len(tokens) > num_max:
            raise ConfigError(
                f"messages of {num_chars:,} characters became {len(tokens):,} tokens; at most "
                f"{num_max:,} are read; correct the base model's tokenizer.json, or its chat "
                "template"
            )
        return tokens

    def _after_placeholder(self, rendered: str) -> str | None:
        pieces = rendered.split(PLACEHOLDER)
        return pieces[1] if len(pieces) == 2 else None

    def _find_end_of_turn(self) -> int | None:
        """Return the special token that the template puts after an answer.

        None when it puts plain text or nothing there.
        """
        conversation = [user("?"), {"role": "assistant", "content": PLACEHOLDER}]
        after = self._after_placeholder(self._render(conversation, answer_next=False))
        tokens = self._encode(after, conversation) if after else []
        return tokens[0] if tokens and tokens[0] in self._tokenizer.all_special_ids else None


def load_chat(files: Mapping[str, bytes]) -> TemplateChat:
    """Build the chat of a base model from its files, by name.

    Used files: CHAT_FILES.

    Raises:
        ConfigError: the files make no tokenizer.
        CorruptError: `config.json` or `generation_config.json` is no JSON object.
        OSError: they cannot be written into a temporary folder.
    """
    tokenizer = load_tokenizer(files)
    with _errors_of(files):
        # It puts tokens beside a text where its caller asks for them: `TemplateChat` does not.
        tokenizer.backend_tokenizer.post_processor = None
        return TemplateChat(tokenizer, _named_stop_ids(files, tokenizer))


def load_tokenizer(files: Mapping[str, bytes]) -> Any:
    """Build the tokenizer of a base model (`PreTrainedTokenizerFast`) from its files, by name.

    Used files: `tokenizer_files.FILES`.

    Raises:
        ConfigError: the files make no tokenizer.
        OSError: they cannot be written into a temporary folder.
    """
    from transformers import PreTrainedTokenizerFast

    with temporary_folder("astraflow-chat-") as folder:
        try:
            restricted = tokenizer_files.restricted(files)
        except CorruptError as error:
            raise _no_tokenizer(files, str(error)) from error
        for name, body in restricted.items():
            write_inside(folder, name, body)
        with _errors_of(files):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            backend = tokenizer.backend_tokenizer
            # Of the calls with which the file was made. transformers sets both at each call of its
            # own, and `TemplateChat` calls the tokenizer below it.
            backend.no_truncation()
            backend.no_padding()
    return tokenizer


@contextmanager
def _errors_of(files: Mapping[str, bytes]) -> Iterator[None]:
    """Translate what transformers and tokenizers raise for a base model's files into ConfigError.

    Some values are found when the tokenizer is made, others when it is asked.
    """
    try:
        yield
    except AstraFlowError:
        raise
    except BaseException as error:  # transformers raises anything; a panic is no Exception
        if not tokenizer_files.is_failure(error):
            raise
        raise _no_tokenizer(files, error_text(error)) from error


def _no_tokenizer(files: Mapping[str, bytes], why: str) -> ConfigError:
    return ConfigError(
        f"the base model's files ({', '.join(sorted(files)) or 'none'}) make no tokenizer: "
        f"{why}; the model's folder needs tokenizer.json, tokenizer_config.json and a "
        "chat template"
    )


def _named_stop_ids(files: Mapping[str, bytes], tokenizer: Any) -> list[int]:
    """Return the end tokens of the model's files: each names a number, a list, or nothing."""
    entries = [
        parse(files[name], name).get("eos_token_id")
        for name in (GENERATION_CONFIG, MODEL_CONFIG)
        if name in files
    ]
    entries.append(tokenizer.eos_token_id)
    tokens = [
        token
        for entry in entries
        if entry is not None
        for token in (entry if isinstance(entry, list) else [entry])
    ]
    if len(tokens) > STOP_IDS_MAX:
        raise ConfigError(
            f"the base model's files name {len(tokens):,} end tokens; at most {STOP_IDS_MAX} are "
            "allowed in eos_token_id"
        )
    if wrong := [token for token in tokens if type(token) is not int]:
        raise ConfigError(
            f"the base model's files name the end token {str(wrong[0])[:80]!r}; eos_token_id is "
            "one whole number or more"
        )
    return tokens
