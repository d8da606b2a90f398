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
from typing import Any, Final

from rollout.agents.chat import Message
from rollout.agents.chat_child import ERRORS
from rollout.agents.template_chat import CHAT_FILES
from storage.errors import ConfigError
from storage.machine.child_limits import MEMORY_BYTES_MAX
from storage.machine.limited_process import (
    LimitedProcess,
    ProcessDiedError,
    ProcessTimeoutError,
    result,
)
from storage.records.types import Json

MODULE: Final = "rollout.agents.chat_child"
LOAD_CPU_S: Final = 60.0
"""CPU seconds in which a tokenizer must be loaded. Those of common models take up to five."""
TEXT_CPU_S, PART_CPU_S = 5.0, 0.0001
"""CPU seconds of one conversion: so many in any case, and so many for each character or token.
Common models take some microseconds for each.
"""
FAILURES_MAX, TEXTS_PER_FAILURE = 3, 1_000
"""Conversions that may fail by a limit: so many in any case, and one more for as many conversions.
Beyond, none is begun: each may have taken all of its CPU time.
"""
ATTEMPTS_MAX: Final = 2
"""Children that may end without an answer to one question: the memory of a used one may be full,
or something else of the machine has ended it.
"""


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
        self._files = _of_chat(files)
        self._load_cpu_s, self._text_cpu_s = load_cpu_s, text_cpu_s
        self._num_texts = self._num_failures = 0
        self._is_closed = False
        self._child: LimitedProcess | None
        self._child, stop_ids = _asked(self._files, load_cpu_s)
        self.stop_ids: tuple[int, ...] = tuple(stop_ids)
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
        if (child := self._child) is not None:
            child.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._drop()

    async def _converted(self, of: str, num_parts: int, **question: Any) -> Any:
        """Return the child's answer to a question about so many characters or tokens."""
        cpu_s = self._text_cpu_s + PART_CPU_S * num_parts
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._answer, {**question, "cpu_s": cpu_s}, of
        )

    def _answer(self, question: Json, of: str) -> Any:
        """Return the child's answer; `of` names the text in an error."""
        if self._num_failures >= FAILURES_MAX + self._num_texts // TEXTS_PER_FAILURE:
            raise ConfigError(
                f"the tokenizer is not asked for {of}: {self._num_failures} of {self._num_texts} "
                "conversions took too much time or memory; correct the base model's "
                "tokenizer.json, or its chat template"
            )
        self._num_texts += 1
        ended: ProcessDiedError | None = None
        for _ in range(ATTEMPTS_MAX):
            if self._is_closed:
                break
            if self._child is None or self._child.has_ended:
                self._drop()
                try:
                    self._child, _ = _asked(self._files, self._load_cpu_s)
                except ConfigError:
                    self._num_failures += 1
                    raise
            try:
                return result(self._child.ask(question), ERRORS)
            except ProcessTimeoutError:
                self._drop()
                self._num_failures += 1
                raise ConfigError(
                    f"the tokenizer takes more than {question['cpu_s']:.3g} s of CPU time for "
                    f"{of}; correct the base model's tokenizer.json, or its chat template"
                ) from None
            except ProcessDiedError as error:
                self._drop()
                ended = error
        if self._is_closed:
            raise ConfigError(f"the tokenizer was closed before it converted {of}")
        self._num_failures += 1
        raise ConfigError(
            f"the tokenizer's process ended {ATTEMPTS_MAX} times over {of}, as it does where it "
            f"needs more than {MEMORY_BYTES_MAX >> 20:,} MiB; correct the base model's "
            "tokenizer.json, or its chat template"
        ) from ended

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def check_tokenizer(files: Mapping[str, bytes], cpu_s: float = LOAD_CPU_S) -> None:
    """Make the tokenizer of a base model once, in a child process with limits.

    Raises:
        ConfigError: the files make no tokenizer within the limits.
        OSError: as `load_tokenizer`.
    """
    child, _ = _asked(_of_chat(files), cpu_s, call="check")
    child.close()


def _of_chat(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: files[name] for name in sorted(CHAT_FILES & files.keys())}


def _asked(files: Mapping[str, bytes], cpu_s: float, **call: str) -> tuple[LimitedProcess, Any]:
    """Return a child that has read the files, and its answer to them."""
    encoded = {name: base64.b64encode(body).decode() for name, body in files.items()}
    ended: Exception | None = None
    for _ in range(ATTEMPTS_MAX):
        try:
            child = LimitedProcess(MODULE)
        except ProcessDiedError as error:
            ended = error
            continue
        try:
            return child, result(child.ask({"files": encoded, "cpu_s": cpu_s, **call}), ERRORS)
        except ProcessDiedError as error:
            child.close()
            ended = error
        except ProcessTimeoutError as error:
            child.close()
            ended = error
            break
        except BaseException:
            child.close()
            raise
    raise ConfigError(
        f"the base model's files ({', '.join(files)}) make no tokenizer within {cpu_s:g} s of CPU "
        f"time and {MEMORY_BYTES_MAX >> 20:,} MiB: its process failed ({ended}); correct "
        "tokenizer.json, or the chat template"
    ) from ended


def _copied(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [dict(message) for message in messages]


def _num_chars(messages: Sequence[Message]) -> int:
    return sum(len(str(text)) for message in messages for text in message.values())
