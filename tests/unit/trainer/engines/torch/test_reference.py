"""The KL penalty of the engine `torch` on one process, against float64 (`plain_trainer.py`)."""

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from storage.errors import CorruptError
from storage.formats.safetensors import from_safetensors, to_safetensors, weights_digest
from storage.records.weights import HostTensor
from tests.support.models.plain_trainer import PlainTrainer
from tests.support.models.trainer_cases import (
    LINEAR,
    MODEL_CONFIG,
    base_weights,
    reference_model,
    sampled_batch,
)
from trainer.config import TrainConfig
from trainer.engines.torch.engine import TorchTrainEngine
from trainer.engines.torch.host_tensors import to_torch
from trainer.engines.torch.reference import Reference
from trainer.losses import LossConfig, PpoClip
from trainer.losses.corrections import TisToken
from trainer.losses.reference_kl import ReferenceKl

SEED = 3
WEIGHTS = base_weights()
OTHER = base_weights(seed=5)
"""Of a policy far from `WEIGHTS`."""


def near(share: float) -> dict[str, HostTensor]:
    """Weights between `WEIGHTS` and `OTHER`."""
    from trainer.engines.torch.host_tensors import to_host

    return {
        name: to_host(
            torch.lerp(to_torch(each).float(), to_torch(OTHER[name]).float(), share), "BF16"
        )
        for name, each in WEIGHTS.items()
    }


def started(
    config: TrainConfig, reference: Mapping[str, HostTensor] | None = None
) -> TorchTrainEngine:
    engine = TorchTrainEngine(config, MODEL_CONFIG, SEED)
    engine.set_weights(WEIGHTS)
    if reference is not None:
        engine.set_reference(reference)
    return engine


def moved(after: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(
        [
            (after[name].double() - to_torch(WEIGHTS[name]).double()).flatten()
            for name in sorted(after)
        ]
    )


def moves(engine: TorchTrainEngine) -> torch.Tensor:
    return moved({name: to_torch(tensor) for name, tensor in engine.weights().items()})


def apart(item: torch.Tensor, other: torch.Tensor) -> float:
    return float((item - other).abs().max() / other.abs().max())


def with_kl(config: TrainConfig, **settings: object) -> TrainConfig:
    return config.model_copy(update={"reference": ReferenceKl.model_validate(settings)})


STRONG = LINEAR.model_copy(
    update={"lr": 1e3, "minibatches": 2, "micro_batch_tokens": 15, "normalize_advantages": True}
)
LOSSES = {
    "token_mean": PpoClip(),
    "sequence_mean": PpoClip(aggregate="sequence_mean"),
    "corrected": PpoClip(correction=TisToken(cap=1.5)),
}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_a_step_is_the_gradient_of_the_loss_with_the_penalty(
    loss: LossConfig, estimator: str
) -> None:
    given = sampled_batch(reference_model(WEIGHTS), num_rows=7, noise=0.6, temperature=0.8)
    config = with_kl(STRONG.model_copy(update={"loss": loss}), coefficient=0.3, estimator=estimator)
    reference = near(0.2)
    engine, plain = started(config, reference), PlainTrainer(config, WEIGHTS, SEED, reference)
    metrics, expected = engine.step(given), plain.step(given)
    assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-6)
    assert abs(metrics["trainer/kl_reference"]) > 0.02
    assert apart(moves(engine), moved(plain.weights())) < 1e-4
    without = started(config.model_copy(update={"reference": None}))
    without.step(given)
    assert apart(moves(without), moved(plain.weights())) > 0.02, "the penalty counts"


def test_packed_rows_have_the_penalty_of_padded_ones() -> None:
    given = sampled_batch(reference_model(WEIGHTS), num_rows=6, noise=0.3)
    padded, packed = (
        started(with_kl(STRONG, coefficient=0.3).model_copy(update={"packing": packing}), near(0.2))
        for packing in ("padded", "packed")
    )
    assert packed.step(given) == pytest.approx(padded.step(given), rel=1e-5, abs=1e-6)
    assert apart(moves(packed), moves(padded)) < 1e-5


