import pytest
import torch

from storage.errors import ConfigError
from tests.trainer_cases import MODEL_CONFIG, base_weights
from trainer.engines.torch.hf_model import HfModel


def test_padding_on_the_right_changes_no_hidden_state() -> None:
    model = HfModel(MODEL_CONFIG, "cpu", activation_checkpointing=False)
    model.assign(base_weights())
    alone = model.hidden(torch.tensor([[3, 4, 5]]))
    padded = model.hidden(torch.tensor([[3, 4, 5, 0, 0], [6, 7, 8, 9, 10]]))
    assert torch.allclose(alone[0], padded[0, :3], atol=1e-6)
    assert not torch.allclose(alone[0, 2], alone[0, 1], atol=1e-2)


def test_an_untied_head_is_a_tensor_of_its_own() -> None:
    tied = HfModel(MODEL_CONFIG, "cpu", activation_checkpointing=False).tensors()
    untied = HfModel(
        MODEL_CONFIG | {"tie_word_embeddings": False}, "cpu", activation_checkpointing=False
    ).tensors()
    assert untied.keys() - tied.keys() == {"lm_head.weight"}


def test_the_config_of_a_bf16_model_still_gives_float32_masters() -> None:
    model = HfModel(MODEL_CONFIG | {"dtype": "bfloat16"}, "cpu", activation_checkpointing=False)
    assert {tensor.dtype for tensor in model.tensors().values()} == {torch.float32}


def test_a_model_that_caps_its_logits_is_refused() -> None:
    gemma = MODEL_CONFIG | {
        "model_type": "gemma2",
        "final_logit_softcapping": 0.01,
        "pad_token_id": 0,
    }
    with pytest.raises(ConfigError, match="models of type gemma2 change their logits"):
        HfModel(gemma, "cpu", activation_checkpointing=False)


def test_a_model_type_that_transformers_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="model_type nobody_knows_it"):
        HfModel(
            MODEL_CONFIG | {"model_type": "nobody_knows_it"}, "cpu", activation_checkpointing=False
        )
    with pytest.raises(ConfigError, match="model_type unnamed"):
        HfModel({}, "cpu", activation_checkpointing=False)


@pytest.mark.parametrize("wanted", [True, False])
def test_activations_are_computed_again_where_the_recipe_says_so(wanted: bool) -> None:
    model = HfModel(MODEL_CONFIG, "cpu", activation_checkpointing=wanted)
    assert model.model.is_gradient_checkpointing is wanted


def test_the_model_trains_with_the_dropout_of_its_config() -> None:
    model = HfModel(
        MODEL_CONFIG | {"attention_dropout": 0.5}, "cpu", activation_checkpointing=False
    )
    model.assign(base_weights())
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    assert not torch.equal(model.hidden(tokens), model.hidden(tokens))
