import base64
import json
from typing import Any

import pytest

from storage.errors import CorruptError
from storage.formats import tokenizer_files
from tests.support.models.tokenizer_steps import BYTE_LEVEL, DOUBLE, replace


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
        normalizers(*[replace("a", "aa")] * 8),
        normalizers(*[replace("a", "b")] * 250),
    ],
)
def test_encoders_of_common_models_are_accepted(parts: dict[str, Any]) -> None:
    tokenizer_files.checked_file(file_of(**parts))


@pytest.mark.parametrize(
    "parts",
    [
        normalizers(*[DOUBLE] * 40),
        normalizers(*[DOUBLE] * 9),
        normalizers(NFKD, {"type": "NFKC"}, {"type": "BertNormalizer"}, {"type": "NFC"}),
        normalizers(*[normalizers(DOUBLE, DOUBLE)["normalizer"]] * 7),
        normalizers(*[{"pattern": {"String": "a"}, "content": "aa"}] * 40),
        normalizers(*[SPACES] * 40),
        normalizers(*[{"type": "Prepend", "prepend": "aaaa"}] * 40),
        normalizers(*[replace("ي", "\ufdfa"), NFKD] * 3),
        normalizers(replace("", "b" * 4096)),
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(100_000)}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [METASPACE] * 40}},
        {"post_processor": template(*[WHOLE_TEXT] * 512)},
        normalizers(*[{"type": "Lowercase"}] * 512),
    ],
)
def test_an_encoder_that_multiplies_text_or_has_very_many_steps_is_refused(
    parts: dict[str, Any],
) -> None:
    with pytest.raises(CorruptError, match="make a text more than 4,096 times as long"):
        tokenizer_files.checked_file(file_of(**parts))


def added(content: str, **fields: bool) -> dict[str, object]:
    return {"id": 7, "content": content, **fields}


@pytest.mark.parametrize(
    ("parts", "settings"),
    [
        ({"added_tokens": [added(" " * 24, normalized=True)], "normalizer": {"type": "NFC"}}, {}),
        ({"added_tokens": [added("a" * 1024, normalized=False)], "normalizer": NFKD}, {}),
        ({"added_tokens": [added("<extra_id_99>")] * 200, "normalizer": NFKD}, {}),
        ({}, {"chat_template": "a" * 10**6, "model_max_length": 10**6, "eos_token": None}),
        ({}, {"extra_special_tokens": ["a" * 1024], "added_tokens_decoder": {"7": added("a")}}),
    ],
)
def test_added_tokens_of_common_models_are_accepted(
    parts: dict[str, Any], settings: dict[str, Any]
) -> None:
    tokenizer_files.checked_file(file_of(**parts), [settings])


LONG = "a" * 1025


@pytest.mark.parametrize(
    ("parts", "settings"),
    [
        ({"added_tokens": [added(LONG, normalized=False)]}, {}),
        ({"added_tokens": [added("a" * 9, normalized=True)], **normalizers(NFKD, NFKD)}, {}),
        ({"added_tokens": [added("a" * 9)], **normalizers(NFKD, NFKD)}, {}),
        ({}, {"added_tokens_decoder": {"7": added(LONG)}}),
        (normalizers(*[DOUBLE] * 8), {"added_tokens_decoder": {"7": added("a" * 9)}}),
        ({}, {"eos_token": LONG}),
        ({}, {"extra_special_tokens": {"image_token": LONG}}),
        ({}, {"additional_special_tokens": ["a", [LONG]]}),
    ],
)
def test_a_very_long_added_token_is_refused(
    parts: dict[str, Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(CorruptError, match=r"an added token has .* after the normalizer"):
        tokenizer_files.checked_file(file_of(**parts), [settings])


def test_many_added_tokens_that_become_longer_are_refused() -> None:
    parts = {"added_tokens": [added("ab")] * 100, **normalizers(NFKD, NFKD)}
    tokenizer_files.checked_file(file_of(**parts))
    parts["added_tokens"] = [added("ab")] * 200
    with pytest.raises(CorruptError, match=r"may have 129,600 characters together after the norm"):
        tokenizer_files.checked_file(file_of(**parts))


def patterns(*lengths: int) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": "a" * length}} for length in lengths]


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "decoder"])
def test_very_long_regular_expressions_are_refused(part: str) -> None:
    """Those of a hundred kilobytes take minutes to compile, before any text is divided."""
    tokenizer_files.checked_file(file_of(**{part: {"parts": patterns(4000, 96)}}))
    with pytest.raises(CorruptError, match=r"have 4,097 characters; at most 4,096 are read"):
        tokenizer_files.checked_file(file_of(**{part: {"parts": patterns(4000, 97)}}))


