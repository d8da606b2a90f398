"""Limits on a stored tokenizer's files, checked before a library loads them.

    text ──normalizer: NFC, Replace, …──▶ ──pre_tokenizer──▶ ──model──▶ ──post_processor──▶ tokens

Most of these are chains of steps of `tokenizer.json`. The normalizer is applied to the added tokens
when the file is loaded, and regular expressions are compiled. What a loaded tokenizer does with
texts, `token_texts.py` limits.
"""

import base64
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from pydantic_core import to_json

from storage.errors import CorruptError
from storage.formats.json_objects import dump, parse
from storage.formats.model_config import SPECIAL_TOKENS, TOKENIZER_CONFIG
from storage.formats.token_texts import TOKEN_CHARS_MAX
from storage.records.types import Json

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CLASS: Final = "PreTrainedTokenizerFast"
"""The class of transformers that makes its tokenizer of `tokenizer.json` alone."""
ADDED_TOKENS: Final = "added_tokens.json"
"""Of older models: text of a token → its number."""
CHAT_TEMPLATE: Final = "chat_template.jinja"
VALUES_MAX = 2**22
"""JSON values of a `tokenizer.json`. Those of large vocabularies have two to three million."""
ENCODING_GROWTH_MAX = 2**12
"""By which all steps before and after the model together may make a text longer. Those of common
models: below 2,400.
"""
GIVEN_GROWTH_MAX = 2**8
"""The same of the steps that put texts of the file into a text. Those of common models: below 100.
Forms of Unicode make few texts longer, these all.
"""
NORMALIZED_CHARS_MAX = 2**11
"""Of an added token after the normalizer. Those of common models: below 1,200. The time in which a
file is loaded grows with its square.
"""
NORMALIZED_CHARS_MIN = 2**16
"""Of all of them together, or half of the file's bytes. Each character may take kilobytes of memory
when the file is loaded.
"""
ENCODING_PARTS_MAX = 512
"""JSON objects of these steps, of which each has one to three. Common models have some twenty. All
steps of a normalizer are applied to each added token when the file is loaded.
"""
ENCODING_WORK_MAX = 2**17
"""Parts, times the growth: each step may read a text that the steps before it made longer."""
PATTERN_CHARS_MAX = 2**12
"""Characters of all regular expressions together. Those of common models: below 1,000. The time in
which some are compiled grows with their square.
"""
WORD_CHARS_MAX = 2**7
"""Of a word that a model of the type WordPiece divides, in a time that grows with its third power.
Common models have 100.
"""
AFFIX_CHARS_MAX = 2**5
"""Of the text that a model puts before or after each part of a word. Common models have four."""
PIECE_CHARS_MAX = 2**7
"""Of a token of a Unigram model, which compares each part of a text with all tokens that may
begin there. Common models have 16.
"""
SPARE_IDS = 2**16
"""Of a vocabulary: numbers below its largest one that may have no token, beside as many as there
are tokens. Libraries list them, in memory and in their output.
"""
_TOKEN_KEYS = ("_token", "_tokens")
_SETTINGS = frozenset(
    (
        *("added_tokens_decoder", "chat_template", "model_max_length", "model_input_names"),
        *("padding_side", "truncation_side", "split_special_tokens"),
        "clean_up_tokenization_spaces",
    )
)
"""Settings beside the names of tokens."""
_ENCODING = ("normalizer", "pre_tokenizer", "post_processor")
_WORD_CHARS = "max_input_chars_per_word"
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
_ENCODING_GROWTH: Mapping[Any, int] = MappingProxyType(
    {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "BertNormalizer": 12, "ByteLevel": 4}
)
"""Characters that a step makes of one, at most."""


def checked_file(body: bytes, settings: Iterable[Json] = ()) -> bytes:
    """Return a `tokenizer.json` as it may be loaded, written again from the values that were
    checked: a package that reads both of two equal keys would see others.

    Called before the file is loaded: its normalizer is applied to its added tokens then.

    Args:
        settings: the contents of the tokenizer's other files, which may add tokens, too.

    Raises CorruptError for a file with which a text may become much longer, or takes very many
    steps, whose added tokens, words, affixes or regular expressions are very long, or whose tokens
    have very large numbers.
    """
    fields = parse(body, TOKENIZER, VALUES_MAX)
    _check_steps([fields.get(part) for part in (*_ENCODING, "decoder")])
    _check_growth([fields.get(part) for part in _ENCODING])
    growth = _check_growth([fields.get("normalizer")])
    _check_added_tokens([fields.get("added_tokens"), *settings], growth, len(body))
    _check_patterns([fields.get(part) for part in (*_ENCODING, "decoder")])
    _check_words(fields.get("model"))
    _check_ids(fields.get("model"))
    return to_json(fields)


