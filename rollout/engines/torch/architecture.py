"""The architecture of a decoder, read from its Hugging Face `config.json`.

Three families share one computation and differ in a few switches:

                 q/k norm   q, k, v bias      output bias
    qwen3        yes        attention_bias    attention_bias
    qwen2        no         yes               no
    llama        no         attention_bias    attention_bias

Any feature that `decoder.py` does not compute exactly is an error that names the key.
"""

from dataclasses import dataclass
from typing import Any

from storage.errors import ConfigError
from storage.records.types import Json

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and switches of a decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    """Key and value heads; each serves `heads / kv_heads` query heads."""
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope: Json
    """Hugging Face's `rope_parameters`: `rope_type`, `rope_theta`, and the keys of the type."""
    tied: bool
    """Whether the output projection is the embedding."""
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool


def read_architecture(config: Json) -> Architecture:
    """Read the architecture from the content of a `config.json`.

    Raises:
        ConfigError: the decoder would not compute the same numbers as the model's reference code.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"the torch engine does not implement model_type {family!r}; it runs "
            f"{', '.join(FAMILIES)}. Choose such a model, or another rollout.engine"
        )
    full = _with_defaults(config)
    _refuse(full, "hidden_act", full["hidden_act"] != "silu")
    _refuse(full, "mlp_bias", bool(full.get("mlp_bias")))
    _refuse(
        full, "layer_types", any(kind != "full_attention" for kind in full.get("layer_types") or ())
    )
    heads, kv_heads = full["num_attention_heads"], full["num_key_value_heads"]
    _refuse(full, "num_key_value_heads", kv_heads < 1 or heads % kv_heads != 0)
    bias = bool(full.get("attention_bias"))
    return Architecture(
        hidden=full["hidden_size"],
        layers=full["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=full.get("head_dim") or full["hidden_size"] // heads,
        intermediate=full["intermediate_size"],
        vocab=full["vocab_size"],
        max_positions=full["max_position_embeddings"],
        norm_eps=full["rms_norm_eps"],
        rope=dict(full["rope_parameters"]),
        tied=bool(full["tie_word_embeddings"]),
        qk_norm=family == "qwen3",
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
    )


def _with_defaults(config: Json) -> dict[str, Any]:
    """Complete a `config.json` by transformers: defaults of its family, one form of RoPE's keys."""
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.for_model(**config).to_dict())
    except Exception as error:  # transformers raises anything for a wrong value
        raise ConfigError(
            f"the model's config.json cannot be read: {type(error).__name__}: {error}; correct "
            "this value"
        ) from error


def _refuse(config: Json, key: str, condition: bool) -> None:
    if condition:
        raise ConfigError(
            f"the torch engine does not implement {key}={config[key]!r} of the model's "
            "config.json; choose another model or another rollout.engine"
        )
