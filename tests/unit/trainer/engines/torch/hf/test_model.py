import numpy as np
import pytest
import torch

from storage.errors import ConfigError
from tests.support.models.trainer_cases import MODEL_CONFIG, base_weights, opened
from trainer.engines.step.packing import PackedRow, pack
from trainer.engines.torch.hf.model import HfModel


def test_padding_on_the_right_changes_no_hidden_state() -> None:
    model = opened()
    alone = model.hidden(torch.tensor([[3, 4, 5]]))
    padded = model.hidden(torch.tensor([[3, 4, 5, 0, 0], [6, 7, 8, 9, 10]]))
    assert torch.allclose(alone[0], padded[0, :3], atol=1e-6)
    assert not torch.allclose(alone[0, 2], alone[0, 1], atol=1e-2)


def test_the_rotations_of_a_dynamic_context_begin_as_those_of_a_short_one() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    model = opened(MODEL_CONFIG | {"rope_parameters": rope})
    plain = opened(MODEL_CONFIG | {"rope_parameters": {**rope, "rope_type": "default"}})
    tokens = torch.arange(60)[None] % 24
    assert torch.equal(model.hidden(tokens), plain.hidden(tokens))


@pytest.mark.parametrize("error", [ValueError("by 4"), KeyError("x"), TypeError(), IndexError()])
def test_a_value_that_is_wrong_for_rows_of_some_lengths_is_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`chunk_size_feed_forward: 4` of a BERT divides the rows with which it is tried."""
    model = opened()

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(model, "body", fail)
    with pytest.raises(
        ConfigError, match=rf"gives no causal language model: {type(error).__name__}"
    ):
        model.hidden(torch.arange(5)[None])


def test_the_context_of_a_configuration_without_it_is_that_of_its_class() -> None:
    gpt2 = {"model_type": "gpt2", "vocab_size": 24, "n_embd": 16, "n_layer": 1, "n_head": 2}
    assert opened(gpt2 | {"n_positions": 32}).positions == 32
    assert opened(gpt2).positions == 1024
    assert opened().positions == 64


def test_an_untied_head_is_a_separate_tensor() -> None:
    untied = opened(MODEL_CONFIG | {"tie_word_embeddings": False})
    assert untied.tensors().keys() - opened().tensors().keys() == {"lm_head.weight"}


def test_a_model_with_logit_soft_capping_is_refused() -> None:
    gemma = MODEL_CONFIG | {
        "model_type": "gemma2",
        "final_logit_softcapping": 0.01,
        "pad_token_id": 0,
    }
    with pytest.raises(ConfigError, match="models of type gemma2 change their logits"):
        opened(gemma)


@pytest.mark.parametrize("wanted", [True, False])
def test_activations_are_recomputed_if_the_recipe_asks_for_it(wanted: bool) -> None:
    assert opened(checkpointing=wanted).model.is_gradient_checkpointing is wanted


@pytest.mark.parametrize("device", ["warp9", "", "meta", "mps", "cuda:77", "privateuseone:1"])
def test_a_device_that_cannot_be_used_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=f"train.device '{device}' cannot be used here"):
        HfModel(MODEL_CONFIG, base_weights(), device, False)


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


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_the_tables_and_the_output_head(tied: bool) -> None:
    model = opened(MODEL_CONFIG | {"tie_word_embeddings": tied})
    found = {id(tensor) for tensor in model.embeddings()}
    names = {name for name, tensor in model.parameters().items() if id(tensor) in found}
    assert names == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})


def example(tokens: list[int], temperature: float) -> PackedRow:
    mask = np.arange(len(tokens)) > 0
    return PackedRow(
        tokens=np.array(tokens, np.int32), loss_mask=mask, behaviour=np.zeros(len(tokens), np.float32),
        advantages=np.zeros(len(tokens), np.float32), temperature=temperature, weight=1.0,
        region=np.zeros(len(tokens), np.int64),
    )  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_packed_rows_have_the_logprobs_of_one_row_at_a_time(family: str, attention: str) -> None:
    model = opened(MODEL_CONFIG | {"model_type": family}, attention=attention, packed=True)
    assert model.model.config._attn_implementation == attention
    draw = np.random.default_rng(0)
    lengths, temperatures = (7, 1, 12, 2), (1.0, 1.0, 0.7, 1.3)
    rows = [
        example(draw.integers(0, 24, length).tolist(), temperature)
        for length, temperature in zip(lengths, temperatures, strict=True)
    ]

    def logprobs(rows: list[PackedRow], packed: bool) -> torch.Tensor:
        block = pack(rows, packed)
        positions = block.positions_BT
        values, _ = model.logprobs(
            *map(
                torch.from_numpy,
                (block.tokens_BT, block.source_N, block.target_N, block.temperature_N),
            ),
            None if positions is None else torch.from_numpy(positions),
        )
        return values.detach()

    alone = torch.cat([logprobs([row], packed=False) for row in rows if len(row.tokens) > 1])
    assert len(alone) == 6 + 11 + 1
    assert torch.allclose(logprobs(rows, packed=True), alone, rtol=0, atol=1e-5)
    assert torch.allclose(logprobs(rows, packed=False), alone, rtol=0, atol=1e-5)


def test_a_model_whose_packed_rows_see_each_other_is_refused() -> None:
    falcon = {
        "model_type": "falcon", "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "alibi": True,
    }  # fmt: skip
    opened(falcon)  # whose mask does not depend on positions
    with pytest.raises(ConfigError, match=r"packed cannot be used with models of type falcon"):
        opened(falcon, packed=True)


def test_flash_attention_that_is_not_installed_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"train.attention: flash_attention_2 needs .* sdpa"):
        opened(attention="flash_attention_2")


def test_an_attention_that_a_model_does_not_support_is_refused_with_a_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"train.attention: nothing cannot be used with .* qwen3.* sdpa"
    ):
        opened(attention="nothing")
