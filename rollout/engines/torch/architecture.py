"""The architecture of a decoder, read from its Hugging Face `config.json`.

Three families share one computation and differ in a few switches:

                 q/k norm   q, k, v bias      output bias
    qwen3        yes        attention_bias    attention_bias
    qwen2        no         yes               no
    llama        no         attention_bias    attention_bias

Any feature that `decoder.py` does not compute exactly is an error that names the key.
"""

from dataclasses import dataclass
from typing import Final

from storage.errors import ConfigError
from storage.formats.plain_model import is_plain
from storage.machine.child_limits import MEMORY_BYTES_MAX
from storage.machine.kept_process import answered, result
from storage.machine.limited_process import ProcessDiedError, ProcessTimeoutError
from storage.machine.transformers_import import light_imports
from storage.records.types import Json

FAMILIES = ("llama", "qwen2", "qwen3")
VALUE_CHARS_SHOWN = 80
CONFIG_CHILD: Final = "rollout.engines.torch.config_child"
CONFIG_CPU_S: Final = 30.0
"""CPU seconds in which a configuration is read. Common ones take a millisecond."""


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
    full = completed(config) if is_plain(config) else _completed_in_process(config)
    _refuse(full, "hidden_act", full.get("hidden_act") != "silu")
    _refuse(full, "mlp_bias", bool(full.get("mlp_bias")))
    kinds = full.get("layer_types") or []
    _refuse(
        full,
        "layer_types",
        not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds),
    )
    hidden = _size(full, "hidden_size")
    heads, kv_heads = _size(full, "num_attention_heads"), _size(full, "num_key_value_heads")
    _refuse(full, "num_key_value_heads", heads % kv_heads != 0)
    head_dim = hidden // heads if full.get("head_dim") is None else _size(full, "head_dim")
    _refuse(full, "head_dim", head_dim < 2 or head_dim % 2 != 0)  # rotated by pairs
    norm_eps, rope = full.get("rms_norm_eps"), full.get("rope_parameters")
    if type(norm_eps) is not float or not 0 <= norm_eps < 1:
        raise _wrong("rms_norm_eps", norm_eps, "a number from 0 to 1")
    if not isinstance(rope, dict):
        raise _wrong("rope_parameters", rope, "an object")
    bias = bool(full.get("attention_bias"))
    return Architecture(
        hidden=hidden,
        layers=_size(full, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_size(full, "intermediate_size"),
        vocab=_size(full, "vocab_size"),
        max_positions=_size(full, "max_position_embeddings"),
        norm_eps=norm_eps,
        rope=rope,
        tied=bool(full.get("tie_word_embeddings")),
        qk_norm=family == "qwen3",
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
    )


def _completed_in_process(config: Json) -> Json:
    """Call `completed` in a child process with limits."""
    from rollout.engines.torch.config_child import ERRORS

    try:
        answer = answered(CONFIG_CHILD, {"config": config, "cpu_s": CONFIG_CPU_S})
    except (ProcessTimeoutError, ProcessDiedError) as error:
        raise ConfigError(
            f"the model's config.json cannot be read within {CONFIG_CPU_S:g} s of CPU time and "
            f"{MEMORY_BYTES_MAX >> 20:,} MiB: {error}; correct it"
        ) from error
    return dict(result(answer, ERRORS))


def completed(config: Json) -> Json:
    """Complete a `config.json` by transformers: defaults of its family, one form of RoPE's keys."""
    import transformers.utils

    try:
        with light_imports(transformers.utils):
            from transformers import AutoConfig

            return dict(AutoConfig.for_model(**config).to_dict())
    except Exception as error:  # transformers raises anything for a wrong value
        raise ConfigError(
            f"the model's config.json cannot be read: {type(error).__name__}: {error}; correct "
            "this value"
        ) from error


def _size(config: Json, key: str) -> int:
    """Return a size of the model; ConfigError unless it is a whole number above 0."""
    size = config.get(key)
    if type(size) is not int or size < 1:
        raise _wrong(key, size, "a whole number above 0")
    return size


def _wrong(key: str, value: object, right: str) -> ConfigError:
    shown = str(value)[:VALUE_CHARS_SHOWN]
    return ConfigError(
        f"{key} in the model's config.json must be {right}, not {shown!r}; correct it"
    )


def _refuse(config: Json, key: str, condition: bool) -> None:
    if condition:
        shown = repr(config.get(key))[:VALUE_CHARS_SHOWN]
        raise ConfigError(
            f"the torch engine does not implement {key}={shown} of the model's "
            "config.json; choose another model or another rollout.engine"
        )
