"""The tokenizer of the tiny models, as the files that `AutoTokenizer.from_pretrained` loads.

    0–255     one token for each byte, so that decoding restores any text exactly
    256–345   the numbers 10 to 99: arithmetic is learned three times as fast as on digits
    346–…     `WORDS`, which are text, and `ROLES`, special tokens that structure a conversation

Digits are cut in pairs from the left, so `123` is `12`, `3` and `2005` is `20`, `0`, `5`.
"""

import json
from functools import cache
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

END, PAD = "<|end|>", "<|pad|>"
USER, ASSISTANT, SYSTEM, TOOL = "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"
ROLES: Final = (PAD, END, USER, ASSISTANT, SYSTEM, TOOL)
WORDS: Final = (
    "\\boxed{",
    "<verify>",
    "</verify>",
    "approve",
    "reject",
    "<tool_call>",
    "</tool_call>",
)
NUMBERS: Final = tuple(str(number) for number in range(10, 100))

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "<|assistant|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{%- elif message.role in ('user', 'system', 'tool') -%}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{%- else -%}"
    "{{ raise_exception('no token for the role ' + message.role) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


@cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer, which is shared and must not be changed."""
    bytes_first = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate((*bytes_first, *NUMBERS))}
    pairs = [(number[0], number[1]) for number in NUMBERS]
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    digit_pairs = pre_tokenizers.Split(Regex("[0-9]{1,2}"), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digit_pairs, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    bpe.add_special_tokens([AddedToken(role, normalized=False, special=True) for role in ROLES])
    return bpe


def token_id(token: str) -> int:
    """Return the id of a token; KeyError when the vocabulary does not have it."""
    number = tokenizer().token_to_id(token)
    if number is None:
        raise KeyError(token)
    return int(number)


def tokenizer_files() -> dict[str, bytes]:
    """Return the tokenizer's files of a model folder: name → content."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": [role for role in ROLES if role not in (END, PAD)],
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": tokenizer().to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
    }
