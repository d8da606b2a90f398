"""`tests/old_run/all_variants/run.json` is that of a run of an earlier release with its original
bytes; it was made from the `recipe.yaml` beside it.
"""

import json
import re

import pytest

from data_ops.prompts import CustomPrompts
from storage.errors import ConfigError, CorruptError
from storage.records.types import Json
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.base_models.config import CustomModel
from tasks.recipes.loader import load
from tasks.recipes.stored_config import comparable, filled, flatten, migrated, read_config
from tests.support.checkout import ROOT
from trainer.losses import CustomLoss, M2po, PpoClip

OLD = ROOT / "tests" / "old_run" / "all_variants"
RECIPE = str(OLD / "recipe.yaml")


@pytest.fixture
def old(memory_store: ObjectStore) -> ObjectStore:
    """The sub-store of the old run."""
    memory_store.create("runs/old-1/run.json", (OLD / "run.json").read_bytes())
    return runs.open_run(memory_store, "old-1")


def stored() -> Json:
    config: Json = json.loads((OLD / "run.json").read_bytes())["config"]
    return config


def test_the_configuration_of_an_old_run_equals_its_recipe(old: ObjectStore) -> None:
    config = read_config(old)
    assert config == load(RECIPE)
    losses = [policy.train.loss for policy in config.policies.values()]
    assert losses == [
        PpoClip(clip_low=0.1, dual_clip=3.0),
        M2po(m2_form="water_filled", m2_threshold=0.04, aggregate="constant", constant_length=40),
    ]


def test_an_old_run_is_resumed_with_its_recipe_and_refused_with_another(
    memory_store: ObjectStore, old: ObjectStore
) -> None:
    wanted = load(RECIPE).model_dump(mode="json")
    assert runs.check_restart(memory_store, "old-1", wanted, filled) is None
    assert runs.create_run(memory_store, "old-1", wanted, fill_defaults=filled).prefix == old.prefix
    other = load(RECIPE, {"policies.solver.train.loss.clip_low": 0.2}).model_dump(mode="json")
    with pytest.raises(
        ConfigError, match=r"loss\.clip_low is 0\.1 there, 0\.2 here; use the same settings"
    ):
        runs.check_restart(memory_store, "old-1", other, filled)
    other = load(RECIPE, {"policies.solver.train.loss": {"name": "m2po"}}).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"loss\.name is 'ppo_clip' there, 'm2po' here"):
        runs.check_restart(memory_store, "old-1", other, filled)


def test_only_settings_of_unselected_variants_are_removed() -> None:
    before = stored()
    after = migrated(before)
    solver, verifier = (after["policies"][name]["train"]["loss"] for name in ("solver", "verifier"))
    assert solver == {
        "name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": 3.0, "aggregate": "token_mean",
        "constant_length": None,
    }  # fmt: skip
    assert verifier == {
        "name": "m2po", "dual_clip": None, "m2_form": "water_filled", "m2_threshold": 0.04, "aggregate": "constant",
        "constant_length": 40,
    }  # fmt: skip
    assert before == stored()
    for config in (before, after):
        for policy in config["policies"].values():
            del policy["train"]["loss"]
    assert after["policies"]["solver"]["train"] == before["policies"]["solver"]["train"]
    assert after["rollout"] == before["rollout"]
    assert [policy["model"] for policy in after["policies"].values()] == [
        {"tiny": before["policies"]["solver"]["model"]["tiny"]},
        {"hub": "Qwen/Qwen3-1.7B"},
    ]
    assert after["data"]["prompts"] == {
        "builtin": "chained_addition",
        "split": "train",
        "limit": None,
        "seed": 3,
    }
    assert after["evaluation"]["prompts"] == {
        "hub": "openai/gsm8k", "hub_config": "main", "split": "test", "question": "question", "answer": "answer",
        "answer_after": "####", "limit": 500, "seed": 0,
    }  # fmt: skip
    assert after["data"]["sample"] == [{"name": "fifo"}, {"name": "edf"}]
    assert after["data"]["advantage"] == before["data"]["advantage"]


