from typing import Any

import pytest

from storage.formats.plain_model import is_plain
from tasks.base_models.config import TinyBase
from tasks.base_models.tiny import model_config

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": [151645, 151643], "hidden_act": "silu", "hidden_size": 896,
    "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip


@pytest.mark.parametrize("config", [QWEN2, LLAMA3, model_config(TinyBase())])
def test_models_that_are_in_use_are_plain(config: dict[str, Any]) -> None:
    assert is_plain(config)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"num_labels": 3},
        {"id2label": {}},
        {"auto_map": {}},
        {"text_config": {}},
        {"hidden_size": [1]},
        {"hidden_size": {"a": 1}},
        {"layer_types": [["full_attention"]]},
        {"layer_types": {"a": 1}},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}},
        {"rope_parameters": {"rope_type": "default", "factor": [1.0]}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
    ],
)
def test_a_model_with_a_key_or_a_value_of_another_form_is_not_plain(
    change: dict[str, Any],
) -> None:
    assert not is_plain(QWEN2 | change)
    assert not is_plain(LLAMA3 | change)


def test_a_model_without_a_type_is_not_plain() -> None:
    assert not is_plain({})