def test_a_unigram_model_of_very_long_tokens_is_refused() -> None:
    tokenizer_files.checked_file(file_of(model={"vocab": [["a", 0.0], ["a" * 128, -1.0], []]}))
    with pytest.raises(CorruptError, match=r"has a piece of more than 128 characters"):
        tokenizer_files.checked_file(file_of(model={"vocab": [["a" * 129, 0.0], ["a", -1.0]]}))


@pytest.mark.parametrize(
    ("key", "read", "refused"),
    [
        ("max_input_chars_per_word", 128, 129),
        ("max_input_chars_per_word", 100, 10**30),
        ("continuing_subword_prefix", "#" * 32, "#" * 33),
        ("end_of_word_suffix", None, "#" * 33),
    ],
)
def test_a_model_of_very_long_words_or_affixes_is_refused(
    key: str, read: Any, refused: Any
) -> None:
    tokenizer_files.checked_file(file_of(model={key: read}))
    with pytest.raises(CorruptError, match=rf"has a {key} of more than (128|32) characters"):
        tokenizer_files.checked_file(file_of(model={key: refused}))


@pytest.mark.parametrize(("num_tokens", "largest"), [(0, 0), (1, 65_538), (1_000, 67_536)])
def test_numbers_far_above_a_vocabularys_size_are_refused(num_tokens: int, largest: int) -> None:
    """The library lists each number without a token."""
    vocabulary = {f"t{number}": number for number in range(num_tokens)}
    if num_tokens:
        vocabulary["t0"] = largest
    tokenizer_files.checked_file(file_of(model={"vocab": vocabulary}))
    vocabulary["one more"] = largest + 3 if num_tokens else 65_539
    with pytest.raises(
        CorruptError, match=r"^the vocabulary of tokenizer\.json has .* tokens, and"
    ):
        tokenizer_files.checked_file(file_of(model={"vocab": vocabulary}))


@pytest.mark.parametrize("number", [None, "9", 1e9, [10**9]])
def test_numbers_of_tokens_that_are_none_are_left_to_the_library(number: object) -> None:
    tokenizer_files.checked_file(file_of(model={"vocab": {"a": number}}))


