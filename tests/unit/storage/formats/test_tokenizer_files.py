import json

import pytest

from storage.errors import CorruptError
from storage.formats import tokenizer_files

TOKENIZER = b'{"version": "1.0", "model": {}}'


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
        "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": body,
        "special_tokens_map.json": body,
        "added_tokens.json": b'{"vocab_file": 1}',
        "chat_template.jinja": b"{{ 1 }}",
        "config.json": b"{}",
    }
    kept_files = tokenizer_files.restricted(files)
    assert kept_files.pop("chat_template.jinja") == b"{{ 1 }}"
    assert {name: json.loads(body) for name, body in kept_files.items()} == {
        "tokenizer.json": json.loads(TOKENIZER),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **kept},
        "special_tokens_map.json": kept,
        "added_tokens.json": {"vocab_file": 1},
    }
    few = tokenizer_files.restricted({"tokenizer.json": TOKENIZER})
    assert few.keys() == {"tokenizer.json", "tokenizer_config.json"}
    with pytest.raises(CorruptError, match=r"^tokenizer\.json is missing"):
        tokenizer_files.restricted({"tokenizer_config.json": b"{}"})
    listed = {"tokenizer.json": TOKENIZER, "tokenizer_config.json": b"[]"}
    with pytest.raises(
        CorruptError, match=r"tokenizer_config\.json is a JSON list where an object"
    ):
        tokenizer_files.restricted(listed)


def test_the_file_of_a_tokenizer_is_left_as_it_is() -> None:
    body = b'{"model": 1, "model": 2}'
    assert tokenizer_files.restricted({"tokenizer.json": body})["tokenizer.json"] == body


class PanicException(BaseException):
    pass


def test_a_panic_is_a_failure_and_an_interruption_is_none() -> None:
    errors = [ValueError(), PanicException(), KeyboardInterrupt(), SystemExit()]
    assert [tokenizer_files.is_failure(error) for error in errors] == [True, True, False, False]
