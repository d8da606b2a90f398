"""Settings that other settings leave without an effect: refused, never ignored."""

from collections.abc import Mapping
from typing import Any

import pytest

from storage.errors import ConfigError
from tasks.recipes import schema
from tasks.recipes.loader import load

SERVED = {
    "rollout.engine.name": "sglang",
    "rollout.engine.sglang.urls": ["http://127.0.0.1:30000"],
    "rollout.regions": {"us-east": {"workers": 1}, "eu-west": {"workers": 0}},
    "evaluation": None,
}
ON_GPU = {"rollout.engine.name": "sglang", "rollout.engine.device": "cuda"}
TRAIN = "policies.solver.train"
CUSTOM = {f"{TRAIN}.optimizer": {"name": "custom", "path": "torch.optim:SGD"}}
MUON_OF_ADAPTER = {f"{TRAIN}.optimizer.name": "muon", f"{TRAIN}.adapter.name": "lora"}
BASELINE = {f"{TRAIN}.lr": 0}
UNTAUGHT = {"policies.solver.model.tiny": {"skill_iterations": 0, "habit_iterations": 0}}
UNTRACKED = {"tracking.enabled": False}
HELD_OUT = {"hub": "openai/gsm8k", "split": "test", "limit": 60}


@pytest.mark.parametrize(
    ("others", "key", "value", "why"),
    [
        (UNTRACKED, "tracking.experiment", "mine", "with enabled: false"),
        (UNTRACKED, "tracking.interval_s", 5, "with enabled: false"),
        (UNTRACKED, "tracking.register_models", True, "with enabled: false"),
        (UNTRACKED, "tracking.registered_weights", "reference", "with enabled: false"),
        ({"log_level": "WARNING"}, "log_every_s", 5, "with log_level: WARNING"),
        ({"log_level": "WARNING"}, "log_every_steps", 5, "with log_level: WARNING"),
        ({"data.max_staleness": 0}, "data.batches_ahead", 2, "with max_staleness: 0"),
        (CUSTOM, f"{TRAIN}.betas", [0.9, 0.99], "with optimizer.name: custom"),
        (CUSTOM, f"{TRAIN}.eps", 1e-6, "with optimizer.name: custom"),
        (MUON_OF_ADAPTER, f"{TRAIN}.betas", [0.9, 0.99], "with adapter.name: lora and opt"),
        (
            {f"{TRAIN}.optimizer": {"name": "muon", "momentum": 0}},
            f"{TRAIN}.optimizer.nesterov", True, "with momentum: 0",
        ),
        (BASELINE, f"{TRAIN}.eps", 1e-6, "with lr: 0.0"),
        (BASELINE, f"{TRAIN}.weight_decay", 0.1, "with lr: 0.0"),
        (BASELINE, f"{TRAIN}.warmup_steps", 5, "with lr: 0.0"),
        (BASELINE, f"{TRAIN}.lr_schedule", "linear", "with lr: 0.0"),
        (
            UNTAUGHT, "policies.solver.model.tiny.batch_size", 32,
            "with skill_iterations: 0 and habit_iterations: 0",
        ),
        (
            {f"{TRAIN}.engine": "deepspeed"}, f"{TRAIN}.deepspeed.offload_optimizer", True,
            "with device: cpu",
        ),
        (ON_GPU, "rollout.engine.threads", 2, "with device: cuda and name: sglang"),
        (SERVED, "rollout.engine.threads", 2, "with sglang.urls"),
        (SERVED | ON_GPU, "rollout.engine.devices", [0], "with sglang.urls"),
        (SERVED | ON_GPU, "rollout.engine.device_share", 0.5, "with sglang.urls"),
        (SERVED, "rollout.engine.sglang.python", "python3", "with urls"),
        (SERVED, "rollout.engine.sglang.memory_share", 0.4, "with urls"),
        (SERVED, "rollout.engine.sglang.server_args", ["--page-size", "1"], "with urls"),
        ({"evaluation.prompts": HELD_OUT}, "evaluation.prompts.seed", 3, "without builtin"),
        ({"gate.datasets.a": HELD_OUT}, "gate.datasets.a.seed", 3, "without builtin"),
        ({}, "gate.max_loss", 0.1, "each data set must gain"),
        ({}, "gate.max_loss_on", {"chained_addition": 0.1}, "chained_addition must gain"),
    ],
)  # fmt: skip
def test_a_setting_that_others_leave_without_an_effect_is_refused(
    others: Mapping[str, Any], key: str, value: Any, why: str
) -> None:
    recipe = "single_policy_tiny"
    load(recipe, {**others})
    with pytest.raises(ConfigError) as caught:
        load(recipe, {**others, key: value})
    assert str(caught.value).startswith(f"--set {key}: ")
    assert "has no effect" in str(caught.value)
    assert why in str(caught.value)
    assert "leave it out" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"tracking.enabled": False, "tracking.register_models": False},
        {"tracking.enabled": "true", "tracking.experiment": "mine"},
        {"data.max_staleness": 0, "data.batches_ahead": 0},
        {"rollout.engine.device": "cuda", "rollout.engine.threads": 2},
        {f"{TRAIN}.optimizer.name": "muon", f"{TRAIN}.betas": [0.9, 0.99]},
        {"evaluation.prompts.seed": 3},
        CUSTOM | {f"{TRAIN}.lr": 0, f"{TRAIN}.weight_decay": 0.1},
        {"policies.solver.model.tiny": {"skill_iterations": 0, "batch_size": 32}},
        {"gate": {"max_loss": 0.1, "datasets": {"a": HELD_OUT, "b": HELD_OUT}}},
        {"gate": {"max_loss_on": {"b": 0.1}, "gain_on": "a", "datasets": {"a": HELD_OUT, "b": HELD_OUT}}},
    ],
)  # fmt: skip
def test_a_setting_that_has_an_effect_or_says_what_happens_is_accepted(
    settings: dict[str, Any],
) -> None:
    load("single_policy_tiny", settings)