def checked_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a base model with which transformers may load its tokenizer, by name.

    Of the settings, those remain that a tokenizer of `tokenizer.json` needs. They name no other
    files, and no class but TOKENIZER_CLASS: others read other files, and make tokens by numbers in
    the settings (`extra_ids`).

    Raises:
        CorruptError: there is no `tokenizer.json`, or `checked_file` refuses it.
    """
    if TOKENIZER not in files:
        raise CorruptError(
            f"{TOKENIZER} is missing; where a folder has another form of it, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes "
            "it"
        )
    others: dict[str, Json] = {
        name: {
            key: value
            for key, value in parse(files.get(name, b"{}"), name).items()
            if name == ADDED_TOKENS or _is_setting(key)
        }
        for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
        if name in files or name == TOKENIZER_CONFIG
    }
    tokens = {"added_tokens": list(others.get(ADDED_TOKENS, {}))}
    body = checked_file(files[TOKENIZER], (*others.values(), tokens))
    others[TOKENIZER_CONFIG]["tokenizer_class"] = TOKENIZER_CLASS
    template = {CHAT_TEMPLATE: files[CHAT_TEMPLATE]} if CHAT_TEMPLATE in files else {}
    return {TOKENIZER: body, **{name: dump(each) for name, each in others.items()}, **template}


def _is_setting(key: str) -> bool:
    """Return whether a setting is one of a tokenizer that `tokenizer.json` does not have."""
    return key in _SETTINGS or (key.endswith(_TOKEN_KEYS) and not key.startswith("add_"))


def _check_steps(steps: Iterable[Any]) -> None:
    """Raise CorruptError for a step that is a list of its values, which the package takes, too: the
    other checks know a step by its fields.
    """
    pending = list(steps)
    while pending:
        part = pending.pop()
        values = list(part.values()) if isinstance(part, dict) else []
        in_lists = [item for value in values if isinstance(value, list) for item in value]
        if any(isinstance(each, list) for each in (part, *in_lists)):
            raise CorruptError(
                f"a step of {TOKENIZER} is a list; it must be an object with its type"
            )
        pending += [each for each in (*values, *in_lists) if isinstance(each, dict)]


def _check_growth(steps: Iterable[Any]) -> int:
    """Return how many times as long the steps may make a text; CorruptError beyond the limits."""
    growth, given_growth, num_parts = 1, 1, 0
    pending = list(steps)
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            num_parts += 1
            growth *= _encoding_growth(part)
            given_growth *= _given_growth(part)
            pending += part.values()
        elif isinstance(part, list):
            pending += part
        if (
            growth > ENCODING_GROWTH_MAX
            or given_growth > GIVEN_GROWTH_MAX
            or num_parts > ENCODING_PARTS_MAX
            or growth * num_parts > ENCODING_WORK_MAX
        ):
            raise CorruptError(
                f"the {', '.join(_ENCODING)} of {TOKENIZER} have more than {ENCODING_PARTS_MAX} "
                f"parts, or make a text more than {ENCODING_GROWTH_MAX:,} times as long (by texts "
                f"of the file: {GIVEN_GROWTH_MAX}), or both together more than "
                f"{ENCODING_WORK_MAX:,}"
            )
    return growth


def _check_patterns(steps: Iterable[Any]) -> None:
    """Raise CorruptError for regular expressions that take long to compile."""
    num_chars = 0
    pending = list(steps)
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            pending += part.values()
            if isinstance(pattern := part.get("Regex"), str):
                num_chars += len(pattern)
    if num_chars > PATTERN_CHARS_MAX:
        raise CorruptError(
            f"the regular expressions of {TOKENIZER} have {num_chars:,} characters; at most "
            f"{PATTERN_CHARS_MAX:,} are read"
        )


def _check_words(model: Any) -> None:
    """Raise CorruptError for a model that takes long to divide a word."""
    model = model if isinstance(model, dict) else {}
    if model.get("dropout"):
        raise CorruptError(
            f"the model of {TOKENIZER} has a dropout, with which a text has other tokens each time"
        )
    word_chars = model.get(_WORD_CHARS)
    lengths = [(_WORD_CHARS, word_chars if isinstance(word_chars, int) else 0, WORD_CHARS_MAX)]
    lengths.append(("piece", _longest_piece(model.get("vocab")), PIECE_CHARS_MAX))
    lengths += [(key, len(str(model.get(key) or "")), AFFIX_CHARS_MAX) for key in _AFFIXES]
    for key, length, length_max in lengths:
        if length > length_max:
            raise CorruptError(
                f"the model of {TOKENIZER} has a {key} of more than {length_max} characters"
            )


def _check_ids(model: Any) -> None:
    """Raise CorruptError for a vocabulary whose largest number is far above its size."""
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
    largest = max((number for number in ids if isinstance(number, int)), default=0)
    if largest > 2 * len(ids) + SPARE_IDS:
        raise CorruptError(
            f"the vocabulary of {TOKENIZER} has {len(ids):,} tokens, and one with the number "
            f"{largest:,}"
        )


def _longest_piece(vocabulary: Any) -> int:
    """Return the characters of the longest token of a Unigram model: a list of [token, score]."""
    pairs = vocabulary if isinstance(vocabulary, list) else []
    return max((len(str(pair[0])) for pair in pairs if isinstance(pair, list) and pair), default=0)


def _check_added_tokens(places: Iterable[Any], growth: int, num_bytes: int) -> None:
    """Raise CorruptError for added tokens that take very long to load, by the growth of the
    normalizer and the bytes of the file.
    """
    num_normalized = 0
    for text, is_normalized in _added_tokens(places):
        length = len(text) * growth if is_normalized else 0
        num_normalized += length
        if len(text) > TOKEN_CHARS_MAX or length > NORMALIZED_CHARS_MAX:
            raise CorruptError(
                f"an added token has {len(text):,} characters, or up to {length:,} after the "
                f"normalizer; at most {TOKEN_CHARS_MAX:,} and {NORMALIZED_CHARS_MAX:,} are read"
            )
    if num_normalized > max(NORMALIZED_CHARS_MIN, num_bytes // 2):
        raise CorruptError(
            f"the added tokens of {TOKENIZER} may have {num_normalized:,} characters together "
            f"after the normalizer, and the file has {num_bytes:,} bytes"
        )


def _added_tokens(places: Iterable[Any]) -> Iterator[tuple[str, bool]]:
    """Yield every text of `places` that becomes an added token, and whether it is normalized: an
    object's content, and the values of keys such as `eos_token` and `extra_special_tokens`.
    """
    pending = [(place, False) for place in places]
    while pending:
        part, is_token = pending.pop()
        if isinstance(part, str) and is_token:
            yield part, False
        elif isinstance(part, list):
            pending += [(each, is_token) for each in part]
        elif isinstance(part, dict):
            if isinstance(content := part.get("content"), str):
                yield content, part.get("normalized", True) is not False
            pending += [
                (each, is_token or key.endswith(_TOKEN_KEYS))
                for key, each in part.items()
                if key != "content"
            ]


def _encoding_growth(step: Json) -> int:
    """Return how many times as long one step may make a text."""
    if (given := _given_growth(step)) > 1:
        return given
    if "add_prefix_space" in step:
        return _ENCODING_GROWTH["ByteLevel"]
    return _ENCODING_GROWTH.get(step.get("type"), 1)


def _given_growth(step: Json) -> int:
    """Return how many times as long one step may make a text by texts of the file. A step is known
    by its fields: files of old releases do not name its type.
    """
    match step:
        case {"pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return max(1, math.ceil(len(content) / len(pattern)))
        case {"pattern": _, "content": str(content)}:  # it may come before each character
            return 1 + len(content)
        case {"prepend": str(text)} | {"replacement": str(text)}:
            return 1 + len(text)
        case {"precompiled_charsmap": str(charsmap)}:
            return _longest_replacement(charsmap)
    return 1


def _longest_replacement(charsmap: str) -> int:
    """Return the size of the longest text that a character is replaced by, in characters of three
    bytes. The form: u32 bytes of a trie | the trie | texts, each with a zero at its end.

    Raises CorruptError for other Base64 than is written; the package takes it without padding, too.
    """
    try:
        body = base64.b64decode(charsmap, validate=True)
    except ValueError as error:
        raise CorruptError(
            f"a precompiled_charsmap of {TOKENIZER} is not padded Base64: {error}"
        ) from error
    texts = body[4 + int.from_bytes(body[:4], "little") :]
    return max(1, math.ceil(max(map(len, texts.split(b"\0"))) / 3))
