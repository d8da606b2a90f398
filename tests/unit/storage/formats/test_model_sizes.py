from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from storage.errors import ConfigError
from storage.formats.model_sizes import ModelSizes

CONFIG = {
    "model_type": "qwen3", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model_that_transformers_builds(
    family: str, tied: bool
) -> None:
    config: dict[str, Any] = {**CONFIG, "model_type": family, "tie_word_embeddings": tied}
    if family == "qwen2":
        del config["head_dim"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert ModelSizes.of(config).parameters == model.num_parameters()


@pytest.mark.parametrize(("tied", "embeddings"), [(True, 3200), (False, 6400)])
def test_embeddings_are_one_matrix_or_two(tied: bool, embeddings: int) -> None:
    assert ModelSizes.of({**CONFIG, "tie_word_embeddings": tied}).embeddings == embeddings


def test_sizes_of_queries_keys_and_values_follow_the_heads() -> None:
    assert ModelSizes.of(CONFIG).query_elements == 4 * 16
    assert ModelSizes.of(CONFIG).kv_elements == 2 * 2 * 16
    plain = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    assert ModelSizes.of(plain).kv_elements == 2 * 4 * 16


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": None},
        {"num_hidden_layers": 10**400},
        {"num_key_value_heads": 1e308},
        {"vocab_size": -5},
        {"head_dim": 0},
        {"intermediate_size": True},
    ],
)
def test_a_configuration_of_another_kind_or_of_absurd_sizes_is_refused(
    change: dict[str, Any],
) -> None:
    (key,) = change
    with pytest.raises(ConfigError, match=rf"is not that of a decoder-only model: {key} is "):
        ModelSizes.of({**CONFIG, **change})
