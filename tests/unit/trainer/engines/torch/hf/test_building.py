"""What the trainer makes of a model's untrusted config.json."""

import errno

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from storage.errors import ConfigError, CorruptError
from storage.records.types import Json
from tests.support.models.trainer_cases import MODEL_CONFIG, base_weights, opened
from tests.support.recorded import first_arguments
from trainer.engines.torch.hf import building
from trainer.engines.torch.hf.model import HfModel
from trainer.engines.torch.host_tensors import to_host

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4, "long_factor": [1.0] * 3,
}  # fmt: skip
"""Wrong for tokens after the 32nd only: a head of 8 columns has four angles."""


def test_the_config_of_a_bf16_model_still_gives_float32_masters() -> None:
    model = opened(MODEL_CONFIG | {"dtype": "bfloat16"})
    assert {tensor.dtype for tensor in model.tensors().values()} == {torch.float32}


def test_a_model_type_that_transformers_lacks_is_named() -> None:
    unknown = MODEL_CONFIG | {"model_type": "nobody_knows_it"}
    with pytest.raises(ConfigError, match="model_type nobody_knows_it"):
        HfModel(unknown, base_weights(), "cpu", False)
    with pytest.raises(ConfigError, match="model_type unnamed"):
        HfModel({}, base_weights(), "cpu", False)


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
        ({"layer_types": ["linear_attention"] * 2}, "KeyError: 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 2}, "ValueError: .*sliding_window"),
        ({"text_encoder": {}}, "AttributeError: .*vocab_size"),
        ({"rope_parameters": LONGROPE}, "RuntimeError: .*size of tensor"),
        ({"rope_parameters": LONGROPE | {"factor": 1e9}}, "RuntimeError: .*size of tensor"),
        ({"rope_parameters": LONGROPE, "x": {"factor": float("nan")}}, "RuntimeError: .*size of"),
        (
            {"rope_parameters": LONGROPE, "max_position_embeddings": 2**31 + 1},
            "RuntimeError: .*size of tensor",
        ),
    ],
)
def test_a_wrong_value_of_a_config_is_named(change: Json, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HfModel(MODEL_CONFIG | change, base_weights(), "cpu", False)


def test_the_last_positions_without_their_number_are_those_of_the_class() -> None:
    config = {key: each for key, each in MODEL_CONFIG.items() if key != "max_position_embeddings"}
    with pytest.raises(ConfigError, match=r"RuntimeError: .*size of tensor"):
        HfModel(config | {"rope_parameters": LONGROPE}, base_weights(), "cpu", False)


@pytest.mark.parametrize("key", ["hidden_act", "model_type"])
def test_a_value_with_the_words_of_a_full_memory_is_named(key: str) -> None:
    """torch says them where memory is full, which no file causes."""
    with pytest.raises(ConfigError, match=r"gives no causal language model: .*can't allocate mem"):
        HfModel(MODEL_CONFIG | {key: "can't allocate memory"}, base_weights(), "cpu", False)


def test_a_configuration_of_another_kind_of_model_is_not_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("the configuration is built")

    monkeypatch.setattr(AutoConfig, "for_model", build)
    for other in ("encoder-decoder", "efficientloftr", ["qwen3"], None):
        with pytest.raises(ConfigError, match=r"no causal language model: (Value|Type)Error: "):
            HfModel(MODEL_CONFIG | {"model_type": other}, base_weights(), "cpu", False)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("no such model"), ConfigError),
        (OSError(errno.EIO, "Input/output error"), OSError),
        (MemoryError(), MemoryError),
        (RuntimeError("you can't allocate memory"), RuntimeError),
        (torch.OutOfMemoryError(), torch.OutOfMemoryError),
        (KeyError("can't allocate memory"), ConfigError),
    ],
)
@pytest.mark.parametrize("method", ["_build", "set_attn_implementation", "checkpointing"])
def test_an_error_of_the_machine_is_no_wrong_value(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, kind: type[Exception]
) -> None:
    """The first kind may not come again in a restarted trainer."""

    def fail(*_: object, **__: object) -> None:
        raise error

    if method == "_build":
        monkeypatch.setattr(AutoConfig, "for_model", fail)
    else:
        name = method.replace("checkpointing", "gradient_checkpointing_enable")
        monkeypatch.setattr(PreTrainedModel, name, fail)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - its type is compared
        opened(checkpointing=True)
    assert raised.type is kind


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


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_tables_far_larger_than_the_weights_are_refused_before_memory_is_allocated() -> None:
    positions = 20_000
    config: Json = {
        "model_type": "gpt_bigcode", "vocab_size": 16, "n_positions": positions, "n_embd": 2,
        "n_layer": 1, "n_head": 1, "n_inner": 2, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    weights = {
        name: to_host(torch.zeros(parameter.shape), "BF16")
        for name, parameter in model.named_parameters()
    }
    with pytest.raises(CorruptError, match=f"tables of {positions**2} bytes that the model"):
        HfModel(config, weights, "cpu", False)


@pytest.mark.parametrize("positions", [0, -1])
def test_a_value_that_is_read_for_long_rows_only_is_named(positions: int) -> None:
    rotations = LONGROPE | {"original_max_position_embeddings": 300}
    change = {"rope_parameters": rotations, "max_position_embeddings": positions}
    model = HfModel(MODEL_CONFIG | change, base_weights(), "cpu", False)
    model.hidden(torch.full((1, 300), 3))
    with pytest.raises(ConfigError, match="RuntimeError: The size of tensor a"):
        model.hidden(torch.full((1, 301), 3))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: device-side assert"), RuntimeError("can't allocate memory"),
     RecursionError("shape "), MemoryError("shape ")],
)  # fmt: skip
def test_a_broken_machine_is_no_wrong_value_of_a_config(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise error

    model = opened(MODEL_CONFIG)
    monkeypatch.setattr(model, "body", broken)
    with pytest.raises(type(error)) as raised:
        model.hidden(torch.tensor([[3, 4]]))
    assert raised.value is error


def test_a_config_json_selects_no_kernel_of_the_hub() -> None:
    model = opened(MODEL_CONFIG | {"experts_implementation": "sonicmoe"})
    assert model.model.config._experts_implementation != "sonicmoe"


def test_random_changes_of_the_hidden_states_in_training_are_switched_off() -> None:
    dbrx = {
        "model_type": "dbrx", "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64,
        "vocab_size": 24, "pad_token_id": 0,
        "ffn_config": {
            "ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 16,
            "moe_jitter_eps": 0.5,
        },
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    }  # fmt: skip
    model = opened(dbrx)
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    assert model.model.training
    assert torch.equal(model.hidden(tokens), model.hidden(tokens))


def test_a_value_that_is_read_in_training_only_is_named() -> None:
    gemma3n = {
        "model_type": "gemma3n_text", "hidden_size": 16, "head_dim": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": [16, 16],
        "vocab_size": 24, "vocab_size_per_layer_input": 24, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0, "laurel_rank": 4, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0], "final_logit_softcapping": 1e6,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
        "max_position_embeddings": 64,
    }  # fmt: skip
    opened(gemma3n)
    with pytest.raises(ConfigError, match="RuntimeError: value cannot be converted to type float"):
        opened(gemma3n | {"altup_coef_clip": 1e300})


