"""Text of stored tokens, by the tokenizer of their policy.

The tokenizer is untrusted: it runs in a child process (`token_decoder_child.py`) with limits.
"""

import base64
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Final

from storage.errors import UNREADABLE, CorruptError, NotFoundError
from storage.formats.tokenizer_files import TOKENIZER
from storage.machine.kept_process import KeptProcess, result
from storage.machine.limited_process import ProcessDiedError, ProcessTimeoutError
from storage.store.object_store import ObjectStore
from storage.weights import reader
from tasks.episodes.token_decoder_child import ERRORS

log = logging.getLogger(__name__)

MODULE: Final = "tasks.episodes.token_decoder_child"
TOKEN_TEXT_MAX = 256
"""Characters of one token's text; those of common models have some hundred at most."""
DECODERS_MAX: Final = 8
"""Policies whose tokenizers are held at once."""


class TokenDecoder:
    """Text of tokens by the `tokenizer.json` of a policy's version 0.

    Without a readable tokenizer, or where it fails, the text of a token is its number. The child is
    ended with this object.
    """

    def __init__(self, run: ObjectStore, policy: str) -> None:
        """`policy`: empty where no policy is known; its tokens are shown as numbers."""
        self._policy = policy
        self._texts: dict[int, str] = {}
        self._process: KeptProcess | None = None
        if body := _tokenizer(run, policy):
            self._process = KeptProcess(MODULE, {"tokenizer": base64.b64encode(body).decode()})
            self._end = weakref.finalize(self, self._process.close)
            with self._failures():
                result(self._process.ask(), ERRORS)

    def token(self, token: int) -> str:
        """Return the text of a token alone, up to TOKEN_TEXT_MAX characters."""
        if token not in self._texts:
            self._texts[token] = self.text([token])[:TOKEN_TEXT_MAX]
        return self._texts[token]

    def text(self, tokens: list[int]) -> str:
        """Return the text of consecutive tokens, which may be parts of one character."""
        if self._process is not None:
            with self._failures(), suppress(CorruptError):  # the latter: of these tokens
                return str(result(self._process.ask({"tokens": tokens}), ERRORS))
        return "".join(f"⟨{token}⟩" for token in tokens)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Show tokens as numbers from now on, where the block fails."""
        try:
            yield
        except (CorruptError, OSError, ProcessTimeoutError, ProcessDiedError) as error:
            log.warning(
                "tokens are shown as numbers: the tokenizer.json of %s cannot be used: %s",
                self._policy,
                error,
            )
            self._end()
            self._process = None


class TokenDecoders:
    """Decoders of the policies of a run."""

    def __init__(self, run: ObjectStore) -> None:
        self.of = lru_cache(DECODERS_MAX)(partial(TokenDecoder, run))
        """policy → its decoder."""


def _tokenizer(run: ObjectStore, policy: str) -> bytes:
    """Return the `tokenizer.json` of a policy's version 0; empty without a readable one."""
    try:
        return reader.fetch_files(run, policy, 0).get(TOKENIZER, b"") if policy else b""
    except (NotFoundError, *UNREADABLE):
        return b""
