"""Settings of training: values that the types of the fields do not decide."""

import pytest
from pydantic import ValidationError

from trainer.config import TrainConfig


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