def test_a_configuration_of_this_release_is_not_changed() -> None:
    config = load(RECIPE).model_dump(mode="json")
    assert migrated(config) == config == filled(config)


def test_a_setting_of_no_variant_is_refused_with_its_key(memory_store: ObjectStore) -> None:
    config = stored()
    config["policies"]["solver"]["train"]["loss"]["clip"] = 0.2
    config["policies"]["verifier"]["train"]["loss"]["name"] = "grpo"
    run = runs.create_run(memory_store, "strange", config)
    with pytest.raises(CorruptError) as caught:
        read_config(run)
    assert (
        "does not fit this release: policies.solver.train.loss.clip: Extra inputs are not "
        "permitted; " in str(caught.value)
    )
    assert (
        "policies.verifier.train.loss: Input tag 'grpo' found using name() does not match"
        in str(caught.value)
    )
    assert filled(config) == config


def test_missing_defaults_of_a_stored_config_are_added() -> None:
    config = load(RECIPE).model_dump(mode="json")
    del config["policies"]["solver"]["train"]["anchor_every"]
    assert filled(config) == load(RECIPE).model_dump(mode="json")
    assert filled({"steps": "none any more"}) == {"steps": "none any more"}


def test_configurations_that_differ_in_the_budget_alone_are_comparable() -> None:
    config = load(RECIPE).model_dump(mode="json")
    larger = load(RECIPE, {"budget.hours": 8}).model_dump(mode="json")
    other = load(RECIPE, {"budget.hours": 8, "steps": 5}).model_dump(mode="json")
    earlier = {key: value for key, value in config.items() if key != "budget"}
    assert comparable(config) == comparable(larger) == comparable(earlier) == earlier
    assert comparable(other) == {**earlier, "steps": 5}
    assert comparable({"steps": "none", "budget": {}}) == {"steps": "none"}


def test_a_stored_configuration_with_import_paths_is_read_without_importing(
    memory_store: ObjectStore,
) -> None:
    config = load(RECIPE).model_dump(mode="json")
    path = "nowhere.at_all:Mine"
    config["policies"]["solver"]["train"]["loss"] = {"name": "custom", "path": path}
    config["policies"]["solver"]["model"] = {"custom": path}
    config["data"] |= {
        "prompts": {"custom": path},
        "curate": [{"name": path}],
        "filter": [{"name": path}],
        "sample": [path],
    }
    read = read_config(runs.create_run(memory_store, "with-code", config))
    assert read.policies["solver"].train.loss == CustomLoss(path=path)
    assert read.policies["solver"].model == CustomModel(custom=path)
    assert read.data.prompts == CustomPrompts(custom=path)
    assert [each.name for each in (*read.data.curate, *read.data.filter, *read.data.sample)] == [
        path
    ] * 3


def test_the_end_of_a_long_dotted_key_is_a_digest() -> None:
    """A key of megabytes would be copied for each of the thousands of settings below it."""
    assert list(flatten({"a" * 100: {"b" * 99: 1}})) == [f"{'a' * 100}.{'b' * 99}"]
    nested: Json = {"x" * 1_000_000: {"a": {"b": 1, "c": 2}, "b": 1}}
    keys = list(flatten(nested))
    assert (len(keys), len(set(keys))) == (3, 3)
    assert all(re.fullmatch("x{200}-[0-9a-f]{8}", key) for key in keys)


def test_a_key_that_each_fault_below_it_would_copy_is_refused(memory_store: ObjectStore) -> None:
    """With 50,000 unknown settings below a key of 450 kB the process ended for want of memory."""
    policies = {"x" * 1_001: {str(number): 1 for number in range(9)}}
    run = runs.create_run(memory_store, "r", {**stored(), "policies": policies})
    with pytest.raises(CorruptError, match=r"runs/r/run.json does not fit .*: a key has 1,001 cha"):
        read_config(run)