def test_the_reference_stays_as_it_was_given() -> None:
    """Over several steps of Adam, with weights that move."""
    config = with_kl(
        TrainConfig(lr=1e-2, eps=1e-3, minibatches=2, publish_dtype="F32", loss=PpoClip()),
        coefficient=2.0,
        estimator="k2",
    )
    engine, plain = started(config, WEIGHTS), PlainTrainer(config, WEIGHTS, SEED, WEIGHTS)
    model = reference_model(WEIGHTS)
    distances = []
    for step in (1, 2, 3, 4):
        given = sampled_batch(model, step, noise=0.3)
        metrics, expected = engine.step(given), plain.step(given)
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
        distances.append(metrics["trainer/kl_reference"])
    assert distances[0] < distances[-1]
    assert apart(moves(engine), moved(plain.weights())) < 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_version_in_training_has_no_distance_from_itself(precision: str, tied: bool) -> None:
    """Bit for bit, although the reference is kept in the precision of the products."""
    config = TrainConfig.model_validate(
        {"precision": precision, "reference": {"estimator": "k2"}, "minibatches": 1}
    )
    model_config = MODEL_CONFIG | {"tie_word_embeddings": tied}
    weights = base_weights(config=model_config)
    engine = TorchTrainEngine(config, model_config, SEED)
    engine.set_weights(weights)
    engine.set_reference(weights)
    metrics = engine.step(sampled_batch(reference_model(weights, model_config), noise=0.1))
    assert metrics["trainer/kl_reference"] == 0.0
    engine.set_reference(base_weights(seed=1, config=model_config))
    assert engine.step(sampled_batch(reference_model(WEIGHTS), 2))["trainer/kl_reference"] > 0.1


def test_a_coefficient_of_0_measures_and_changes_no_bit() -> None:
    given = [sampled_batch(reference_model(WEIGHTS), step, noise=0.3) for step in (1, 2)]
    config = TrainConfig(lr=1e-2, minibatches=2, publish_dtype="F32")
    plain = started(config)
    measured = started(with_kl(config, coefficient=0.0), OTHER)
    for batch in given:
        metrics, expected = measured.step(batch), plain.step(batch)
        assert metrics.pop("trainer/kl_reference") > 0.1
        assert metrics == expected
    assert weights_digest(measured.weights()) == weights_digest(plain.weights())


def test_a_resumed_engine_with_the_same_reference_continues_bit_for_bit() -> None:
    config = with_kl(TrainConfig(lr=1e-2, minibatches=2), coefficient=0.5)
    batches = [sampled_batch(reference_model(WEIGHTS), step, noise=0.1) for step in range(1, 5)]
    straight = started(config, OTHER)
    for batch in batches[:2]:
        straight.step(batch)
    tensors, state = straight.save()
    assert tensors.keys() == started(config.model_copy(update={"reference": None})).save()[
        0
    ].keys() | {name for name in tensors if name.startswith("optimizer/")}
    resumed = TorchTrainEngine(config, MODEL_CONFIG, SEED)
    resumed.load(from_safetensors(to_safetensors(tensors)), json.loads(json.dumps(state)))
    resumed.set_reference(OTHER)
    for batch in batches[2:]:
        assert straight.step(batch) == resumed.step(batch)
    assert weights_digest(straight.save()[0]) == weights_digest(resumed.save()[0])


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F7F], ids=["NaN", "huge"])
def test_a_reference_that_gives_no_numbers_is_no_step_without_it(bits: int) -> None:
    name = "model.norm.weight"
    spoiled = replace(OTHER[name], bits=np.full_like(OTHER[name].bits, bits))
    engine = started(with_kl(LINEAR), OTHER | {name: spoiled})
    before = weights_digest(engine.weights())
    with pytest.raises(CorruptError, match="version 0, the reference, gives log-probabilities"):
        engine.step(sampled_batch(reference_model(WEIGHTS)))
    assert weights_digest(engine.weights()) == before


def test_a_step_without_the_weights_of_the_reference_is_refused() -> None:
    engine = started(with_kl(LINEAR))
    with pytest.raises(ValueError, match="call set_reference before the first step"):
        engine.step(sampled_batch(reference_model(WEIGHTS)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_model_in_bf16_rounds_its_linear_layers_only(tied: bool) -> None:
    model_config = MODEL_CONFIG | {"tie_word_embeddings": tied}
    config = TrainConfig(precision="bf16", reference=ReferenceKl())
    reference = Reference(config, model_config, base_weights(config=model_config))
    parameters = dict(reference._model.model.named_parameters())
    assert not any(parameter.requires_grad for parameter in parameters.values())
    wide = {name for name, each in parameters.items() if each.dtype == torch.float32}
    assert wide == {name for name in parameters if "norm" in name or "embed_tokens" in name}
    assert {each.dtype for each in parameters.values()} == {torch.float32, torch.bfloat16}
