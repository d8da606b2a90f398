"""Settings of the dataflow."""

import pytest
from pydantic import ValidationError

from data_ops.config import ALGORITHMS_MAX, DataConfig


def test_a_recipe_without_settings_has_this_dataflow() -> None:
    """Another default changes the data of every recipe that does not name the setting."""
    config = DataConfig.model_validate({"prompts": {"path": "prompts.jsonl"}})
    assert config.model_dump(mode="json") == {
        "prompts": {
            "path": "prompts.jsonl", "question": "question", "answer": "answer",
            "answer_after": None, "limit": None, "seed": 0,
        },
        "start": {"epoch": 0, "position": 0},
        "samples_per_prompt": 8, "prompts_per_order": 4,
        "max_staleness": 8, "batches_ahead": 1,
        "curate": [{"name": "accept_all"}], "filter": [{"name": "zero_advantage"}],
        "sample": [{"name": "edf"}],
        "advantage": {
            "baseline": "mean", "divide_by_std": True,
            "reward_bias": 0.0, "reward_scale": 1.0, "reward_clip": 20.0,
            "overlong_tokens": 0, "overlong_max_tokens": 0, "overlong_factor": 1.0,
        },
        "keep_partial_groups": True, "poll_interval_s": 0.2, "gather_interval_s": 2.0,
        "task_runner": {"name": "threads"}, "shards_per_task": 16,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "name"), [("curate", "accept_all"), ("filter", "zero_advantage"), ("sample", "edf")]
)
def test_a_place_has_few_algorithms(place: str, name: str) -> None:
    """A `run.json` of 100 kB could name ten thousand, all called for each prompt or group."""

    def config(num: int) -> DataConfig:
        return DataConfig.model_validate({"prompts": {"path": "a.jsonl"}, place: [name] * num})

    assert len(getattr(config(ALGORITHMS_MAX), place)) == ALGORITHMS_MAX
    with pytest.raises(ValidationError, match="at most 16 items"):
        config(ALGORITHMS_MAX + 1)
