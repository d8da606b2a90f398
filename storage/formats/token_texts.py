"""Limits on the text that a stored tokenizer makes of tokens, checked before it makes any.

    tokens ──vocabulary──▶ texts ──decoder: Replace, ByteFallback, Fuse, Strip, …──▶ text

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


def check(tokenizer: Any) -> None:
    """Raise CorruptError for a tokenizer whose texts may be much longer than its tokens."""
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    if longest > TOKEN_CHARS_MAX:
        raise CorruptError(
            f"a token has {longest:,} characters; at most {TOKEN_CHARS_MAX:,} are decoded"
        )
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


def is_panic(error: BaseException) -> bool:
    """Return whether the package `tokenizers` failed by a panic, which is no Exception."""
    return type(error).__name__ == "PanicException"


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
