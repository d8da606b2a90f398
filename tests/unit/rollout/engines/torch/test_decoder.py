"""The decoder against transformers' own models, on random weights."""

import re

import numpy as np
import pytest
import torch

from rollout.engines.torch import architecture as architectures
from rollout.engines.torch import decoder_weights
from rollout.engines.torch.architecture import read_architecture
from rollout.engines.torch.decoder import Decoder
from rollout.engines.torch.decoder_weights import fuse, parameter_shapes
from rollout.engines.torch.kv_cache import KVCache
from rollout.engines.torch.rope import inverse_frequencies
from storage.errors import ConfigError
from storage.records.types import Json
from storage.records.weights import HostTensor
from tests.support.models.random_models import QWEN3, SIZES, host_tensors, random_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, Json] = {
    "qwen3 tied": QWEN3,
    "qwen3 untied with biases": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        **SIZES,
    },
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen2 in an old config's spelling": {
        "model_type": "qwen2",
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        **SIZES,
    },
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5, **SIZES},
    "llama with llama3 rope and biases": {
        "model_type": "llama",
        "rope_parameters": LLAMA3,
        "attention_bias": True,
        **SIZES,
    },
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_equal_those_of_transformers_over_ragged_decode_steps_after_a_padded_prefill(
    config: Json,
) -> None:
    model = random_model(config)
    architecture = read_architecture(config)
    weights = fuse(architecture, host_tensors(model), CPU, torch.float32)
    decoder = Decoder(architecture, 64, CPU, torch.float32)
    cache = KVCache(architecture, slots=5, max_tokens=64, device=CPU, dtype=torch.float32)
    texts = torch.randint(0, 61, (4, 64))
    lengths = torch.tensor([3, 17, 9, 1])

    with torch.inference_mode():
        expected = model(texts).logits
        keys, values = decoder.prefill(weights, texts[:, :17])
        for prompt, length in enumerate(lengths.tolist()):
            cache.fill(prompt, keys[:, prompt, :, :length], values[:, prompt, :, :length])
        for step in range(40):
            positions = lengths + step
            tokens = texts[torch.arange(4), positions]
            logits = decoder.decode(weights, cache, tokens, positions, longest=17 + step + 1)
            torch.testing.assert_close(
                logits, expected[torch.arange(4), positions], atol=1e-4, rtol=1e-4
            )


def test_a_moved_sequence_continues_unchanged() -> None:
    config = CONFIGS["qwen3 tied"]
    model = random_model(config)
    architecture = read_architecture(config)
    weights = fuse(architecture, host_tensors(model), CPU, torch.float32)
    decoder = Decoder(architecture, 16, CPU, torch.float32)
    cache = KVCache(architecture, slots=3, max_tokens=16, device=CPU, dtype=torch.float32)
    text = torch.randint(0, 61, (1, 8))

    with torch.inference_mode():
        keys, values = decoder.prefill(weights, text[:, :7])
        cache.fill(2, keys[:, 0], values[:, 0])
        cache.move([2], [0], length=7)
        logits = decoder.decode(weights, cache, text[:, 7], torch.tensor([7]), longest=8)
        torch.testing.assert_close(logits[0], model(text).logits[0, 7], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma3_text"}, "gemma3_text"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias=True"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_attention",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
        (
            {"model_type": "qwen2", "head_dim": None, "hidden_size": 4, "num_attention_heads": 4},
            "head_dim=None",
        ),
    ],
)
def test_unsupported_model_features_are_refused_by_name(change: Json, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_architecture({"model_type": "qwen3", "head_dim": 16, **SIZES, **change})


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ],
)
def test_an_unsupported_rope_scaling_is_refused_by_name(rope: Json) -> None:
    architecture = read_architecture({"model_type": "llama", **SIZES, "rope_parameters": rope})
    with pytest.raises(ConfigError, match=r"yarn|partial_rotary_factor"):
        Decoder(architecture, 16, CPU, torch.float32)


@pytest.mark.parametrize("theta", ["x", 0, -1.0, float("inf"), True, None])
def test_a_rope_setting_that_is_no_positive_number_is_named(theta: object) -> None:
    with pytest.raises(ConfigError, match="rope_theta of rope_parameters in the model's config"):
        inverse_frequencies({"rope_type": "default", "rope_theta": theta}, 16)


@pytest.mark.parametrize("name", [name for name in LLAMA3 if name != "rope_type"])
def test_rope_settings_are_numbers_of_any_size(name: str) -> None:
    large = inverse_frequencies({**LLAMA3, name: 10**30}, 16)
    assert torch.equal(large, inverse_frequencies({**LLAMA3, name: 1e30}, 16))
    with pytest.raises(ConfigError, match=f"the {name} of rope_parameters"):
        inverse_frequencies({**LLAMA3, name: 10**400}, 16)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 1e-300},
        {"rope_type": "default", "rope_theta": 1e-300},
        {**LLAMA3, "factor": 1e-300},
    ],
)
def test_rotations_that_are_not_finite_are_refused(rope: Json) -> None:
    with pytest.raises(ConfigError, match=r"config\.json give angles that are not finite"):
        inverse_frequencies(rope, 16)


