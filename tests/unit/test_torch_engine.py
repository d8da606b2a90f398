"""What is particular to the built-in engine; what every engine must do stands in `tests/contract/test_train_engine.py`."""

import torch

from tests.trainer_cases import LINEAR, MODEL_CONFIG, base_weights, reference_model, sampled_batch
from trainer.bits import to_torch
from trainer.torch_engine import TorchEngine


def test_weight_decay_pulls_on_matrices_and_leaves_norms_alone() -> None:
    model = reference_model(base_weights())
    given = sampled_batch(model)
    plain, decayed = (
        TorchEngine(LINEAR.model_copy(update={"lr": 0.5, "weight_decay": decay}), MODEL_CONFIG, seed=0)
        for decay in (0.0, 0.1)
    )
    for engine in (plain, decayed):
        engine.set_weights(base_weights())
        engine.step(given)
    for name, before in base_weights().items():
        without, with_decay = (to_torch(engine.weights()[name]) for engine in (plain, decayed))
        pull = 0.05 * to_torch(before).float() if len(before.shape) >= 2 else torch.zeros(before.shape)
        assert torch.allclose(without - with_decay, pull, atol=1e-6), name


def test_the_gradient_is_clipped_to_its_largest_norm() -> None:
    weights = base_weights()
    engine = TorchEngine(LINEAR.model_copy(update={"grad_clip": 0.01}), MODEL_CONFIG, seed=0)
    engine.set_weights(weights)
    metrics = engine.step(sampled_batch(reference_model(weights)))
    after = engine.weights()
    moved = torch.cat([(to_torch(after[name]) - to_torch(weights[name]).float()).flatten() for name in weights])
    assert metrics["trainer/grad_norm"] > 0.1
    assert abs(float(moved.norm()) - 0.01) < 1e-4
