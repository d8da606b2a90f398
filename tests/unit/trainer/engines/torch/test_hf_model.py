import numpy as np
import pytest
import torch

from storage.errors import ConfigError, CorruptError
from storage.records.types import Json
from tests.support.models.trainer_cases import MODEL_CONFIG, base_weights
from trainer.engines.torch.hf_model import HfModel


def opened(config: Json = MODEL_CONFIG, checkpointing: bool = False) -> HfModel:
    """The model of `config` with random weights."""
    return HfModel(config, base_weights(config=config), "cpu", checkpointing)


def test_padding_on_the_right_changes_no_hidden_state() -> None:
    model = opened()
    alone = model.hidden(torch.tensor([[3, 4, 5]]))
    padded = model.hidden(torch.tensor([[3, 4, 5, 0, 0], [6, 7, 8, 9, 10]]))
    assert torch.allclose(alone[0], padded[0, :3], atol=1e-6)
    assert not torch.allclose(alone[0, 2], alone[0, 1], atol=1e-2)


def test_an_untied_head_is_a_separate_tensor() -> None:
    untied = opened(MODEL_CONFIG | {"tie_word_embeddings": False})
    assert untied.tensors().keys() - opened().tensors().keys() == {"lm_head.weight"}


def test_the_config_of_a_bf16_model_still_gives_float32_masters() -> None:
    model = opened(MODEL_CONFIG | {"dtype": "bfloat16"})
    assert {tensor.dtype for tensor in model.tensors().values()} == {torch.float32}


def test_a_model_with_logit_soft_capping_is_refused() -> None:
    gemma = MODEL_CONFIG | {
        "model_type": "gemma2",
        "final_logit_softcapping": 0.01,
        "pad_token_id": 0,
    }
    with pytest.raises(ConfigError, match="models of type gemma2 change their logits"):
        opened(gemma)


def test_a_model_type_that_transformers_lacks_is_named() -> None:
    unknown = MODEL_CONFIG | {"model_type": "nobody_knows_it"}
    with pytest.raises(ConfigError, match="model_type nobody_knows_it"):
        HfModel(unknown, base_weights(), "cpu", False)
    with pytest.raises(ConfigError, match="model_type unnamed"):
        HfModel({}, base_weights(), "cpu", False)


@pytest.mark.parametrize("wanted", [True, False])
def test_activations_are_recomputed_if_the_recipe_asks_for_it(wanted: bool) -> None:
    assert opened(checkpointing=wanted).model.is_gradient_checkpointing is wanted


def test_the_dropout_of_a_config_is_switched_off_everywhere() -> None:
    gpt2 = {
        "model_type": "gpt2", "vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2,
        "n_positions": 64,
    }  # fmt: skip
    qwen3 = MODEL_CONFIG | {"attention_dropout": 0.5}
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    for config in (gpt2, qwen3):  # GPT-2 has a dropout of 0.1 by default, in modules of their own
        model = opened(config)
        assert model.model.training
        assert torch.equal(model.hidden(tokens), model.hidden(tokens))


@pytest.mark.parametrize("device", ["warp9", "", "meta", "mps", "cuda:77"])
def test_a_device_that_cannot_be_used_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=f"train.device '{device}' cannot be used here"):
        HfModel(MODEL_CONFIG, base_weights(), device, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "16"}, "hidden_size"),
        ({"rms_norm_eps": "a"}, "rms_norm_eps"),
        ({"hidden_act": "nope"}, "nope"),
        ({"initializer_range": float("nan")}, "RuntimeError: normal"),
        ({"pad_token_id": 10**6}, "AssertionError: "),
        ({"rope_parameters": [1]}, "gives no causal language model"),
        ({"num_attention_heads": 0}, "gives no causal language model"),
    ],
)
def test_a_wrong_value_of_a_config_is_named(change: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HfModel(MODEL_CONFIG | change, base_weights(), "cpu", False)


def test_a_scale_of_the_logits_is_found_with_the_given_weights() -> None:
    """The random weights of a small `initializer_range` have logits near 0, scaled or not."""
    scaled = MODEL_CONFIG | {
        "model_type": "granite", "logits_scaling": 8.0, "initializer_range": 1e-6,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="models of type granite change their logits"):
        opened(scaled)


def test_masters_are_the_given_weights_rounded_to_float32() -> None:
    weights = base_weights()
    masters = opened().tensors()
    assert masters.keys() == weights.keys()
    for name, master in masters.items():
        bits = weights[name].bits.reshape(weights[name].shape).astype(np.uint32) << 16
        assert master.detach().numpy().view(np.uint32).tolist() == bits.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**5}, "needs more than 1048 tensors"),
        ({"hidden_size": 2**62}, "whose sizes are absurd"),
        ({"hidden_size": 2**18}, "has other shapes for: model.embed_tokens.weight"),
        ({"intermediate_size": 2**30}, "has other shapes for: model.layers.0.mlp.down_proj"),
        ({"vocab_size": 2**33}, "has other shapes for: model.embed_tokens.weight"),
        ({"num_hidden_layers": 3}, "needs tensors that are not given: model.layers.2.input_lay"),
        ({"num_hidden_layers": 1}, "has no place for: model.layers.1.input_layernorm"),
    ],
)
def test_sizes_beyond_the_weights_are_refused_before_memory_is_allocated(
    change: Json, message: str
) -> None:
    with pytest.raises(CorruptError, match=message):
        HfModel(MODEL_CONFIG | change, base_weights(), "cpu", False)
