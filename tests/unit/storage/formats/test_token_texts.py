import base64
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from storage.errors import CorruptError
from storage.formats import token_texts

LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def chain(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


DOUBLE = replace("a", "aa")
BPE = {"type": "BPEDecoder", "suffix": ""}
CTC = {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}


def tokenizer(decoder: dict[str, Any] | None, token: str = "a") -> Any:
    model = {"type": "WordLevel", "vocab": {token: 7}, "unk_token": token}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "decoder": decoder, "model": model}))


@pytest.mark.parametrize(
    "decoder", [None, BYTE_LEVEL, LLAMA, chain(*[DOUBLE] * 4), chain(*[{"type": "Fuse"}] * 32)]
)
def test_decoders_of_common_models_are_accepted(decoder: dict[str, Any] | None) -> None:
    token_texts.check(tokenizer(decoder, "a" * 1024))


@pytest.mark.parametrize(
    "decoder",
    [
        chain(*[DOUBLE] * 40),
        chain(*[DOUBLE] * 5),
        chain(DOUBLE, chain(*[DOUBLE] * 4)),
        chain(*[BPE] * 40),
        chain(*[CTC] * 40),
        replace("a", "a" * 17),
        replace("aa", "a" * 33),
        replace("", "b" * 16),
        chain(*[{"type": "Fuse"}] * 33),
    ],
)
def test_a_decoder_that_multiplies_text_is_refused(decoder: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match=r"the decoder has more than 32 steps, or makes a text"):
        token_texts.check(tokenizer(decoder))


def test_a_decoder_that_searches_for_a_regular_expression_is_refused() -> None:
    search = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    with pytest.raises(CorruptError, match="the decoder has a regular expression"):
        token_texts.check(tokenizer(search))


def test_a_very_long_token_is_refused() -> None:
    with pytest.raises(CorruptError, match=r"a token has 1,025 characters; at most 1,024 are"):
        token_texts.check(tokenizer(None, "a" * 1025))


def file_of(**parts: Any) -> bytes:
    return json.dumps({"version": "1.0", "added_tokens": [], "model": {}, **parts}).encode()


def normalizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": {}}


def charsmap(longest: int) -> str:
    """An empty trie and one text."""
    return base64.b64encode(bytes(4) + b"x" * longest + b"\0").decode()


SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
NFKD = {"type": "NFKD"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WHOLE_TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": None, "pre_tokenizer": None, "post_processor": None},
        normalizers({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": BYTE_LEVEL, "post_processor": BYTE_LEVEL},
        {
            **normalizers(replace("``", '"'), NFKD, {"precompiled_charsmap": charsmap(33)}),
            "pre_tokenizer": METASPACE,
            "post_processor": template({}, WHOLE_TEXT, {}),
        },
        normalizers({"type": "Precompiled", "precompiled_charsmap": charsmap(33)}, SPACES),
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "no base64"}},
        normalizers(*[replace("a", "aa")] * 12),
        normalizers(*[replace("a", "b")] * 250),
    ],
)
def test_encoders_of_common_models_are_accepted(parts: dict[str, Any]) -> None:
    token_texts.check_file(file_of(**parts))


@pytest.mark.parametrize(
    "parts",
    [
        normalizers(*[DOUBLE] * 40),
        normalizers(*[DOUBLE] * 13),
        normalizers(*[normalizers(DOUBLE, DOUBLE)["normalizer"]] * 7),
        normalizers(*[{"pattern": {"String": "a"}, "content": "aa"}] * 40),
        normalizers(*[SPACES] * 40),
        normalizers(*[{"type": "Prepend", "prepend": "aaaa"}] * 40),
        normalizers(*[replace("ي", "\ufdfa"), NFKD] * 3),
        normalizers(replace("", "b" * 4096)),
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(100_000)}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [METASPACE] * 40}},
        {"post_processor": template(*[WHOLE_TEXT] * 4097)},
        normalizers(*[{"type": "Lowercase"}] * 512),
        {
            **normalizers(*[DOUBLE] * 6),
            "post_processor": {"type": "Sequence", "processors": [template(*[WHOLE_TEXT] * 65)]},
        },
    ],
)
def test_an_encoder_that_multiplies_text_or_has_very_many_steps_is_refused(
    parts: dict[str, Any],
) -> None:
    with pytest.raises(CorruptError, match="make a text more than 4,096 times as long"):
        token_texts.check_file(file_of(**parts))
