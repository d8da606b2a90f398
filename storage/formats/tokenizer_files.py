"""Which files and settings of a base model its tokenizer is made of.

They are untrusted: who loads them does so in a process with limits, at least once before
(`rollout/agents/chat_process.py`).
"""

from collections.abc import Mapping
from typing import Final

from storage.errors import CorruptError
from storage.formats.json_objects import dump, parse
from storage.formats.model_config import SPECIAL_TOKENS, TOKENIZER_CONFIG
from storage.records.types import Json

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CLASS: Final = "PreTrainedTokenizerFast"
"""The class of transformers that makes its tokenizer of `tokenizer.json` alone."""
ADDED_TOKENS: Final = "added_tokens.json"
"""Of older models: text of a token → its number."""
CHAT_TEMPLATE: Final = "chat_template.jinja"
FILES: Final = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, CHAT_TEMPLATE)
"""Of a base model: those of its tokenizer."""
_TOKEN_KEYS = ("_token", "_tokens")
_SETTINGS = frozenset(
    (
        *("added_tokens_decoder", "chat_template", "model_max_length", "model_input_names"),
        *("padding_side", "truncation_side", "split_special_tokens"),
        "clean_up_tokenization_spaces",
    )
)
"""Settings beside the names of tokens."""


def restricted(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a base model of which transformers may make its tokenizer, by name.

    Of the settings, those remain that a tokenizer of `tokenizer.json` needs. They name no other
    files, and no class but TOKENIZER_CLASS: others read other files, and make tokens by numbers in
    the settings (`extra_ids`).

    Raises:
        CorruptError: there is no `tokenizer.json`, or a file of settings is no JSON object.
    """
    if TOKENIZER not in files:
        raise CorruptError(
            f"{TOKENIZER} is missing; where a folder has another form of it, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes "
            "it"
        )
    settings: dict[str, Json] = {
        name: {
            key: value
            for key, value in parse(files.get(name, b"{}"), name).items()
            if name == ADDED_TOKENS or _is_setting(key)
        }
        for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
        if name in files or name == TOKENIZER_CONFIG
    }
    settings[TOKENIZER_CONFIG]["tokenizer_class"] = TOKENIZER_CLASS
    unchanged = {name: files[name] for name in (TOKENIZER, CHAT_TEMPLATE) if name in files}
    return {**unchanged, **{name: dump(each) for name, each in settings.items()}}


def is_failure(error: BaseException) -> bool:
    """Return whether it is an Exception, or a panic of the package `tokenizers`, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _is_setting(key: str) -> bool:
    """Return whether a setting is one of a tokenizer that `tokenizer.json` does not have."""
    return key in _SETTINGS or (key.endswith(_TOKEN_KEYS) and not key.startswith("add_"))
