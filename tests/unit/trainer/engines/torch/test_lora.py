"""LoRA in the engine `torch`, compared with peft's own model and with unmodified transformers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from storage.errors import ConfigError, CorruptError
from storage.formats import adapters
from storage.formats.safetensors import from_safetensors, to_safetensors, weights_digest
from storage.records.batches import Batch
from storage.records.weights import HostTensor
from tests.support.models.trainer_cases import (
    MODEL_CONFIG,
    base_weights,
    reference_logprobs,
    reference_model,
    sampled_batch,
)
from trainer.adapters import Lora
from trainer.config import TrainConfig
from trainer.engines.torch import lora
from trainer.engines.torch.engine import TorchTrainEngine
from trainer.engines.torch.host_tensors import to_torch
from trainer.engines.torch.lora import LoraModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORM = "model.norm.weight"
SEED = 3


def config(adapter: Lora, **settings: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 1e-2, "publish_dtype": "F32", **settings}, adapter=adapter)


def started(
    adapter: Lora, weights: Mapping[str, HostTensor] | None = None, **settings: Any
) -> TorchTrainEngine:
    engine = TorchTrainEngine(config(adapter, **settings), MODEL_CONFIG, SEED)
    engine.set_weights(base_weights() if weights is None else weights)
    return engine


def trained(engine: TorchTrainEngine, num_steps: int = 2) -> None:
    model = reference_model(base_weights())
    for step in range(1, num_steps + 1):
        engine.step(sampled_batch(model, step, noise=0.1))


def sample() -> Batch:
    return sampled_batch(reference_model(base_weights(seed=4)), num_rows=4, temperature=0.8)


def own_logprobs(model: LoraModel, *, base: bool = False) -> torch.Tensor:
    """Log-probabilities of all tokens of `sample`, row by row, as the engine computes them."""
    parts = []
    for row in sample().rows:
        tokens = torch.tensor(row.tokens).long()
        arguments = (
            tokens[None],
            torch.arange(len(tokens) - 1),
            tokens[1:],
            torch.full((len(tokens) - 1,), row.temperature),
        )
        parts.append((model.base_logprobs if base else model.logprobs)(*arguments)[0])
    return torch.cat(parts).detach()


def plain_logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([reference_logprobs(model, row) for row in sample().rows])


def model_of(engine: TorchTrainEngine) -> LoraModel:
    model = engine._trained._model
    assert isinstance(model, LoraModel)
    return model


def as_peft(engine: TorchTrainEngine, adapter: Lora) -> torch.nn.Module:
    """The model in training, put together by peft, and merged by it."""
    peft_model: Any = get_peft_model(
        reference_model(base_weights()),  # type: ignore[arg-type]
        LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # any number works
            use_rslora=adapter.rslora,
            target_modules=list(adapter.targets or ALL),
        ),
    )
    saved = engine.save()[0]
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad:
            ours = name.removeprefix("base_model.model.").replace(".default", "")
            parameter.data.copy_(to_torch(saved[f"model/{ours}"]))
    merged: torch.nn.Module = peft_model.merge_and_unload()
    return merged


ADAPTERS = [
    Lora(rank=4, alpha=6.0),
    Lora(rank=4, alpha=6.0, publish="adapter"),
    Lora(rank=3, alpha=2.0, rslora=True, targets=("q_proj", "down_proj")),
]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["merged", "adapter", "rslora"])
def test_a_published_version_has_the_log_probabilities_of_the_model_in_training(
    adapter: Lora,
) -> None:
    engine = started(adapter)
    trained(engine)
    version = adapters.merged(adapter.stored(), engine.weights()).tensors
    own = own_logprobs(model_of(engine))
    assert float((own - plain_logprobs(as_peft(engine, adapter))).abs().max()) <= 1e-5
    if adapter.publish == "merged":  # else W has the base's dtype, BF16, and so has the sum
        assert float((own - plain_logprobs(reference_model(version))).abs().max()) <= 1e-5
    assert float((own - plain_logprobs(reference_model(base_weights()))).abs().max()) > 0.05


def test_merged_weights_are_those_that_peft_merges() -> None:
    adapter = ADAPTERS[0]
    engine = started(adapter)
    trained(engine)
    published, state = engine.weights(), as_peft(engine, adapter).state_dict()
    changed = 0
    for name, tensor in published.items():
        assert torch.allclose(to_torch(tensor), state[name], rtol=0, atol=1e-6), name
        changed += bool((to_torch(tensor) != to_torch(base_weights()[name]).float()).any())
    assert published.keys() == base_weights().keys()
    assert changed == 2 * len(ALL)


def test_an_adapter_of_a_float32_base_is_read_with_the_same_log_probabilities() -> None:
    adapter = ADAPTERS[1]
    weights = {
        name: HostTensor("F32", each.shape, each.bits.astype(np.uint32) << 16)
        for name, each in base_weights().items()
    }
    engine = started(adapter, weights)
    trained(engine)
    version = adapters.merged(adapter.stored(), engine.weights()).tensors
    own = own_logprobs(model_of(engine))
    assert float((own - plain_logprobs(reference_model(version))).abs().max()) <= 1e-5


def test_only_a_and_b_are_trained_and_saved_with_moments() -> None:
    engine = started(Lora(rank=4))
    before = base_weights()
    trained(engine, 1)
    tensors, state = engine.save()
    for name, tensor in before.items():
        assert tensors[f"model/{name}"].bits.tolist() == tensor.bits.tolist(), name
    others = {name.removeprefix("model/") for name in tensors if name.startswith("model/")}
    assert others - before.keys() == {
        f"model.layers.{layer}.{part}.{each}.lora_{side}.weight"
        for layer in (0, 1)
        for each in ALL
        for part in ["self_attn" if each in ALL[:4] else "mlp"]
        for side in "AB"
    }
    moments = {name for name in tensors if name.startswith("optimizer/")}
    assert moments == {
        f"optimizer/{name}/{moment}"
        for name in others - before.keys()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    assert all(tensors[name].dtype == "F32" for name in moments)
    assert all(".lora_" in name for name in state["updates"])


def test_a_new_adapter_publishes_the_base_bit_for_bit_and_its_a_follows_the_seed() -> None:
    weights = base_weights()
    weights[NORM].bits[:2] = 0x8000  # −0
    weights["model.layers.0.mlp.up_proj.weight"].bits[0, :3] = 0x8000
    engine = started(Lora(), weights, publish_dtype="BF16")
    assert weights_digest(engine.weights()) == weights_digest(weights)
    torch.rand(5)
    again = started(Lora(), weights)
    assert weights_digest(again.save()[0]) == weights_digest(engine.save()[0])
    other = TorchTrainEngine(config(Lora()), MODEL_CONFIG, SEED + 1)
    other.set_weights(weights)
    name = "model/model.layers.0.mlp.up_proj.lora_A.weight"
    assert other.save()[0][name].bits.tolist() != engine.save()[0][name].bits.tolist()


def test_the_form_adapter_publishes_the_given_tensors_and_a_and_b_in_publish_dtype() -> None:
    weights = base_weights()
    engine = started(Lora(rank=4, publish="adapter"), weights, publish_dtype="BF16")
    trained(engine, 1)
    first = engine.weights()
    trained(engine, 1)
    second = engine.weights()
    assert all(first[name] is weights[name] is second[name] for name in weights)
    added = first.keys() - weights.keys()
    assert len(added) == 2 * 2 * len(ALL)
    assert {first[name].dtype for name in added} == {"BF16"}
    assert all(first[name].bits.tolist() != second[name].bits.tolist() for name in added)


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_a_loaded_engine_continues_bit_for_bit(publish: Any) -> None:
    adapter = Lora(rank=4, publish=publish)
    settings = {"warmup_steps": 3, "minibatches": 2, "publish_dtype": "BF16"}
    model = reference_model(base_weights())
    batches = [sampled_batch(model, step, noise=0.1) for step in range(1, 5)]
    straight = started(adapter, **settings)
    for given in batches[:2]:
        straight.step(given)
    tensors, state = straight.save()
    resumed = started(adapter, base_weights(seed=9), **settings)
    resumed.load(from_safetensors(to_safetensors(tensors)), state)
    assert weights_digest(resumed.weights()) == weights_digest(straight.weights())
    for given in batches[2:]:
        assert straight.step(given) == resumed.step(given)
    assert weights_digest(straight.weights()) == weights_digest(resumed.weights())
    assert weights_digest(straight.save()[0]) == weights_digest(resumed.save()[0])
    assert straight.save()[1] == resumed.save()[1]


def test_a_learning_rate_of_0_changes_no_bit() -> None:
    engine = started(Lora(), lr=0.0, publish_dtype="BF16")
    trained(engine)
    assert weights_digest(engine.weights()) == weights_digest(base_weights())


def test_a_saved_state_with_other_settings_is_refused() -> None:
    plain = TorchTrainEngine(TrainConfig(), MODEL_CONFIG, SEED)
    plain.set_weights(base_weights())
    with pytest.raises(CorruptError, match=r"lacks .*lora_A\.weight, which is trained"):
        started(Lora()).load(*plain.save())
    saved = started(Lora(rank=4)).save()
    with pytest.raises(CorruptError, match=r"has no place for: .*lora"):
        plain.load(*saved)
    for other in (Lora(rank=5), Lora(rank=4, targets=("q_proj",))):
        with pytest.raises(CorruptError, match="an adapter of other layers or another rank"):
            started(other).load(*saved)


def test_an_unknown_target_is_refused_with_those_that_the_model_has() -> None:
    for targets in (("q_proj", "surprise"), ("lm_head",), ("embed_tokens",)):
        with pytest.raises(ConfigError, match=r"has no (surprise|lm_head|embed_tokens); .*v_proj$"):
            started(Lora(targets=targets))


def test_a_rank_that_no_adapted_layer_can_have_is_refused_before_matrices_are_made() -> None:
    """A and B of rank 65,536 would take a trainer of the tiny model gigabytes."""
    largest = min(MODEL_CONFIG["hidden_size"], MODEL_CONFIG["intermediate_size"])
    started(Lora(rank=largest))
    with pytest.raises(ConfigError, match=rf"rank: {largest + 1} is more .*; at most {largest} is"):
        started(Lora(rank=largest + 1))


def test_with_the_adapter_off_the_base_model_computes_and_training_goes_on() -> None:
    engine = started(Lora(rank=4))
    trained(engine, 1)
    model = model_of(engine)
    before = own_logprobs(model)
    base = own_logprobs(model, base=True)
    assert float((base - plain_logprobs(reference_model(base_weights()))).abs().max()) <= 1e-5
    assert torch.equal(own_logprobs(model), before)
    assert float((before - base).abs().max()) > 0.01
    trained(engine, 1)
    assert not torch.equal(own_logprobs(model), before)


@pytest.mark.parametrize(
    "settings",
    [{"activation_checkpointing": True}, {"packing": "packed"}, {"micro_batch_tokens": 15}],
    ids=["checkpointing", "packed", "micro-batches"],
)
def test_settings_of_memory_and_packing_do_not_change_results(settings: dict[str, Any]) -> None:
    plain, other = started(Lora(rank=4)), started(Lora(rank=4), **settings)
    given = sampled_batch(reference_model(base_weights()), noise=0.1)
    assert other.step(given) == pytest.approx(plain.step(given), rel=1e-4, abs=1e-6)


def test_in_bf16_masters_stay_float32() -> None:
    engine = started(Lora(rank=4), precision="bf16")
    metrics = engine.step(sampled_batch(reference_model(base_weights())))
    assert metrics["trainer/ratio/mean"] == pytest.approx(1.0, abs=0.05)
    assert metrics["trainer/grad_norm"] > 0
    assert {each.dtype for each in model_of(engine).parameters().values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_layers_with_biases_and_an_untied_head_are_adapted_too(kind: str) -> None:
    model_config = {**MODEL_CONFIG, "model_type": kind, "tie_word_embeddings": False}
    weights = base_weights(config=model_config)
    engine = TorchTrainEngine(config(Lora(rank=4), publish_dtype="BF16"), model_config, SEED)
    engine.set_weights(weights)
    assert weights_digest(engine.weights()) == weights_digest(weights)
    assert ("model.layers.0.self_attn.q_proj.bias" in weights) == (kind == "qwen2")
    engine.step(sampled_batch(reference_model(weights, model_config)))
    changed = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, tensor in engine.weights().items()
        if tensor.bits.tolist() != weights[name].bits.tolist()
    }
    assert changed == set(ALL)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("layers.0.q_proj.base_layer.weight", "layers.0.q_proj.weight"),
        ("layers.0.q_proj.lora_A.default.weight", "layers.0.q_proj.lora_A.weight"),
        ("layers.0.q_proj.lora_B.default.weight", "layers.0.q_proj.lora_B.weight"),
        ("mlp.experts.base_layer.base_layer.gate_up_proj", "mlp.experts.gate_up_proj"),
        ("mlp.experts.base_layer.lora_A.default.weight", "mlp.experts.lora_A.weight"),
        ("default.base_layer_norm.weight", "default.base_layer_norm.weight"),
    ],
)
def test_names_of_peft_become_those_of_the_base(theirs: str, ours: str) -> None:
    assert lora._our_name(theirs) == ours
