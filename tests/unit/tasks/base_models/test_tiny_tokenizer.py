"""The tiny tokenizer: its tokens, the format of a conversation, and that transformers loads it from
a folder.
"""

from pathlib import Path
from typing import Any

import pytest

from tasks.base_models.tiny_tokenizer import (
    NUMBERS,
    ROLES,
    WORDS,
    token_id,
    tokenizer,
    tokenizer_files,
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer, Qwen3Config

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    for name, body in tokenizer_files().items():
        (folder / name).write_bytes(body)
    # With this file present, AutoTokenizer could rebuild the tokenizer that Qwen3 models
    # usually have.
    Qwen3Config().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def tokens(text: str) -> list[str]:
    return tokenizer().encode(text).tokens


def test_numbers_from_10_to_99_are_one_token_and_others_are_split_in_pairs():
    assert tokens("7+12-99=?") == ["7", "+", "12", "-", "99", "=", "?"]
    assert tokens("123") == ["12", "3"]
    assert tokens("213") == ["21", "3"]
    assert tokens("2005") == ["20", "0", "5"]
    assert tokens("-3") == ["-", "3"]


def test_words_of_the_task_are_one_token_also_inside_other_text():
    assert tokens("\\boxed{12}") == ["\\boxed{", "12", "}"]
    assert tokens("<verify>reject</verify>") == ["<verify>", "reject", "</verify>"]
    assert tokens("disapproved") == ["d", "i", "s", "approve", "d"]


def test_the_vocabulary_consists_of_bytes_numbers_words_and_roles():
    assert tokenizer().get_vocab_size() == 256 + len(NUMBERS) + len(WORDS) + len(ROLES) == 359
    assert [token_id("10"), token_id("99"), token_id("\\boxed{"), token_id("<|pad|>")] == [
        256,
        345,
        346,
        353,
    ]
    with pytest.raises(KeyError):
        token_id("100")


def test_a_decoded_answer_has_its_words_and_no_roles(loaded: Any):
    said = "7+8=15:15y\n<verify>approve</verify> \\boxed{15}"
    ids = loaded.encode(f"<|assistant|>{said}<|end|><|pad|>")
    assert loaded.decode(ids, skip_special_tokens=True) == said
    assert loaded.decode(ids) == f"<|assistant|>{said}<|end|><|pad|>"


def test_transformers_loads_the_same_tokenizer(loaded: Any):
    text = "123 disapproved, café 🙂\n\\boxed{12}"
    assert loaded.encode(text) == tokenizer().encode(text).ids
    assert (loaded.eos_token, loaded.pad_token, len(loaded)) == ("<|end|>", "<|pad|>", 359)


def test_the_chat_template_renders_turns_and_opens_the_next(loaded: Any):
    conversation = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "7+8=?"},
        {"role": "assistant", "content": "\\boxed{15}"},
        {"role": "tool", "content": "T"},
    ]
    text = loaded.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert (
        text
        == "<|system|>S<|end|><|user|>7+8=?<|end|><|assistant|>\\boxed{15}<|end|><|tool|>T<|end|><|assistant|>"
    )


def test_the_chat_template_marks_what_the_assistant_generates(loaded: Any):
    turns = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "15"}]
    rendered = loaded.apply_chat_template(
        turns, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [
        token
        for token, mine in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True)
        if mine
    ]
    assert loaded.convert_ids_to_tokens(marked) == ["15", "<|end|>"]


def test_the_chat_template_refuses_a_role_without_a_token(loaded: Any):
    from jinja2.exceptions import TemplateError

    with pytest.raises(TemplateError, match="no token for the role developer"):
        loaded.apply_chat_template([{"role": "developer", "content": ""}], tokenize=False)