WRITTEN = """
extends: single_policy_tiny
log_every_s: 5
tracking: {experiment: mine, interval_s: 5, register_models: true, registered_weights: reference}
data: {batches_ahead: 2}
policies: {solver: {train: {betas: [0.9, 0.99], eps: 1.0e-6, lr_schedule: linear, lr_min_share: 0.1}}}
rollout: {engine: {threads: 2}}
evaluation: {prompts: {seed: 3}}
"""


@pytest.mark.parametrize(
    "settings",
    [
        UNTRACKED,
        {"log_level": "WARNING"},
        {"data.max_staleness": 0},
        CUSTOM,
        MUON_OF_ADAPTER,
        BASELINE,
        ON_GPU,
        dict(reversed(ON_GPU.items())),
        SERVED,
        {"evaluation.prompts.hub": HELD_OUT["hub"]},
    ],
)
def test_settings_of_a_recipe_give_way_to_an_override_that_leaves_them_without_an_effect(
    settings: dict[str, Any],
) -> None:
    load(WRITTEN)
    load(WRITTEN, settings)


def test_a_stored_baseline_loses_its_schedule_when_it_is_continued() -> None:
    config = load("single_policy_tiny", {f"{TRAIN}.lr_schedule": "linear"})
    train = config.policies["solver"].train.model_copy(update={"lr": 0.0})
    policies = {"solver": config.policies["solver"].model_copy(update={"train": train})}
    stored = config.model_copy(update={"policies": policies})
    found = schema.without_effect(stored.model_dump(mode="json"), stored)
    at = ("policies", "solver", "train")
    assert {(*at, key) for key in ("lr_schedule", "lr_min_share", "schedule_steps")} < {*found}


def test_a_stored_configuration_has_the_same_settings_without_an_effect() -> None:
    """A run is continued by what it stored, which has every default written out."""
    config = load("single_policy_tiny", {**UNTRACKED, "gate": {}})
    found = schema.without_effect(config.model_dump(mode="json"), config)
    assert {("tracking", "experiment"), ("gate", "max_loss"), ("rollout", "engine", "sglang")} < {
        *found
    }
    assert ("gate", "min_gain") not in found
