"""Limits on the texts that a stored tokenizer makes and reads, checked before it does.

    tokens ──vocabulary──▶ texts ──decoder: Replace, ByteFallback, Fuse, Strip, …──▶ text
    text ──normalizer──▶ normalized text ──▶ tokens

A decoder is a chain of steps: forty replacements that double a text make a terabyte of one token.
The tokenizer is one of the package `tokenizers`, which this module does not import.
"""

import json
from collections.abc import Iterator
from typing import Any

from storage.errors import CorruptError
from storage.records.types import Json

TOKEN_CHARS_MAX = 1024
"""Of a token. The longest ones of common models have some hundred spaces."""
STEPS_MAX = 32
"""Of a decoder. Common models have four."""
GROWTH_MAX = 16
"""By which all steps together may make a text longer. Those of common models do not."""
_GROWING = ("BPEDecoder", "CTC")
"""Steps that may put a space after each character."""
TEXT_GROWTH_MAX, TEXT_CHARS_MIN = 2**5, 2**8
"""By which the normalizer may make a given text longer, beyond the second number of characters.
Forms of Unicode make one character up to 18.
"""
TEXT_PART = 2**10
"""Characters of a text that are normalized at once to find its growth."""
TEXT_CHARS_MAX = 2**22
"""Of a text after the normalizer, each of which may take 90 bytes: some million tokens."""
TOKENS_MIN, TOKENS_PER_CHAR = 2**8, 2**6
"""Tokens of a text: so many in any case, and so many for each character. A character may have four
bytes, and become 18.
"""
TEMPLATE_TOKENS_MAX = 2**6
"""Of a template, beside the text. Those of common models have up to two."""
STRIPS_MAX = 2**30
"""Characters of a text, times the added tokens in it that take the spaces beside them: for each, a
part of the text is searched.
"""


def check(tokenizer: Any) -> None:
    """Raise CorruptError for a tokenizer whose texts may be much longer than its tokens."""
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    if longest > TOKEN_CHARS_MAX:
        raise CorruptError(
            f"a token has {longest:,} characters; at most {TOKEN_CHARS_MAX:,} are decoded"
        )
    _check_templates(tokenizer.post_processor)
    if tokenizer.decoder is None:
        return
    growth = 1
    for number, step in enumerate(_steps(json.loads(tokenizer.decoder.__getstate__())), start=1):
        growth *= _growth(step)
        if number > STEPS_MAX or growth > GROWTH_MAX:
            raise CorruptError(
                f"the decoder has more than {STEPS_MAX} steps, or makes a text more than "
                f"{GROWTH_MAX} times as long"
            )


def check_tokens(num_tokens: int, text: str) -> None:
    """Raise CorruptError where a text became very many tokens."""
    num_max = TOKENS_MIN + TOKENS_PER_CHAR * len(text)
    if num_tokens > num_max:
        raise CorruptError(
            f"a text of {len(text):,} characters became {num_tokens:,} tokens; at most {num_max:,} "
            "are read"
        )


def _check_templates(post_processor: Any) -> None:
    """Raise CorruptError for templates that repeat a text, or put very many tokens beside it."""
    pending = [] if post_processor is None else [json.loads(post_processor.__getstate__())]
    while pending:
        step = pending.pop()
        pending += step.get("processors", [])
        for pieces in (step.get("single", []), step.get("pair", [])):
            texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
            num_tokens = sum(
                len(step["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
                for piece in pieces
                if "SpecialToken" in piece
            )
            if len(texts) > len(set(texts)) or num_tokens > TEMPLATE_TOKENS_MAX:
                raise CorruptError(
                    "a template of the post_processor repeats a text, or puts more than "
                    f"{TEMPLATE_TOKENS_MAX} tokens beside it"
                )


class TextLimits:
    """Limits on the texts that one tokenizer encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._normalizer = tokenizer.normalizer
        self._strips: list[str] = []
        """Added tokens that take the spaces beside them."""
        self._normalized_strips: list[str] = []
        """Those that are searched in a normalized text, normalized."""
        for token in tokenizer.get_added_tokens_decoder().values():
            if not token.lstrip and not token.rstrip:
                continue
            if token.normalized and self._normalizer is not None:
                self._normalized_strips.append(self._normalizer.normalize_str(token.content))
            else:
                self._strips.append(token.content)

    def check(self, text: str) -> None:
        """Raise CorruptError for a text that the tokenizer makes much longer, or that takes it very
        long to divide.
        """
        if len(text) > TEXT_CHARS_MAX:
            raise CorruptError(
                f"a text of {len(text):,} characters is too long; at most {TEXT_CHARS_MAX:,} "
                "become tokens"
            )
        normalized = text if self._normalizer is None else self._normalized(text)
        strips = sum(text.count(token) for token in self._strips)
        strips += sum(normalized.count(token) for token in self._normalized_strips)
        if strips * len(normalized) > STRIPS_MAX:
            raise CorruptError(
                f"{strips:,} added tokens of tokenizer.json take the spaces beside them in a text "
                f"of {len(normalized):,} characters, which takes too long"
            )

    def _normalized(self, text: str) -> str:
        """Return the text as its parts are normalized, which may differ where they meet."""
        length_max = min(TEXT_CHARS_MIN + TEXT_GROWTH_MAX * len(text), TEXT_CHARS_MAX)
        parts: list[str] = []
        length = 0
        for start in range(0, len(text), TEXT_PART):
            parts.append(self._normalizer.normalize_str(text[start : start + TEXT_PART]))
            length += len(parts[-1])
            if length > length_max:
                raise CorruptError(
                    "the normalizer of tokenizer.json makes more than "
                    f"{length_max:,} characters of a text of {len(text):,}"
                )
        return "".join(parts)


def is_failure(error: BaseException) -> bool:
    """Return whether it is an Exception, or a panic of the package `tokenizers`, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _steps(decoder: Json) -> Iterator[Json]:
    """Yield the steps of a decoder, those of chains within it included."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for part in decoder["decoders"]:
        yield from _steps(part)


def _growth(step: Json) -> int:
    """Return how many times as long a text may become. Raises CorruptError for a regular
    expression, whose search may take minutes.
    """
    if step["type"] != "Replace":
        return 2 if step["type"] in _GROWING else 1
    pattern: str | None = step["pattern"].get("String")
    if pattern is None:
        raise CorruptError("the decoder has a regular expression")
    if not pattern:  # the content comes before each character
        return 1 + len(step["content"])
    return max(1, -(-len(step["content"]) // len(pattern)))
