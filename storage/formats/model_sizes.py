"""The sizes of a decoder-only model (Llama, Qwen2, Qwen3 and their kin), from its `config.json`."""

from dataclasses import dataclass

from storage.errors import ConfigError
from storage.plain_names import quoted
from storage.records.types import Json

SIZE_MAX = 2**31
"""Far beyond every model: larger sizes are typing errors."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What memory depends on. Qwen3-0.6B:

    ModelSizes(
        parameters=596_049_920, embeddings=155_582_464, vocab=151_936, hidden=1024, layers=28,
        intermediate=3072, query_elements=2048, kv_elements=2048,
    )
    """

    parameters: int
    """Weights, tied ones once."""
    embeddings: int = 0
    """Those of the embedding and of the output head, which may be one tensor."""
    vocab: int
    hidden: int
    layers: int
    intermediate: int = 0
    query_elements: int = 0
    """Elements of the queries of one token in one layer."""
    kv_elements: int
    """Elements of the keys and values of one token in one layer."""

    @classmethod
    def of(cls, config: Json) -> "ModelSizes":
        """Compute the sizes. ConfigError for a configuration of another kind of model."""
        hidden, layers, vocab, heads, intermediate = (
            _size(config, key)
            for key in (
                *("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"),
                "intermediate_size",
            )
        )
        kv_heads = _size(config, "num_key_value_heads", heads)
        head_dim = _size(config, "head_dim", hidden // heads)
        kind, tied = config.get("model_type"), bool(config.get("tie_word_embeddings"))
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        if kind == "qwen2":
            attention += head_dim * (heads + 2 * kv_heads)  # biases
        if kind == "qwen3":
            attention += 2 * head_dim  # norms of queries and keys
        per_layer = attention + 3 * hidden * intermediate + 2 * hidden
        embeddings = vocab * hidden * (1 if tied else 2)
        return cls(
            parameters=embeddings + layers * per_layer + hidden,
            embeddings=embeddings,
            vocab=vocab,
            hidden=hidden,
            layers=layers,
            intermediate=intermediate,
            query_elements=heads * head_dim,
            kv_elements=2 * kv_heads * head_dim,
        )

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Return the inputs and outputs of the linear layers of a block, by the last part of their
        names.
        """
        hidden, keys = self.hidden, self.kv_elements // 2
        return {
            "q_proj": (hidden, self.query_elements),
            "k_proj": (hidden, keys),
            "v_proj": (hidden, keys),
            "o_proj": (self.query_elements, hidden),
            "gate_proj": (hidden, self.intermediate),
            "up_proj": (hidden, self.intermediate),
            "down_proj": (self.intermediate, hidden),
        }


def _size(config: Json, key: str, otherwise: int | None = None) -> int:
    """Return a size of the model; `otherwise` where the key is absent or null."""
    value = otherwise if config.get(key) is None else config[key]
    if type(value) is not int or not 1 <= value <= SIZE_MAX:
        raise ConfigError(
            f"config.json is not that of a decoder-only model: {key} is {quoted(str(value))} and "
            f"not a whole number from 1 to {SIZE_MAX}"
        )
    return value
