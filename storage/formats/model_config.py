"""Checks of a model's `config.json` (Hugging Face): its sizes, and the code and files it names.

Libraries allocate by these sizes before they see a tensor: a list entry per layer, a matrix of
`hidden_size` columns. A damaged or hostile file must not decide how much memory a reader takes.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from storage.errors import CorruptError
from storage.formats.json_objects import parse
from storage.records.types import Json

MODEL_CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
"""With it, transformers and peft load an adapter, or another base model."""
CODE_KEYS: Final = frozenset(
    (
        *("auto_map", "custom_pipelines", "attn_implementation", "experts_implementation"),
        *("attribute_map", "configuration_files"),
    )
)
"""Keys of a configuration that name Python code, kernels of the hub, other names of these keys, or
files that transformers reads in place of `config.json`. So may keys with a `_` before them:
transformers sets each as an attribute, `__dict__` too.
"""
WEIGHTS_KEY: Final = "transformers_weights"
"""Key of a configuration with the file that transformers loads instead of `model.safetensors`."""
TASK_KEY: Final = "task_specific_params"
"""Key of a configuration with settings of generation, such as a number of beams, which a pipeline
takes without asking.
"""
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
PATH_KEYS: Final = frozenset({"vocab", "merges", "init_inputs"})
PATH_SUFFIXES: Final = ("_file", "_files", "_spm")
"""Keys of a tokenizer's settings whose values transformers opens as files."""
SIZE_FLOOR: Final = 2**16
"""Sizes up to this one cost little, and are accepted beside any tensors."""
SIZE_MAX: Final = 2**20
"""Larger ones are refused beside any tensors, those of a vocabulary excepted: a manifest may claim
any shape, and a tensor with a dimension of 0 has no bytes. A configuration has a list item for each
layer and a name for each label.
"""
VOCABULARY = "vocab"
"""In the names of sizes with which a configuration makes no lists."""
DIGITS_SHOWN_MAX = 24
PREFIXES, SUFFIXES = ("num_", "n_"), ("_size", "_dim")
"""Keys of counts and sizes: `num_hidden_layers`, `n_embd`, `vocab_size`, `head_dim`."""
POSITIONS_MAX: Final = 2**31
"""More positions are no limit."""
LARGEST: Final[Mapping[str, int]] = MappingProxyType(
    {
        # Tokens that a state space model computes at once. It pads each sequence to a multiple of
        # them, and its memory grows with their square; published models have 64 to 256.
        "chunk_size": 512,
        "mamba_chunk_size": 512,
        # Passes through the same layers; published models have 2 and 3.
        "H_cycles": 16,
        "L_cycles": 16,
        # Part of each head that is rotated: tables have as many columns.
        "partial_rotary_factor": 1,
        "rotary_pct": 1,
        # Classes of a classifier: each part of a configuration names all of them.
        "num_labels": 1024,
    }
)
"""Numbers that no tensor limits → the largest that is read."""
LAYERS_MAX: Final = 2**10
"""Of any count of layers: for each layer, a class may search a list that has an item for each."""
LIST_ITEMS_MAX: Final = 2**12
"""Of a list in a configuration, such as numbers of layers; published models have some hundred."""
OBJECTS_MAX: Final = 2**10
"""JSON objects of a configuration: a class may make another configuration of each. Published models
have up to three for each layer.
"""
INTEGERS_MAX: Final = 2**22
"""Sum of all integers of a configuration but those of _FREE_KEYS: a class may make a list, or run a
loop, of as many as any of them. Those of published models: below a million.
"""
_FREE_KEYS = re.compile("vocab|position|token|length|window|seq|ctx|context|theta|base|freq")
"""In the names of sizes and numbers with which classes make no lists."""
_LAYERS = re.compile("(^|_)layers?$")
"""At the end of a key: a count of layers, such as `num_hidden_layers` and `n_layer`."""
REPEATS: Final = "attention_types"
"""Key of lists with numbers of repetitions, which GPT-Neo makes into one list."""


def check_sizes(body: bytes, shapes: Iterable[tuple[int, ...]], what: str) -> None:
    """Raise CorruptError when a count or size in `body` exceeds every dimension of `shapes`, or
    SIZE_MAX, a number its limit in LARGEST, a count of layers LAYERS_MAX, a list LIST_ITEMS_MAX,
    the number of objects OBJECTS_MAX, or the sum of integers INTEGERS_MAX.

    Example: `num_hidden_layers: 1000000` beside an embedding of (151936, 2048).
    """
    limit = max((dimension for shape in shapes for dimension in shape), default=0)
    limit = max(limit, SIZE_FLOOR)
    config = parse(body, what)
    pending: list[Any] = [config]
    num_objects = 0
    while pending:
        value = pending.pop()
        num_objects += isinstance(value, dict)
        if num_objects > OBJECTS_MAX:
            raise CorruptError(f"{what} has more than {OBJECTS_MAX:,} objects")
        if isinstance(value, list):
            if len(value) > LIST_ITEMS_MAX:
                raise CorruptError(
                    f"{what}: a list has {len(value):,} items; at most {LIST_ITEMS_MAX:,} are read"
                )
            pending += value
        if not isinstance(value, dict):
            continue
        pending += value.values()
        for key, given in value.items():
            for size in [_repeats(given)] if key == REPEATS else _numbers(given):
                _check_size(key, size, limit, what)
    _check_integers(config, what)


