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


def test_the_model_trains_with_the_dropout_of_its_config() -> None:
    model = opened(MODEL_CONFIG | {"attention_dropout": 0.5})
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    assert not torch.equal(model.hidden(tokens), model.hidden(tokens))


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
        ({"num_hidden_layers": 10**5}, "wants more than 1048 tensors"),
        ({"hidden_size": 2**62}, "whose sizes are absurd"),
        ({"hidden_size": 2**18}, "has other shapes for: model.embed_tokens.weight"),
        ({"intermediate_size": 2**30}, "has other shapes for: model.layers.0.mlp.down_proj"),
        ({"vocab_size": 2**33}, "has other shapes for: model.embed_tokens.weight"),
        ({"num_hidden_layers": 3}, "wants tensors that are not given: model.layers.2.input_lay"),
        ({"num_hidden_layers": 1}, "does not know: model.layers.1.input_layernorm"),
    ],
)
def test_sizes_beyond_the_weights_are_refused_before_memory_is_allocated(
    change: Json, message: str
) -> None:
    with pytest.raises(CorruptError, match=message):
        HfModel(MODEL_CONFIG | change, base_weights(), "cpu", False)
