import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from tokenizers import normalizers as given_normalizers
from tokenizers.normalizers import Replace

from storage.errors import CorruptError
from storage.formats import token_texts
from storage.formats.token_texts import TextLimits
from tests.support.models.tokenizer_steps import BYTE_LEVEL, DOUBLE, chain, replace

LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


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


A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
MARK = {"SpecialToken": {"id": "[X]", "type_id": 0}}


def with_templates(*templates: tuple[list[Any], list[Any]], num_ids: int = 1) -> Any:
    """A tokenizer with a template for each pair: of one text and of two."""
    tokens = {"[X]": {"id": "[X]", "ids": [7] * num_ids, "tokens": ["a"] * num_ids}}
    processors = [
        {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}
        for single, pair in templates
    ]
    fields = json.loads(tokenizer(None).to_str())
    fields["post_processor"] = {"type": "Sequence", "processors": [BYTE_LEVEL, *processors]}
    return Tokenizer.from_str(json.dumps(fields))


def test_templates_of_common_models_are_accepted() -> None:
    token_texts.check(with_templates(([MARK, A, MARK], [MARK, A, B, MARK]), num_ids=32))
    token_texts.check(with_templates(([A], [B, A]), ([], [])))


@pytest.mark.parametrize(
    ("templates", "num_ids"),
    [
        ([([A, A], [A, B])], 1),
        ([([A], [A, B, A])], 1),
        ([([A], [A, B]), ([A], [B, B])], 1),
        ([([MARK, A], [A, B])], 65),
        ([([A], [A, B, MARK, MARK])], 33),
    ],
)
def test_a_template_that_repeats_a_text_or_has_many_tokens_is_refused(
    templates: list[tuple[list[Any], list[Any]]], num_ids: int
) -> None:
    with pytest.raises(CorruptError, match=r"^a template of the post_processor repeats a text, or"):
        token_texts.check(with_templates(*templates, num_ids=num_ids))


def test_a_text_that_becomes_very_many_tokens_is_refused() -> None:
    token_texts.check_tokens(256, "")
    token_texts.check_tokens(256 + 64 * 10, "a" * 10)
    with pytest.raises(CorruptError, match=r"^a text of 10 characters became 897 tokens; at most"):
        token_texts.check_tokens(897, "a" * 10)


def test_a_decoder_that_searches_for_a_regular_expression_is_refused() -> None:
    search = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    with pytest.raises(CorruptError, match="the decoder has a regular expression"):
        token_texts.check(tokenizer(search))


def test_a_very_long_token_is_refused() -> None:
    with pytest.raises(CorruptError, match=r"a token has 1,025 characters; at most 1,024 are"):
        token_texts.check(tokenizer(None, "a" * 1025))


def encoder(
    normalizer: Any = None, *added: AddedToken, vocabulary: tuple[str, ...] = ("x",)
) -> TextLimits:
    model = models.WordLevel(
        {token: number for number, token in enumerate(vocabulary)}, unk_token="x"
    )
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return TextLimits(tokenizer)


def test_a_text_that_the_normalizer_makes_much_longer_is_refused() -> None:
    longer = Replace("a", "a" * 40)
    encoder(longer).check("a" * 6 + "b" * 16)  # 256 characters
    encoder(longer).check("ab" * 3_000)  # in the mean 20.5 times as long
    for text, length in (("a" * 33, 1_312), ("b" * 1_024 + "a" * 4_001, 161_056)):
        with pytest.raises(
            CorruptError, match=f"makes more than {length:,} characters of a text of {len(text):,}$"
        ):
            encoder(longer).check(text)


def test_a_text_of_forms_of_unicode_is_read() -> None:
    encoder(given_normalizers.NFKC()).check("\ufdfa" * 10_000)
    encoder().check("a" * 2**22)


def test_a_text_that_no_model_reads_is_refused() -> None:
    with pytest.raises(CorruptError, match=r"a text of 4,194,305 characters is too long"):
        encoder().check("a" * (2**22 + 1))
    with pytest.raises(CorruptError, match=r"makes more than 4,194,304 characters of a text of"):
        encoder(Replace("a", "aaa")).check("a" * 2**21)


@pytest.mark.parametrize("strips", [{"lstrip": True}, {"rstrip": True}, {}])
def test_very_many_tokens_that_take_the_spaces_beside_them_are_refused(
    strips: dict[str, bool],
) -> None:
    """Each of them searches a part of the text."""
    given = encoder(None, AddedToken("@", normalized=False, **strips))
    normalized = encoder(Replace("&", "@"), AddedToken("@", normalized=True, **strips))
    given.check("@" * 2**15)
    normalized.check("&" * 2**15)
    text = "@" * (2**15 + 1)
    if not strips:
        given.check(text)
        return
    for limits, each in ((given, text), (normalized, text.replace("@", "&"))):
        with pytest.raises(CorruptError, match=r"^32,769 added tokens of tokenizer\.json take the"):
            limits.check(each)
