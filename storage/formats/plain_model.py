"""Which configurations of models are plain: each of their keys is known, and what is made of it.

transformers makes a model of any `config.json` with code for each of its hundreds of types. What
its code for these few types does with these keys was read: nothing that takes long, or much memory,
beside sizes that `model_config.check_sizes` limits. Of others, a process with limits makes a model
first.
"""

from typing import Any, Final

from storage.records.types import Json

TYPES: Final = frozenset({"llama", "qwen2", "qwen3"})
_SCALARS = frozenset(
    (
        *("model_type", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act"),
        *("rms_norm_eps", "initializer_range", "tie_word_embeddings", "pretraining_tp"),
        *("attention_bias", "attention_dropout", "mlp_bias", "rope_theta"),
        *("use_sliding_window", "sliding_window", "max_window_layers", "pad_token_id"),
        *("bos_token_id", "_name_or_path", "output_attentions", "output_hidden_states"),
        *("return_dict", "is_encoder_decoder", "problem_type", "chunk_size_feed_forward"),
    )
)
_LISTS = frozenset({"architectures", "layer_types", "eos_token_id"})
_ROTATIONS = frozenset({"rope_parameters", "rope_scaling"})
_ROTATION_KEYS = frozenset(
    (
        *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"),
    )
)


def is_plain(config: Json) -> bool:
    """Return whether each key of a `config.json` is known, and has a value of its form."""
    model_type = config.get("model_type")
    return (
        isinstance(model_type, str)
        and model_type in TYPES
        and all(
            _is_scalar(value)
            if key in _SCALARS
            else _is_list(value)
            if key in _LISTS
            else key in _ROTATIONS and _is_rotation(value)
            for key, value in config.items()
        )
    )


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _is_list(value: Any) -> bool:
    return _is_scalar(value) or (isinstance(value, list) and all(map(_is_scalar, value)))


def _is_rotation(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() <= _ROTATION_KEYS
        and all(map(_is_scalar, value.values()))
    )