LABELS = MODEL_CONFIG | {"num_labels": 50_000_000}
"""transformers makes a name for each: gigabytes, in minutes."""


@pytest.fixture
def built_here(monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """Configurations of which this process makes a model."""
    return first_arguments(monkeypatch, building, "build")


def test_a_config_that_takes_long_is_refused_before_this_process_reads_it(
    built_here: list[Json], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "BUILD_CPU_S", 3.0)
    with pytest.raises(
        ConfigError,
        match=r"\(model_type qwen3\) gives no model within 3 s of CPU time and 2,048 MiB beside its "
        r"tensors: it used up its CPU time; correct it",
    ):
        building.check_fit(LABELS, base_weights())
    assert built_here == []


def test_errors_of_a_config_that_is_not_plain_are_those_of_a_plain_one(
    built_here: list[Json],
) -> None:
    labels = MODEL_CONFIG | {"num_labels": 3}
    with pytest.raises(ConfigError, match=r"gives no causal language model: .*nope"):
        building.check_fit(labels | {"hidden_act": "nope"}, base_weights())
    with pytest.raises(CorruptError, match="needs tensors that are not given"):
        building.check_fit(labels | {"num_hidden_layers": 3}, base_weights())
    with pytest.raises(CorruptError, match="has other shapes for"):
        building.check_fit(labels | {"hidden_size": 32}, base_weights())
    assert built_here == []
    building.check_fit(labels, base_weights())
    assert built_here == [labels]


def test_tables_are_compared_with_the_bytes_of_all_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = base_weights()
    held = sum(tensor.bits.nbytes for tensor in weights.values())
    compared: list[int] = []
    monkeypatch.setattr(building, "_check_tables", lambda model, held: compared.append(held))
    building.check_fit(MODEL_CONFIG, weights)
    assert compared == [held]


def test_a_plain_config_needs_no_process(
    built_here: list[Json], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "FIT_CHILD", "no.such.module")
    building.check_fit(MODEL_CONFIG, base_weights())
    assert built_here == [MODEL_CONFIG]
    with pytest.raises(ConfigError, match="ended with status 1 before it was ready"):
        building.check_fit(MODEL_CONFIG | {"num_labels": 3}, base_weights())
