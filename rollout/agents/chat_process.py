"""A chat whose tokenizer and template run in a child process (`chat_child.py`) with limits.

    agents ──opening, continuation, text──▶ thread ──▶ child: `TemplateChat`
           ◀──tokens, text; ConfigError────────────────

A base model's files are untrusted, and the libraries that read them have no limits: a small file
may take a text minutes, or gigabytes. Here it takes its episode.
"""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from rollout.agents.chat import Message
from rollout.agents.chat_child import CHECK_MEMORY_BYTES_MAX, ERRORS
from rollout.agents.template_chat import CHAT_FILES
from storage.errors import ConfigError
from storage.machine.child_limits import MEMORY_BYTES_MAX
from storage.machine.kept_process import KeptProcess, result
from storage.machine.limited_process import ProcessDiedError, ProcessTimeoutError
from storage.records.types import Json

MODULE: Final = "rollout.agents.chat_child"
LOAD_CPU_S: Final = 60.0
"""CPU seconds in which a tokenizer must be loaded. Those of common models take up to five."""
TEXT_CPU_S, PART_CPU_S = 5.0, 0.00001
"""CPU seconds of one conversion: so many in any case, and so many for each character or token.
Common models take a microsecond or two for each.
"""
CHECK_CPU_S: Final = 15.0
"""As LOAD_CPU_S, for a tokenizer that another process will make, too, without a limit."""
FAILURES_MAX, TEXTS_PER_FAILURE = 3, 1_000
"""Conversions that may fail by a limit: so many in any case, and one more for as many conversions.
Beyond, none is begun: each may have taken all of its CPU time.
"""
CLOSED: Final = "the tokenizer was closed before the text was converted"


class ChatProcess:
    """A `Chat` of a base model's files."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        load_cpu_s: float = LOAD_CPU_S,
        text_cpu_s: float = TEXT_CPU_S,
    ) -> None:
        """Start the child, and load the chat.

        Args:
            files: those of the base model, by name; `load_chat` says which are used.
            load_cpu_s: limit of CPU time.
            text_cpu_s: the same of one short text.

        Raises:
            ConfigError: the files make no tokenizer within the limits.
            CorruptError, OSError: as `load_chat`.
        """
        self._text_cpu_s = text_cpu_s
        self._num_texts = self._num_failures = 0
        self._is_closed = False
        self._process = KeptProcess(MODULE, _question_of(files, load_cpu_s))
        self.stop_ids: tuple[int, ...] = tuple(_first_result(self._process))
        """Tokens that end an answer."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat")

    async def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a new conversation, up to the start of the model's answer."""
        tokens: list[int] = await self._converted(
            f"messages of {_num_chars(messages):,} characters",
            _num_chars(messages),
            call="opening",
            messages=_copied(messages),
        )
        return tokens

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], last_token: int
    ) -> list[int]:
        """Return the tokens after an answer, whose last one is `last_token`."""
        num_chars = _num_chars([*before, *new])
        tokens: list[int] = await self._converted(
            f"messages of {num_chars:,} characters",
            num_chars,
            call="continuation",
            before=_copied(before),
            new=_copied(new),
            last_token=last_token,
        )
        return tokens

    async def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer without special tokens, such as the end of turn."""
        text: str = await self._converted(
            f"an answer of {len(tokens):,} tokens", len(tokens), call="text", tokens=list(tokens)
        )
        return text

    def close(self) -> None:
        """End the child; a conversion in progress, and later ones, fail."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()
        self._thread.shutdown(wait=True)

    async def _converted(self, of: str, num_parts: int, **question: Any) -> Any:
        """Return the child's answer to a question about so many characters or tokens."""
        cpu_s = self._text_cpu_s + PART_CPU_S * num_parts
        call = partial(self._answer, {**question, "cpu_s": cpu_s}, of)
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RuntimeError as error:  # of an executor that was shut down
            raise ConfigError(CLOSED) from error
        return await answer

    def _answer(self, question: Json, of: str) -> Any:
        """Return the child's answer; `of` names the text in an error."""
        if self._num_failures >= FAILURES_MAX + self._num_texts // TEXTS_PER_FAILURE:
            raise ConfigError(
                f"the tokenizer is not asked for {of}: {self._num_failures} of {self._num_texts} "
                "conversions took too much time or memory; correct the base model's "
                "tokenizer.json, or its chat template"
            )
        self._num_texts += 1
        try:
            return result(self._process.ask(question), ERRORS)
        except ProcessTimeoutError:
            why = f"takes more than {question['cpu_s']:.3g} s of CPU time for {of}"
        except ProcessDiedError:
            why = f"takes more than {MEMORY_BYTES_MAX >> 20:,} MiB for {of}, or its process is lost"
        if self._is_closed:
            raise ConfigError(CLOSED)
        self._num_failures += 1
        raise ConfigError(
            f"the tokenizer {why}; correct the base model's tokenizer.json, or its chat template"
        )


def check_tokenizer(files: Mapping[str, bytes], cpu_s: float = CHECK_CPU_S) -> None:
    """Make the tokenizer of a base model once, in a child process with limits.

    Raises:
        ConfigError: the files make no tokenizer within the limits.
        OSError: as `load_tokenizer`.
    """
    process = KeptProcess(MODULE, {**_question_of(files, cpu_s), "call": "check"})
    try:
        _first_result(process)
    finally:
        process.close()


def _question_of(files: Mapping[str, bytes], cpu_s: float) -> Json:
    used = sorted(CHAT_FILES & files.keys())
    return {
        "files": {name: base64.b64encode(files[name]).decode() for name in used},
        "cpu_s": cpu_s,
    }


def _first_result(process: KeptProcess) -> Any:
    """Return the result of the first question; end the child where it has none."""
    try:
        return result(process.ask(), ERRORS)
    except BaseException as error:
        process.close()
        if not isinstance(error, ProcessTimeoutError | ProcessDiedError):
            raise
        first = process.first
        memory_bytes = CHECK_MEMORY_BYTES_MAX if "call" in first else MEMORY_BYTES_MAX
        raise ConfigError(
            f"the base model's files ({', '.join(first['files'])}) make no tokenizer within "
            f"{first['cpu_s']:g} s of CPU time and {memory_bytes >> 20:,} MiB: its process "
            f"failed ({error}); correct tokenizer.json, or the chat template"
        ) from error


def _copied(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [dict(message) for message in messages]


def _num_chars(messages: Sequence[Message]) -> int:
    return sum(len(str(text)) for message in messages for text in message.values())