def test_a_rope_type_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not implement the rope scaling"):
        inverse_frequencies({**LLAMA3, "rope_type": []}, 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "32"}, "Field 'hidden_size' expected int, got str"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "KeyError: .*factor"),
        ({"dtype": "foo"}, "AttributeError: module 'torch' has no attribute 'foo'"),
        ({"layer_types": ["foo"]}, "layer_types"),
    ],
)
def test_a_wrong_value_of_a_config_is_named(change: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=r"the model's config\.json cannot be read: ") as refused:
        read_architecture({"model_type": "qwen3", "head_dim": 16, **SIZES, **change})
    assert re.search(words, str(refused.value))


def test_a_config_that_is_not_plain_is_read_in_a_process_with_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_here: list[Json] = []
    monkeypatch.setattr(
        architectures, "completed", lambda config: read_here.append(config) or config
    )
    labels = {"model_type": "qwen3", "head_dim": 16, **SIZES, "num_labels": 3}
    assert read_architecture(labels).head_dim == 16
    with pytest.raises(ConfigError, match="Field 'hidden_size' expected int, got str"):
        read_architecture(labels | {"hidden_size": "32"})
    monkeypatch.setattr(architectures, "CONFIG_CPU_S", 3.0)
    with pytest.raises(
        ConfigError,
        match=r"config\.json cannot be read within 3 s of CPU time and 2,048 MiB: it used up",
    ):
        read_architecture(labels | {"num_labels": 50_000_000})
    assert read_here == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "key",
    [
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
        *("rms_norm_eps", "rope_parameters", "layer_types", "hidden_act", "attention_bias"),
        *("tie_word_embeddings", "mlp_bias"),
    ],
)
@pytest.mark.parametrize(
    "value",
    [0, -1, 1.5, float("nan"), float("inf"), True, None, "x", [], [1], {}, {"a": 1}, 1000],
)
def test_any_value_gives_an_architecture_or_a_known_error(
    family: str, key: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in this process, since each new one takes seconds to start."""
    monkeypatch.setattr(architectures, "_completed_in_process", architectures.completed)
    config = {"model_type": family, "head_dim": 16, **SIZES, key: value}
    try:
        architecture = read_architecture(config)
    except ConfigError:
        return
    assert architecture.heads % architecture.kv_heads == 0
    sizes = parameter_shapes(architecture).values()
    assert all(type(size) is int and size > 0 for shape in sizes for size in shape)
    assert architecture.max_positions > 0
    assert 0 <= architecture.norm_eps < 1


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_attention_heads": 0, "num_key_value_heads": 1, "head_dim": None}, "num_attention_h"),
        ({"num_attention_heads": -2, "num_key_value_heads": -1}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": {"a": 1}}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)
def test_a_size_that_is_none_is_named(change: Json, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}.* in the model's config\.json must be "):
        read_architecture({"model_type": "qwen2", **SIZES, **change})


def test_more_layers_than_tensors_are_refused_before_their_names_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The names of 150,000 layers, as many as a vocabulary has tokens, take 370 MB."""

    def names(*_: object) -> None:
        raise AssertionError("the names of all layers are made")

    monkeypatch.setattr(decoder_weights, "parameter_shapes", names)
    tensors = host_tensors(random_model(QWEN3))
    config = {**QWEN3, "num_hidden_layers": len(tensors) + 1, "layer_types": None}
    with pytest.raises(ConfigError, match=rf"requires {len(tensors) + 1} layers; the weights have"):
        fuse(read_architecture(config), tensors, CPU, torch.float32)


def test_weights_that_do_not_fit_the_model_are_refused_by_name() -> None:
    config = CONFIGS["qwen2"]
    architecture = read_architecture(config)
    tensors = host_tensors(random_model(config))
    name = "model.layers.1.self_attn.k_proj.bias"

    with pytest.raises(ConfigError, match=f"weights lack {name}"):
        fuse(
            architecture,
            {key: tensor for key, tensor in tensors.items() if key != name},
            CPU,
            torch.float32,
        )
    with pytest.raises(ConfigError, match=r"weights hold model\.extra"):
        fuse(architecture, {**tensors, "model.extra": tensors[name]}, CPU, torch.float32)
    wrong = tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(
        ConfigError, match=r"k_proj\.bias has shape \(16, 32\); .* requires \(16,\)"
    ):
        fuse(architecture, {**tensors, name: wrong}, CPU, torch.float32)


def test_bf16_and_fp16_bit_patterns_are_read_exactly() -> None:
    """1.5 is 0x3FC0 in bf16 and 0x3E00 in fp16; −2 is 0xC000 in both."""
    config = CONFIGS["qwen2"]
    tensors = host_tensors(random_model(config))
    name = "model.norm.weight"
    for dtype, bits in (("BF16", (0x3FC0, 0xC000)), ("F16", (0x3E00, 0xC000))):
        tensors[name] = HostTensor(dtype, (32,), np.array(bits * 16, dtype=np.uint16))
        weights = fuse(read_architecture(config), tensors, CPU, torch.float32)
        assert weights.norm.tolist() == [1.5, -2.0] * 16