def test_the_files_of_a_tokenizer_name_the_common_class_and_no_files() -> None:
    kept = {
        "added_tokens_decoder": {}, "chat_template": "x", "model_max_length": 9,
        "model_input_names": ["input_ids"], "padding_side": "left", "truncation_side": "left",
        "split_special_tokens": True, "clean_up_tokenization_spaces": True, "image_token": "<i>",
        "eos_token": "</s>", "additional_special_tokens": ["<a>"], "extra_special_tokens": {},
    }  # fmt: skip
    dropped = {
        "vocab_file": "/x", "add_bos_token": True, "add_eos_token": True, "post_processor": 1,
        "tokenizer_truncation": {}, "fix_mistral_regex": True, "extra_ids": 9, "auto_map": {},
    }  # fmt: skip
    body = json.dumps({"tokenizer_class": "ByT5Tokenizer", **kept, **dropped}).encode()
    files = {
        "tokenizer.json": file_of(),
        "tokenizer_config.json": body,
        "special_tokens_map.json": body,
        "added_tokens.json": b'{"vocab_file": 1}',
        "chat_template.jinja": b"{{ 1 }}",
        "config.json": b"{}",
    }
    checked = tokenizer_files.checked_files(files)
    assert checked.pop("chat_template.jinja") == b"{{ 1 }}"
    assert {name: json.loads(body) for name, body in checked.items()} == {
        "tokenizer.json": json.loads(file_of()),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **kept},
        "special_tokens_map.json": kept,
        "added_tokens.json": {"vocab_file": 1},
    }
    few = tokenizer_files.checked_files({"tokenizer.json": file_of()})
    assert few.keys() == {"tokenizer.json", "tokenizer_config.json"}
    with pytest.raises(CorruptError, match=r"^tokenizer\.json is missing"):
        tokenizer_files.checked_files({"tokenizer_config.json": b"{}"})


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "decoder"])
@pytest.mark.parametrize(
    "steps",
    [
        [{"String": "a"}, "aa"],
        [],
        {"type": "Sequence", "normalizers": [{"type": "NFC"}, [{"String": "a"}, "aa"]]},
        {"normalizers": [{"normalizers": [["xyz"]]}]},
        {"a": {"b": [[]]}},
    ],
)
def test_a_step_that_is_a_list_is_refused(part: str, steps: Any) -> None:
    """The package takes `[{"String": "a"}, "aa"]` for a replacement."""
    with pytest.raises(CorruptError, match=r"^a step of tokenizer\.json is a list; it must be"):
        tokenizer_files.checked_file(file_of(**{part: steps}))


@pytest.mark.parametrize("charsmap", ["no base64", charsmap(33).rstrip("="), "AAAA\n", "_-AA"])
def test_a_charsmap_in_another_form_of_base64_is_refused(charsmap: str) -> None:
    """The package reads it without padding: its growth would be counted as 1."""
    with pytest.raises(CorruptError, match=r"^a precompiled_charsmap .* is not padded Base64: "):
        tokenizer_files.checked_file(
            file_of(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})
        )


def test_a_model_with_a_dropout_is_refused() -> None:
    for none in (None, 0.0):
        tokenizer_files.checked_file(file_of(model={"dropout": none}))
    with pytest.raises(CorruptError, match=r"^the model of tokenizer\.json has a dropout, with"):
        tokenizer_files.checked_file(file_of(model={"dropout": 0.001}))


def test_many_steps_on_a_long_text_are_refused() -> None:
    """Each may read the text that the first one made longer."""
    longer = replace("", "b" * 255)
    tokenizer_files.checked_file(file_of(**normalizers(longer, *[{"type": "Lowercase"}] * 509)))
    longest = [longer, {"type": "NFD"}]  # 256 · 4
    parts = 2**17 // 2**10 - 4  # the chain, two steps and the pattern of the first
    tokenizer_files.checked_file(file_of(**normalizers(*longest, *[{"type": "Lowercase"}] * parts)))
    with pytest.raises(CorruptError, match=r"or both together more than 131,072$"):
        tokenizer_files.checked_file(
            file_of(**normalizers(*longest, *[{"type": "Lowercase"}] * (parts + 1)))
        )


def test_lists_of_numbers_and_names_are_no_steps() -> None:
    roberta = {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}
    tokens = {"[X]": {"id": "[X]", "ids": [1], "tokens": ["[X]"]}}
    for step in (roberta, {**template(WHOLE_TEXT), "special_tokens": tokens}):
        tokenizer_files.checked_file(file_of(post_processor=step))


def test_what_is_loaded_is_what_was_checked() -> None:
    """The package reads both of two equal keys."""
    body = b'{"normalizer": {"pattern": {"Regex": "' + b"a" * 5_000 + b'"}}, "normalizer": null}'
    assert tokenizer_files.checked_file(body) == b'{"normalizer":null}'
