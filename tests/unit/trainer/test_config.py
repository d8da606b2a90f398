"""Settings of training: values that the types of the fields do not decide."""

import pytest
from pydantic import ValidationError

from storage.config_model import Frozen
from trainer.adapters import Lora
from trainer.config import TrainConfig
from trainer.losses.corrections import IcePop, TisSequence, TisToken
from trainer.losses.ppo_clip import PpoClip
from trainer.losses.reference_kl import ReferenceKl
from trainer.optimizers import MuonOptimizer


def test_a_stored_configuration_with_the_removed_setting_disabled_is_read() -> None:
    stored = {**TrainConfig(lr=1e-4).model_dump(mode="json"), "compact_deltas": False}
    assert TrainConfig.model_validate(stored) == TrainConfig(lr=1e-4)


@pytest.mark.parametrize("value", [True, 1, "yes"])
def test_the_removed_setting_when_enabled_is_refused_with_a_remedy(value: object) -> None:
    with pytest.raises(
        ValidationError, match="compact_deltas was removed: leave it out; a run that set it is read"
    ):
        TrainConfig.model_validate({"compact_deltas": value})


def test_a_learning_rate_of_0_and_a_gradient_without_a_limit_are_settings() -> None:
    config = TrainConfig.model_validate({"lr": 0, "grad_clip": None})
    assert (config.lr, config.grad_clip) == (0.0, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_schedule": "cosine"}, "lr_schedule: cosine needs schedule_steps"),
        (
            {"lr_schedule": "linear", "schedule_steps": 5, "warmup_steps": 5},
            "schedule_steps 5 is not above warmup_steps 5",
        ),
        ({"eps": 0}, "greater than 0"),
        ({"eps": 9e-38}, "must be at least 1e-37: float32 takes smaller numbers as 0"),
        ({"ranks": 65}, "less than or equal to 64"),
        ({"nodes": 65}, "less than or equal to 64"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"nodes": 2, "engine": "own.engine:Engine"}, "nodes: 2 needs engine: torch or engine: de"),
        ({"optimizer": {"name": "muon", "ns_steps": 100}}, "less than or equal to 99"),
        ({"attention": "flash_attention_2"}, "flash_attention_2 computes in bf16"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_remedy(
    settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainConfig.model_validate(settings)


def test_the_ranks_of_all_nodes_train_together() -> None:
    assert TrainConfig(nodes=3, ranks=2).num_ranks == 6
    assert TrainConfig(ranks=2, engine="own.engine:Engine").num_ranks == 2


def test_a_schedule_may_end_one_step_after_the_warm_up() -> None:
    settings = {"lr_schedule": "linear", "schedule_steps": 6, "warmup_steps": 5}
    assert TrainConfig.model_validate(settings).schedule_steps == 6


def test_a_recipe_without_settings_trains_with_these() -> None:
    """Another default changes the results of every recipe that does not name the setting."""
    assert TrainConfig().model_dump(mode="json") == {
        "engine": "torch", "ranks": 1, "nodes": 1,
        "deepspeed": {"stage": 2, "offload_optimizer": False},
        "loss": {
            "name": "m2po", "m2_form": "adaptive_clip", "m2_threshold": 0.01, "dual_clip": None,
            "aggregate": "token_mean", "constant_length": None, "correction": {"name": "none"},
        },
        "reference": None, "optimizer": {"name": "adamw"}, "adapter": {"name": "none"},
        "lr": 5e-6, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01,
        "warmup_steps": 0, "lr_schedule": "constant", "lr_min_share": 0.0, "schedule_steps": None,
        "grad_clip": 1.0, "minibatches": 1, "micro_batch_tokens": 8192, "packing": "padded",
        "attention": "sdpa", "precision": "fp32", "normalize_advantages": True,
        "activation_checkpointing": False, "compile": False,
        "publish_dtype": "BF16", "anchor_every": 20, "publish_memory_mb": 1024,
        "device": "cpu", "devices": [], "device_share": 1.0, "threads": 1,
        "checkpoint_every": 10, "checkpoints_keep": 2, "poll_interval_s": 0.1,
        "mismatch": {"warn": None, "stop": None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "settings"),
    [
        (PpoClip(), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
        (TisToken(), {"cap": 2.0}),
        (TisSequence(), {"cap": 2.0}),
        (IcePop(), {"low": 0.5, "high": 5.0}),
        (ReferenceKl(), {"version": 0, "coefficient": 0.001, "estimator": "k3"}),
        (
            MuonOptimizer(),
            {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr": "match_rms_adamw"},
        ),
        (
            Lora(),
            {"rank": 16, "alpha": 32.0, "rslora": False, "targets": None, "publish": "merged"},
        ),
    ],
)
def test_what_a_recipe_selects_by_name_has_these_settings(
    chosen: Frozen, settings: dict[str, object]
) -> None:
    stored = chosen.model_dump(mode="json")
    assert {name: stored[name] for name in settings} == settings
