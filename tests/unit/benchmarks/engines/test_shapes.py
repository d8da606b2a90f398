import numpy as np
import pytest

from benchmarks.engines.shapes import (
    SHAPES,
    changed,
    forward_flops,
    peak_flops,
    random_weights,
    tensor_shapes,
)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [("0.6b", 596_049_920), ("1.7b", 1_720_574_976), ("8b", 8_190_735_360)],
)
def test_the_shapes_are_those_of_qwen3(shape: str, parameters: int) -> None:
    assert SHAPES[shape].sizes.parameters == parameters


def test_random_weights_have_all_parameters_of_the_model() -> None:
    shape = SHAPES["tiny"]
    weights = random_weights(tensor_shapes(shape.config), seed=0)
    assert sum(tensor.bits.size for tensor in weights.values()) == shape.sizes.parameters
    norm = weights["model.norm.weight"]
    assert set(norm.bits.tolist()) == {0x3F80}  # 1.0
    matrix = weights["model.layers.0.mlp.down_proj.weight"].bits.astype(np.uint32) << 16
    assert matrix.view(np.float32).std() == pytest.approx(0.02, rel=0.05)
    again = random_weights(tensor_shapes(shape.config), seed=1)
    assert (
        again["model.embed_tokens.weight"].bits != weights["model.embed_tokens.weight"].bits
    ).any()


def test_a_version_changes_the_given_share_of_the_weights_by_one_bit() -> None:
    before = random_weights({"matrix": (400, 500), "norm": (3,)}, seed=0)
    after = changed(before, 0.01, seed=0)
    differs = before["matrix"].bits != after["matrix"].bits
    assert 0.0095 < differs.mean() <= 0.01  # a position may be drawn twice
    assert set((before["matrix"].bits ^ after["matrix"].bits)[differs].tolist()) == {1}
    assert (before["norm"].bits != after["norm"].bits).sum() == 1


def test_the_flops_of_a_forward_pass_are_those_computed_by_hand() -> None:
    # One layer: q and o 8·8 each, k and v 8·4 each, gate, up and down 8·16 each, norms 2·8 + 2·4;
    # the last norm 8. Together 608 weights; the embedding of 10·8 is also the head.
    config = {
        "model_type": "qwen3", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 16,
        "tie_word_embeddings": True,
    }  # fmt: skip
    products = 2 * (8 * 608 + 4 * 80)
    attention = 2 * 1 * 8 * (3**2 + 5**2)
    assert forward_flops(config, [3, 5], head_tokens=4) == products + attention
    untied = config | {"tie_word_embeddings": False}
    assert forward_flops(untied, [3, 5], head_tokens=4) == products + attention


def test_the_peak_of_a_device_is_found_by_its_name() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA GeForce RTX 3090") is None
