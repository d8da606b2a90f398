"""`docs/extending/losses.md`: its example runs as written."""

import importlib
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tasks.recipes.loader import load
from tests.support.checkout import ROOT
from tests.support.models.trainer_cases import (
    LINEAR,
    MODEL_CONFIG,
    base_weights,
    reference_model,
    sampled_batch,
)
from trainer.config import TrainConfig
from trainer.engines.engine import make_engine
from trainer.engines.torch.host_tensors import to_torch
from trainer.losses import LOSSES, CustomLoss, PpoClip
from trainer.losses.aggregation import Aggregated
from trainer.losses.corrections import CORRECTIONS, TisToken, check_weights

PAGE = (ROOT / "docs" / "extending" / "losses.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)[number])


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "my_losses.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("my_losses")


def stepped(config: TrainConfig) -> tuple[dict[str, float], np.ndarray]:
    """Metrics of one step, and the change of each weight."""
    weights = base_weights()
    engine = make_engine(config, MODEL_CONFIG, 3)
    engine.set_weights(weights)
    metrics = engine.step(sampled_batch(reference_model(weights), num_rows=10, noise=0.3))
    after = engine.weights()
    moves = [
        (to_torch(after[name]) - to_torch(weights[name]).float()).flatten()
        for name in sorted(weights)
    ]
    return metrics, torch.cat(moves).numpy()


def test_the_recipe_of_the_page_trains_with_the_class_of_the_page(example: ModuleType) -> None:
    written = yaml.safe_load(block("yaml"))["policies"]["solver"]["train"]["loss"]
    loss = (
        load("single_policy_tiny", {"policies.solver.train.loss": written})
        .policies["solver"]
        .train.loss
    )
    assert loss == CustomLoss(path="my_losses:Cispo", args={"eps_high": 2.0})
    metrics, _ = stepped(LINEAR.model_copy(update={"loss": loss}))
    assert metrics["trainer/clip_high"] == 2.0
    assert metrics["trainer/masked_share"] == 0.0


def test_the_first_loss_of_the_page_has_the_formula_of_its_docstring(example: ModuleType) -> None:
    loss = example.Cispo(eps_high=1.0)
    logprobs = torch.tensor([math.log(0.6), math.log(0.5)], dtype=torch.float64, requires_grad=True)
    behaviour, advantages = (
        torch.tensor([0.2, 0.4]).double().log(),
        torch.tensor([1.0, -2.0]).double(),
    )
    result = loss.token_losses(
        loss.prepare(logprobs.detach(), behaviour, advantages), logprobs, behaviour, advantages
    )
    (slope,) = torch.autograd.grad(result.values_N.sum(), logprobs)
    assert slope.tolist() == pytest.approx([-2.0, 2.5])  # ρ = 3, cut to 2, and 1.25
    assert result.values_N.tolist() == pytest.approx([-2.0 * math.log(0.6), 2.5 * math.log(0.5)])


def test_the_second_loss_of_the_page_does_not_depend_on_micro_batches(example: ModuleType) -> None:
    config = LINEAR.model_copy(
        update={"loss": CustomLoss(path="my_losses:Trimmed", args={"share": 0.25})}
    )
    metrics, moves = stepped(config)
    split_metrics, split_moves = stepped(config.model_copy(update={"micro_batch_tokens": 15}))
    assert metrics["trainer/masked_share"] == pytest.approx(0.25, abs=0.03)
    assert split_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert np.abs(moves).max() > 0.1
    assert np.allclose(split_moves, moves, rtol=1e-4, atol=1e-5)


def test_the_page_names_every_loss_and_every_setting() -> None:
    for name, model in LOSSES.items():
        settings = [
            f"`{field}`"
            for field in model.model_fields
            if field not in ("name", *Aggregated.model_fields)
        ]
        assert re.search(rf"^\| `{name}`[^|]*\| ([^|]*) \|", PAGE, flags=re.MULTILINE)[
            1
        ] == ", ".join(settings)  # type: ignore[index]
    assert all(f"`{name}`" in PAGE for name in Aggregated.model_fields)


def test_the_page_names_every_correction_and_every_setting() -> None:
    page = PAGE.partition("## Corrections")[2]
    for name, model in CORRECTIONS.items():
        row = re.search(rf"^\| `{name}`[^|]*\|[^|]*\|([^|]*)\|", page, flags=re.MULTILINE)
        assert row is not None, name
        settings = [field for field in model.model_fields if field != "name"]
        assert re.findall(r"`(\w+)`", row[1]) == settings
        for field in settings:
            default = model.model_fields[field].default
            assert not isinstance(default, float) or f"`{field}` ({default:g})" in row[1]


def test_the_correction_of_the_page_weighs_tokens() -> None:
    scope: dict[str, Any] = {}
    exec(block("python", 1), scope)  # the page's own text
    weights_N = scope["InverseDistance"]().token_weights(
        torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -2.0, -2.0]), torch.tensor([0, 0, 1])
    )
    assert check_weights(weights_N, 3).tolist() == [1.0, 0.5, 0.5]


def test_the_correction_in_a_recipe_of_the_page_is_read() -> None:
    written = yaml.safe_load(block("yaml", 1))["loss"]
    loaded = load("single_policy_tiny", {"policies.solver.train.loss": written})
    assert loaded.policies["solver"].train.loss == PpoClip(correction=TisToken(cap=2.0))