def _numbers(value: Any) -> list[float]:
    """Return a number, or those of a list and of the lists in it."""
    pending, numbers = [value], []
    while pending:
        each = pending.pop()
        if isinstance(each, list):
            pending += each
        elif isinstance(each, int | float):
            numbers.append(each)
    return numbers


def _check_size(key: str, size: float, limit: int, what: str) -> None:
    digits = str(size)[:DIGITS_SHOWN_MAX]
    if key in LARGEST:
        largest: float = LARGEST[key]
    elif _LAYERS.search(key):
        largest = LAYERS_MAX
    elif key == REPEATS or _is_size(key):
        if size > limit:
            raise CorruptError(
                f"{what}: {key} is {digits}, but the model's largest stored dimension is {limit}; "
                "publish the base model again with the config.json of its tensors"
            )
        largest = math.inf if VOCABULARY in key else SIZE_MAX
    else:
        return
    if size > largest:
        raise CorruptError(f"{what}: {key} is {digits}; at most {largest:,} is read")


def _check_integers(config: Json, what: str) -> None:
    total = 0
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, each) for each in value]
        elif isinstance(value, int) and not _FREE_KEYS.search(key):
            total += max(0, value)
            if total > INTEGERS_MAX:
                raise CorruptError(
                    f"{what}: all integers together, {key} among them, are more than "
                    f"{INTEGERS_MAX:,}"
                )


def positions(section: Json, given: float = 1.0) -> Iterator[float]:
    """Yield the lengths of contexts for which a model may compute rotations: its
    `max_position_embeddings`, `given` without them, and those of each scaling.
    """
    named = section.get("max_position_embeddings")
    given = float(named) if isinstance(named, int | float) else given
    yield given
    for value in section.values():
        if not isinstance(value, dict):
            continue
        yield from positions(value, given)
        original, factor = value.get("original_max_position_embeddings"), value.get("factor")
        base = float(original) if isinstance(original, int | float) else given
        if isinstance(factor, int | float):
            yield base * float(factor)


def longest_context(config: Json) -> int | None:
    """Return the tokens of the longest context of a language model, up to POSITIONS_MAX; None where
    it is unknown.
    """
    text_config = config.get("text_config")
    config = text_config if isinstance(text_config, dict) else config
    if type(config.get("max_position_embeddings")) is not int:
        return None
    longest = max((each for each in positions(config) if each >= 1), default=None)
    return None if longest is None else int(min(longest, POSITIONS_MAX))


def without_code(value: Any) -> Any:
    """Return a JSON value without `CODE_KEYS` and private attributes, at any depth."""
    return _without(value, lambda key: key in CODE_KEYS or key.startswith("_"))


def without_paths(settings: Any) -> Any:
    """Return a tokenizer's settings without names of files, which may be outside of the model.

    transformers reads their `tokenizer_file`, `vocab` and others, if they are there, instead of the
    files of the folder. Parts are searched, too: `sp_model_kwargs` may name a `model_file`.
    """
    return _without(settings, lambda key: key in PATH_KEYS or key.endswith(PATH_SUFFIXES))


def data_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a model's extra files as data alone: settings name no code and no other files, of
    weights or of a tokenizer, and no adapter is among them. Those without such names keep their
    bytes.

    Loaders other than ours read the result: MLflow's imports what `auto_map` names without asking.

    Raises CorruptError for a configuration that is nested too deeply.
    """
    return {
        name: _data_file(name, body)
        for name, body in files.items()
        if name.casefold() != ADAPTER_CONFIG
    }


def _data_file(name: str, body: bytes) -> bytes:
    is_of_tokenizer = name.casefold() in (TOKENIZER_CONFIG, SPECIAL_TOKENS)
    if not (is_of_tokenizer or name.casefold().endswith(MODEL_CONFIG)):
        return body
    try:
        config = json.loads(body)  # as transformers parses it
        data = _without(without_code(config), {WEIGHTS_KEY, TASK_KEY}.__contains__)
        data = without_paths(data) if is_of_tokenizer else data
        return body if data == config else json.dumps(data, indent=2).encode()
    except RecursionError:
        raise CorruptError(f"{name} of the model is nested too deeply") from None
    except ValueError:
        return body  # no JSON: loaders refuse it


def _without(value: Any, is_dropped: Callable[[str], bool]) -> Any:
    """Return a JSON value without the keys that are dropped, at any depth."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if not is_dropped(key)}
        return {key: _without(one, is_dropped) for key, one in kept.items()}
    return [_without(one, is_dropped) for one in value] if isinstance(value, list) else value


def _is_size(key: str) -> bool:
    return key.startswith(PREFIXES) or key.endswith(SUFFIXES)


def _repeats(value: Any) -> int:
    """Return the length of the list that `[[["global", "local"], 12]]` stands for: 24.

    Repetitions of an empty list take time, too.
    """
    pairs = [pair for pair in value if isinstance(pair, list)] if isinstance(value, list) else []
    return sum(
        max(1, len(pair[0])) * max(0, pair[1])
        for pair in pairs
        if len(pair) > 1 and isinstance(pair[0], list | dict | str) and isinstance(pair[1], int)
    )
