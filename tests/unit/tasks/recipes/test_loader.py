import json
import shutil
from pathlib import Path

import pytest

from data_ops.prompts import BuiltinPrompts, FilePrompts, HubPrompts
from rollout.config import RegionConfig
from storage.errors import ConfigError
from tasks.base_models.config import FolderModel, TinyBase, TinyModel
from tasks.recipes import yaml_file
from tasks.recipes.loader import absolute_paths, known_recipes, load, portable
from tasks.recipes.run_config import MIRRORS_MAX, RunConfig
from tasks.recipes.source import dump, parse
from tests.support.checkout import ROOT
from trainer.losses import CustomLoss, M2po, PpoClip

RECIPE = """\
name: mine
steps: 10
policies:
  solver:
    model: {tiny: {}}
    batch_size: 32
    sampling: {max_new_tokens: 44}
data:
  prompts: {builtin: chained_addition}
rollout:
  workflow: {name: single_turn}
"""


def error_of(recipe: str, **overrides: object) -> str:
    with pytest.raises(ConfigError) as raised:
        load(recipe, overrides)
    return str(raised.value)


def with_line(after: str, *lines: str) -> str:
    """RECIPE with lines inserted after the line `after`."""
    head, tail = RECIPE.split(after + "\n")
    return head + after + "\n" + "".join(line + "\n" for line in lines) + tail


RECIPES = sorted(path.stem for path in ROOT.glob("recipes/*.yaml"))


def test_the_recipes_for_gpus_are_shipped() -> None:
    assert {"gsm8k_qwen3", "math_qwen3_1.7b", "math_qwen3_8b", "math_multi_agent_qwen3_8b"} < {
        *RECIPES
    }


@pytest.mark.parametrize("name", RECIPES)
def test_each_shipped_recipe_is_valid(name: str) -> None:
    config = load(name)
    assert "solver" in config.policies
    assert name in known_recipes()


def test_the_default_recipe_agrees_with_its_comments() -> None:
    config = load("multi_policy_tiny")
    assert list(config.policies) == ["solver", "verifier"]
    assert [policy.train.lr for policy in config.policies.values()] == [5e-5, 1e-4]
    assert [policy.sampling.max_new_tokens for policy in config.policies.values()] == [44, 52]
    assert config.rollout.workflow.name == "actor_and_verify"
    assert {name: region.workers for name, region in config.rollout.regions.items()} == {
        "us-east": 1,
        "eu-west": 1,
    }
    assert config.evaluation is not None
    assert config.evaluation.prompts.limit == 500


def test_yaml_text_is_accepted_as_a_recipe() -> None:
    assert load(RECIPE).policies["solver"].batch_size == 32


def test_a_recipe_path_is_read_and_named_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RECIPE.replace("steps: 10", "steps: ten"))
    assert error_of(str(file)) == f"{file}, line 2: steps: must be a whole number, not 'ten'"


def test_an_unknown_recipe_is_refused_with_a_list_of_recipes() -> None:
    message = error_of("multi_polcy_tiny")
    assert message.startswith("multi_polcy_tiny: no such recipe; give a file, or one of ")
    assert "multi_policy_tiny" in message


def test_an_unknown_key_is_reported_with_its_line_and_the_intended_key() -> None:
    text = with_line("    batch_size: 32", "    train:", "      lrr: 1.0")
    assert (
        error_of(text) == "recipe, line 8: policies.solver.train.lrr: unknown key; did you mean lr?"
    )


def test_a_key_in_the_wrong_section_is_reported_with_the_right_one() -> None:
    message = error_of("max_staleness: 4\n" + RECIPE)
    assert message == "recipe, line 1: max_staleness: unknown key; did you mean data.max_staleness?"


def test_a_key_without_similar_ones_is_reported_with_all_keys() -> None:
    message = error_of(RECIPE.replace("{name: single_turn}", "{name: single_turn, zzz: 1}"))
    assert message == (
        "recipe, line 11: rollout.workflow.zzz: unknown key; "
        "known keys here: args, name, reward, reward_timeout_s, roles, timeout_s"
    )


def test_all_errors_are_reported_together_in_line_order() -> None:
    text = RECIPE.replace("steps: 10", "steps: 0").replace("tiny: {}", "tiny: {}, path: models/x")
    assert error_of(text + "colour: red\n").splitlines() == [
        "recipe: 3 problems",
        "  recipe, line 2: steps: must be greater than or equal to 1, not 0",
        "  recipe, line 5: policies.solver.model: needs exactly one of tiny, path, hub, custom, run "
        "and registered; found tiny and path",
        "  recipe, line 12: colour: unknown key; known keys here: budget, data, evaluation, gate, "
        "log_every_s, log_every_steps, log_level, name, policies, rollout, "
        "seed, steps, supervise, tracking",
    ]


def test_of_thousands_of_errors_the_first_ones_are_described() -> None:
    text = RECIPE + "".join(f"k{number}: 1\n" for number in range(1_000))
    first, *lines, last = error_of(text).splitlines()
    assert (first, len(lines), last) == ("recipe: 1000 problems", 50, "  and 950 more")


def test_negative_staleness_is_refused() -> None:
    message = error_of(RECIPE, **{"data.max_staleness": -1})
    assert message == "--set data.max_staleness: must be greater than or equal to 0, not -1"


def test_a_negative_seed_is_refused() -> None:
    assert error_of(RECIPE, seed=-1) == "--set seed: must be greater than or equal to 0, not -1"


def test_a_negative_seed_of_the_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.prompts\.seed"):
        load("single_policy_tiny", {"data.prompts.seed": -1})


def test_a_batch_not_divisible_by_its_minibatches_is_refused() -> None:
    message = error_of(RECIPE, **{"policies.solver.train.minibatches": 5})
    assert message.startswith(
        "recipe, line 4: policies.solver: batch_size 32 is not divisible by train.minibatches 5"
    )


def test_a_missing_section_is_named() -> None:
    message = error_of(RECIPE.replace("data:\n  prompts: {builtin: chained_addition}\n", ""))
    assert message == "recipe: data: is missing; add it"


def test_a_policy_missing_for_a_workflow_is_named() -> None:
    message = error_of(RECIPE.replace("single_turn", "actor_and_verify"))
    assert message == (
        "recipe, line 11: rollout.workflow.name: actor_and_verify asks for the policy verifier, "
        "which policies lacks (it "
        "has solver); add policies.verifier, or name one that plays it in roles: {verifier: solver}"
    )


def test_one_policy_can_have_two_roles() -> None:
    text = RECIPE.replace(
        "{name: single_turn}", "{name: actor_and_verify, roles: {verifier: solver}}"
    )
    assert load(text).rollout.workflow.roles == {"verifier": "solver"}


def test_a_role_unknown_to_the_workflow_is_reported_with_a_similar_one() -> None:
    text = RECIPE.replace(
        "{name: single_turn}",
        "{name: actor_and_verify, roles: {verifer: solver, verifier: solver}}",
    )
    message = error_of(text)
    assert message == (
        "recipe, line 11: rollout.workflow.roles.verifer: actor_and_verify has no such role; did "
        "you mean verifier?"
    )


def test_a_policy_without_a_role_is_refused() -> None:
    text = with_line("    batch_size: 32", "  idle:", "    model: {tiny: {}}")
    assert error_of(text).startswith(
        "recipe, line 7: policies.idle: no role of single_turn is played by it"
    )


@pytest.mark.parametrize(
    "name", ["worker", "/worker", "rollout/", "s3://u:p@b/k", "rollout/a\0", "rollout/\x1b[2J"]
)
def test_a_deployment_that_prefect_cannot_have_is_refused(name: str) -> None:
    setting = "rollout.regions.default.deployment"
    assert error_of(RECIPE, **{setting: name}).endswith(
        "must be written as FLOW/DEPLOYMENT, as `prefect deployment ls` lists it"
    )
    assert load(RECIPE, {setting: "rollout/worker"}).rollout.regions["default"].deployment


def test_an_unknown_workflow_and_filter_are_reported_with_lists_of_names() -> None:
    message = error_of(RECIPE.replace("single_turn", "singl_turn"))
    assert message.startswith("recipe, line 11: rollout.workflow.name: ")
    assert "single_turn" in message
    assert error_of(RECIPE, **{"data.filter": ["zero_advantag"]}) == (
        "--set data.filter: data.filter.0: 'zero_advantag' is not known; use one of "
        "zero_advantage, "
        "or an import path like package.module:Name"
    )
    assert error_of(RECIPE, **{"data.sample": [{"name": "lifo"}]}) == (
        "--set data.sample: data.sample.0: 'lifo' is not known; use one of edf, fifo, "
        "or an import path like package.module:Name"
    )
    assert error_of(RECIPE, **{"data.sample": [3]}).endswith(
        "data.sample.0: must be a section of `key: value` lines, not 3"
    )


def test_broken_lines_of_a_prompt_file_are_named_before_anything_starts(tmp_path: Path) -> None:
    good = json.dumps({"question": "1+1", "answer": "2"})
    (tmp_path / "train.jsonl").write_text(f"{good}\n{{broken\n{good}\n")
    message = error_of(RECIPE, **{"prompts.path": str(tmp_path / "train.jsonl")})
    assert message.startswith("--set prompts.path: data.prompts.path:")
    assert "line 2" in message


def test_a_missing_prompt_file_is_reported_with_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    message = error_of(RECIPE, **{"prompts.path": str(tmp_path / "trian.jsonl")})
    assert message == (
        f"--set prompts.path: data.prompts.path: {tmp_path}/trian.jsonl does not exist; did you "
        "mean train.jsonl?"
    )


def test_overriding_the_prompts_removes_the_prompts_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    prompts = load(RECIPE, {"prompts.path": "train.jsonl"}).data.prompts
    assert prompts == FilePrompts(path=str(tmp_path / "train.jsonl"))


def test_evaluation_on_the_training_set_is_refused() -> None:
    text = RECIPE + "evaluation:\n  prompts: {builtin: chained_addition, split: train, limit: 5}\n"
    assert error_of(text).startswith(
        "recipe, line 13: evaluation.prompts: is the training set itself (split train)"
    )


def test_an_endless_evaluation_is_refused() -> None:
    text = RECIPE + "evaluation:\n  prompts: {builtin: chained_addition, split: test}\n"
    assert error_of(text) == (
        "recipe, line 13: evaluation.prompts: a built-in source is endless; set limit, for example "
        "limit: 500"
    )


def test_an_evaluation_of_too_many_prompts_is_refused() -> None:
    prompts = "{builtin: chained_addition, split: test, limit: 100001}"
    assert error_of(f"{RECIPE}evaluation:\n  prompts: {prompts}\n") == (
        "recipe, line 13: evaluation.prompts.limit: 100,001 prompts are too many for an "
        "evaluation; at most 100,000 are played"
    )


def test_answers_longer_than_the_context_are_refused() -> None:
    message = error_of(RECIPE.replace("44", "512"))
    assert message == (
        "recipe, line 7: policies.solver.sampling.max_new_tokens: 512 leaves no room for a prompt: "
        "rollout.engine.max_tokens is 512; lower the one or raise the other"
    )


def test_greedy_sampling_is_refused_for_training() -> None:
    message = error_of(RECIPE, **{"policies.*.sampling.temperature": 0})
    assert message.startswith(
        "--set policies.*.sampling.temperature: policies.solver.sampling.temperature: greedy tokens"
    )


def test_groups_of_one_are_refused_with_a_filter_that_drops_them() -> None:
    message = error_of(RECIPE, **{"data.samples_per_prompt": 1})
    assert "the filter zero_advantage drops everything; use 2 or more" in message


def test_an_order_above_the_episode_limit_is_refused() -> None:
    most = {"data.prompts_per_order": 2**13, "data.samples_per_prompt": 2**3}
    assert load(RECIPE, most).data.prompts_per_order == 2**13
    assert error_of(RECIPE, **most | {"data.prompts_per_order": 2**13 + 1}) == (
        "--set data.prompts_per_order: 8,193 prompts with 8 samples each are 65,544 episodes in "
        "one order, and at most 65,536 "
        "are played; lower prompts_per_order or samples_per_prompt"
    )
    assert error_of(RECIPE, **{"data.samples_per_prompt": 2**14 + 1}).startswith(
        "--set data.samples_per_prompt: 4 prompts with 16,385 samples each are 65,540 episodes in "
        "one order"
    )


WITHOUT_EFFECT = {
    "loss: {clip_low: 0.1}": ("clip_low", "name: m2po", "name: ppo_clip"),
    "loss: {name: m2po, clip_high: 0.2}": ("clip_high", "name: m2po", "name: ppo_clip"),
    "loss: {name: ppo_clip, m2_threshold: 0.01}": ("m2_threshold", "name: ppo_clip", "name: m2po"),
    "loss: {name: ppo_clip, m2_form: water_filled}": ("m2_form", "name: ppo_clip", "name: m2po"),
    "loss: {constant_length: 100}": (
        "constant_length",
        "aggregate: token_mean",
        "aggregate: constant",
    ),
}


@pytest.mark.parametrize(("loss", "words"), WITHOUT_EFFECT.items())
def test_a_setting_of_an_unselected_loss_is_refused(loss: str, words: tuple[str, str, str]) -> None:
    key, selected, wanted = words
    text = with_line("    batch_size: 32", "    train:", f"      {loss}")
    assert error_of(text) == (
        f"recipe, line 8: policies.solver.train.loss.{key}: has no effect with {selected}; leave "
        f"it out, or set {wanted}"
    )


def test_a_setting_of_the_selected_loss_is_accepted_with_any_value() -> None:
    for loss in (
        "{name: ppo_clip, clip_low: 0.1, dual_clip: 3}",
        "{m2_form: token_mask, m2_threshold: 0.5, dual_clip: 3}",
        "{aggregate: constant, constant_length: 9}",
        "{aggregate: token_mean, constant_length: null}",
    ):
        load(with_line("    batch_size: 32", f"    train: {{loss: {loss}}}"))


def test_settings_of_prompts_and_of_the_penalty_without_effect_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    path = {"prompts.path": str(tmp_path / "a.jsonl")}
    assert error_of(RECIPE, **{"prompts.answer_after": "####"}) == (
        "--set prompts.answer_after: data.prompts.answer_after: has no effect with builtin: "
        "chained_addition; leave it out, "
        "or set path or hub or window"
    )
    assert error_of(RECIPE, **path, **{"prompts.split": "test"}) == (
        f"--set prompts.split: data.prompts.split: has no effect with path: {tmp_path}/a.jsonl; "
        "leave it out, "
        "or set builtin or hub"
    )
    assert error_of(RECIPE, **path, **{"data.prompts.hub_config": "main"}).endswith(
        "a.jsonl; leave it out, or set hub"
    )
    assert error_of(RECIPE, **{"data.advantage.overlong_max_tokens": 40}) == (
        "--set data.advantage.overlong_max_tokens: has no effect with overlong_tokens: 0; leave it "
        "out, or set overlong_tokens"
    )
    load(RECIPE, {"data.advantage.overlong_max_tokens": 40, "data.advantage.overlong_tokens": 8})


def test_a_section_without_a_valid_variant_is_reported_with_a_list_of_variants() -> None:
    key = "policies.solver.train.loss"
    assert error_of(RECIPE, **{key: {"name": "grpo"}}) == (
        f"--set {key}: {key}.name: must be one of 'ppo_clip', 'm2po' or 'custom', not 'grpo'"
    )
    assert error_of(RECIPE, **{key: {"name": ["m2po"]}}).endswith("'custom', not ['m2po']")
    assert (
        error_of(RECIPE, **{key: "ppo_clip"})
        == f"--set {key}: must be a section of `key: value` lines, not 'ppo_clip'"
    )
    assert error_of(RECIPE.replace("{builtin: chained_addition}", "{split: test}")) == (
        "recipe, line 9: data.prompts: needs exactly one of builtin, path, hub, window and custom; found "
        "none"
    )
    assert error_of(RECIPE.replace("{tiny: {}}", "{path: null}")) == (
        "recipe, line 5: policies.solver.model: needs exactly one of tiny, path, hub, custom, run "
        "and registered; found none"
    )


def test_an_unknown_field_of_a_variant_is_reported_like_any_other() -> None:
    key = "policies.solver.train.loss"
    assert error_of(RECIPE, **{f"{key}.name": "ppo_clip", f"{key}.clip_lo": 1}).endswith(
        "unknown key; did you mean clip_low?"
    )
    assert error_of(RECIPE, **{key: {"name": "ppo_clip", "max_staleness": 1}}).endswith(
        "did you mean data.max_staleness?"
    )
    assert error_of(RECIPE, **{"data.clip_high": 1}) == (
        "--set data.clip_high: unknown key; did you mean policies.NAME.train.loss.clip_high?"
    )
    assert error_of(RECIPE, **{"policies.solver.model.tiny.hiden": 8}) == (
        "--set policies.solver.model.tiny.hiden: unknown key; did you mean hidden?"
    )
    assert error_of(RECIPE, **{"policies.solver.model.tiny.hidden": 1}).endswith(
        "must be greater than or equal to 2, not 1"
    )


def test_the_error_in_a_list_item_suggests_a_field_of_its_selected_variant() -> None:
    assert error_of(RECIPE, **{"data.filter": [{"name": "zero_advantage", "arg": 1}]}).endswith(
        "known keys here: name"
    )
    assert error_of(RECIPE, **{"data.filter": ["edf:Edf", {"name": "a.b:C", "arg": 1}]}).endswith(
        "did you mean args?"
    )


def test_a_setting_without_effect_of_a_base_is_refused_with_its_line(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(
        with_line("    batch_size: 32", "    train:", "      loss:", "        constant_length: 9")
    )
    assert error_of(
        f"extends: {base}\npolicies: {{solver: {{train: {{loss: {{dual_clip: 3}}}}}}}}\n"
    ) == (
        f"{base}, line 9: policies.solver.train.loss.constant_length: has no effect with "
        "aggregate: token_mean; "
        "leave it out, or set aggregate: constant"
    )


def test_the_place_of_registered_weights_is_refused_where_no_model_is_registered() -> None:
    where = "tracking: {register_models: false"
    assert error_of(f"{RECIPE}{where}, registered_weights: reference}}\n").endswith(
        "tracking.registered_weights: has no effect with register_models: false; leave it out, or "
        "set register_models: true"
    )
    assert load(f"{RECIPE}{where}}}\n").tracking.registered_weights == "copy"


def test_null_for_a_setting_of_an_unselected_variant_is_ignored(tmp_path: Path) -> None:
    text = with_line(
        "    batch_size: 32",
        "    train: {loss: {name: ppo_clip, m2_threshold: null, dual_clip: null}}",
    )
    assert load(text).policies["solver"].train.loss == PpoClip()
    assert load(
        RECIPE, {"prompts.path": None, "prompts.split": "test"}
    ).data.prompts == BuiltinPrompts(builtin="chained_addition", split="test")


def test_a_recipe_does_not_inherit_fields_of_a_variant_that_it_replaces(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    base = tmp_path / "base.yaml"
    base.write_text(
        with_line(
            "    batch_size: 32",
            "    train: {loss: {name: m2po, m2_form: water_filled, m2_threshold: 0.5, dual_clip: "
            "3, aggregate: constant, "
            "constant_length: 9}}",
        ).replace(
            "{builtin: chained_addition}", "{builtin: chained_addition, split: test, seed: 7}"
        )
    )

    def over(*lines: str) -> RunConfig:
        return load("\n".join([f"extends: {base}", *lines, ""]))

    same = (
        over("policies: {solver: {train: {loss: {name: m2po, m2_threshold: 0.3}}}}")
        .policies["solver"]
        .train.loss
    )
    assert same == M2po(
        m2_form="water_filled",
        m2_threshold=0.3,
        dual_clip=3,
        aggregate="constant",
        constant_length=9,
    )
    other = (
        over("policies: {solver: {train: {loss: {name: ppo_clip}}}}").policies["solver"].train.loss
    )
    assert other == PpoClip(dual_clip=3, aggregate="constant", constant_length=9)
    plain = over(
        "policies: {solver: {train: {loss: {name: ppo_clip, aggregate: token_mean}}}}"
    ).policies["solver"]
    assert plain.train.loss == PpoClip(dual_clip=3)
    assert over("data: {prompts: {hub: openai/gsm8k}}").data.prompts == HubPrompts(
        hub="openai/gsm8k", split="test", seed=7
    )
    folder = (
        over(f"policies: {{solver: {{model: {{path: {tmp_path}/model}}}}}}")
        .policies["solver"]
        .model
    )
    assert folder == FolderModel(path=str(tmp_path / "model"))
    assert over("policies: {solver: {model: {tiny: {hidden: 32}}}}").policies[
        "solver"
    ].model == TinyModel(tiny=TinyBase(hidden=32))


def test_a_setting_of_an_unselected_variant_is_refused_at_its_line(
    tmp_path: Path,
) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(
        with_line("    batch_size: 32", "    train: {loss: {name: m2po, m2_threshold: 0.5}}")
    )
    text = f"extends: {base}\npolicies:\n  solver:\n    train:\n      loss: {{name: ppo_clip, m2_form: token_mask}}\n"
    assert error_of(text) == (
        "recipe, line 5: policies.solver.train.loss.m2_form: has no effect with name: ppo_clip; "
        "leave it out, or set name: m2po"
    )


def test_code_named_by_a_recipe_is_checked_before_anything_starts() -> None:
    here = __name__
    loss = {"name": "custom", "path": f"{here}:Patient"}
    key = "policies.solver.train.loss"
    assert error_of(RECIPE, **{key: loss}).startswith(
        f"--set {key}: {key}.path: {here}:Patient has no prepare and no token_losses; a loss is a "
        "class with prepare("
    )
    right = {"name": "custom", "path": "trainer.losses.ppo_clip:PpoClip", "args": {"clip_low": 0.1}}
    assert load(RECIPE, {key: right}).policies["solver"].train.loss == CustomLoss(
        path=right["path"], args=right["args"]
    )
    assert error_of(RECIPE, **{"prompts.custom": f"{here}:Patient"}).startswith(
        f"--set prompts.custom: data.prompts.custom: {here}:Patient has no size and no prompt; a "
        "source of prompts is a class "
        "with size() and prompt(index) (docs/extending/sources.md)"
    )
    assert error_of(RECIPE, **{"policies.solver.model.custom": "os:system"}).startswith(
        "--set policies.solver.model.custom: os:system is part of Python's standard library"
    )
    assert error_of(RECIPE, **{key: {"name": "custom"}}).endswith(f"{key}.path: is missing; add it")


def test_another_variant_than_the_bases_drops_the_bases_settings_of_its_variant() -> None:
    loss = load(
        "multi_policy_tiny", {"policies.*.train.loss": {"name": "ppo_clip", "clip_low": 0.1}}
    )
    assert [policy.train.loss.clip_low for policy in loss.policies.values()] == [0.1, 0.1]
    text = "extends: gsm8k_qwen3\ndata: {prompts: {builtin: chained_addition, split: test}}\n"
    assert load(text).data.prompts.model_dump(exclude_defaults=True) == {
        "builtin": "chained_addition",
        "split": "test",
    }
    assert load(
        "extends: multi_policy_tiny\npolicies: {solver: {train: {loss: {dual_clip: 3}}}}\n"
    ).policies["solver"].train.loss.model_dump(exclude_defaults=True) == {"dual_clip": 3.0}


def test_of_two_incompatible_overrides_none_is_dropped() -> None:
    name, threshold = "policies.solver.train.loss.name", "policies.solver.train.loss.m2_threshold"
    for overrides in ({name: "ppo_clip", threshold: 0.5}, {threshold: 0.5, name: "ppo_clip"}):
        assert error_of(RECIPE, **overrides) == (
            f"--set {threshold}: has no effect with name: ppo_clip; leave it out, or set name: m2po"
        )
    assert error_of(RECIPE, **{"prompts.path": "a.jsonl", "prompts.hub": "openai/gsm8k"}).endswith(
        "data.prompts: needs exactly one of builtin, path, hub, window and custom; found path and hub"
    )


def test_invalid_workflow_arguments_are_reported_before_the_run() -> None:
    assert error_of(RECIPE, **{"rollout.workflow.args.rounds": 3}) == (
        "--set rollout.workflow.args.rounds: the workflow single_turn takes no such argument; it "
        "takes attempt_message"
    )


class NeedsRounds:
    roles = ("solver",)

    def __init__(self, reward: object, rounds: int) -> None: ...

    async def play(self, prompt: object, agents: object) -> None: ...


def test_a_missing_workflow_argument_is_reported_before_the_run() -> None:
    assert error_of(RECIPE, **{"rollout.workflow.name": f"{__name__}:NeedsRounds"}) == (
        f"recipe, line 11: rollout.workflow.args: do not fit the workflow {__name__}:NeedsRounds: "
        "missing a required argument: 'rounds'"
    )


class Crowd:
    roles = tuple(f"agent_{number:02}" for number in range(14))

    def __init__(self, reward: object) -> None: ...

    async def play(self, prompt: object, agents: object) -> None: ...


def test_policies_whose_names_fill_the_name_of_a_file_are_reported_before_the_run() -> None:
    policies = {role: {"model": {"tiny": {}}} for role in Crowd.roles}
    evaluation = {"prompts": {"builtin": "chained_addition", "split": "test", "limit": 5}}
    crowd = {
        "policies": policies,
        "data": {"prompts": {"builtin": "chained_addition"}},
        "rollout": {"workflow": {"name": f"{__name__}:Crowd"}},
    }
    assert load(yaml_file.write(crowd)).policies.keys() == set(Crowd.roles)
    assert error_of(yaml_file.write({**crowd, "evaluation": evaluation})) == (
        "recipe, line 1: policies: the file of an evaluation, which has the names of all 14 "
        "policies, would have a name of 257 bytes, and at most 255 are possible; use shorter "
        "names, or leave evaluation out"
    )


class Hasty:
    def __init__(self, timeout_s: float) -> None: ...

    def score(self, answer: str, prompt: object) -> float:
        return 1.0

    def close(self) -> None: ...


class Patient:
    async def keep(self, group: object) -> bool:
        return False


def test_async_methods_that_must_be_sync_and_the_reverse_are_reported_before_the_run() -> None:
    assert error_of(RECIPE, **{"rollout.workflow.reward": f"{__name__}:Hasty"}).startswith(
        f"--set rollout.workflow.reward: {__name__}:Hasty has a score that cannot be awaited: "
        "write async def score; "
    )
    assert error_of(RECIPE, **{"data.filter": [f"{__name__}:Patient"]}).startswith(
        f"--set data.filter: data.filter.0: {__name__}:Patient has a keep that would have to be "
        "awaited: write def keep without"
    )


def test_a_lease_shorter_than_two_heartbeats_is_refused() -> None:
    message = error_of(RECIPE, **{"rollout.lease_ttl_s": 3})
    assert message == (
        "--set rollout.lease_ttl_s: 3 s is too short for beats every 2 s "
        "(supervise.heartbeat_interval_s); use 4 or more"
    )


def test_a_heartbeat_limit_below_two_intervals_is_refused() -> None:
    message = error_of(RECIPE, **{"supervise.heartbeat_limit_s": 1})
    assert message.endswith("1 s would call members with beats every 2 s lost; use 4 or more")


def test_a_model_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    message = error_of(RECIPE, **{"policies.solver.model.path": str(tmp_path)})
    assert message.endswith(
        f"{tmp_path} holds no config.json; name a folder saved with save_pretrained"
    )


def test_invalid_names_are_refused() -> None:
    message = error_of(RECIPE + "  regions: {us/east: {workers: 1}}\n")
    assert message.startswith(
        "recipe, line 12: rollout.regions.us/east: a name is at most 60 letters, digits, - and _ "
        "only"
    )


@pytest.mark.parametrize(
    ("key", "value"), [("deployment", "rollout/mine"), ("mirror", "s3://eu/x")]
)
def test_settings_of_a_region_without_workers_are_refused(key: str, value: str) -> None:
    regions = f"  regions: {{us-east: {{}}, eu-west: {{workers: 0, {key}: '{value}'}}}}\n"
    assert error_of(RECIPE + regions) == (
        f"recipe, line 12: rollout.regions.eu-west.{key}: has no effect with workers: 0; leave it "
        "out, or set workers"
    )


def test_a_recipe_that_removes_a_region_drops_its_settings(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(RECIPE + "  regions: {us-east: {}, eu-west: {mirror: 's3://eu/x'}}\n")
    regions = load(str(base), {"rollout.regions.eu-west.workers": 0}).rollout.regions
    assert regions["eu-west"] == RegionConfig(workers=0)
    assert load(str(base), {}).rollout.regions["eu-west"].mirror == "s3://eu/x"


def test_a_recipe_without_workers_is_refused() -> None:
    message = error_of(RECIPE + "  regions: {us-east: {workers: 0}}\n")
    assert message.endswith(
        "rollout.regions has no worker at all; set workers: 1 or more in at least one region"
    )


def test_a_recipe_with_very_many_workers_is_refused_by_their_sum() -> None:
    most = "  regions: {us-east: {workers: 6000}, eu-west: {workers: 4000}}\n"
    assert load(RECIPE + most, {}).rollout.regions["us-east"].workers == 6000
    assert error_of(RECIPE + most.replace("4000", "4001")).endswith(
        "rollout.regions has 10,001 workers, and a run has at most 10,000; lower workers"
    )


def test_a_recipe_with_very_many_mirrors_is_refused() -> None:
    """gc opens a client for each mirror of each run."""

    def regions(num: int) -> str:
        return "".join(f"    r{n}: {{mirror: 's3://weights-{n}/x'}}\n" for n in range(num))

    text = RECIPE + "  regions:\n"
    assert len(load(text + regions(MIRRORS_MAX), {}).rollout.regions) == MIRRORS_MAX
    assert error_of(text + regions(MIRRORS_MAX + 1)).endswith(
        "rollout.regions has 33 mirrors, and a run has at most 32; leave mirror out where few "
        "workers are"
    )


def test_a_recipe_with_very_many_regions_is_refused() -> None:
    def regions(num: int) -> str:
        return "  regions:\n" + "".join(f"    r{n}: {{}}\n" for n in range(num))

    assert len(load(RECIPE + regions(1000), {}).rollout.regions) == 1000
    message = error_of(RECIPE + regions(1001))
    assert "rollout.regions: " in message
    assert "at most 1000 items" in message


def test_a_misspelt_section_in_an_override_is_reported_for_the_override() -> None:
    message = error_of(RECIPE, **{"policies.slover.train.lr": 1})
    assert message == (
        "--set policies.slover.train.lr: policies.slover.model: is missing; add it, or did you "
        "mean solver instead of slover?"
    )


def test_an_overridden_list_item_is_not_reported_at_the_line_it_replaced() -> None:
    text = RECIPE.replace("data:\n", "data:\n  filter:\n    - zero_advantage\n")
    assert error_of(text, **{"data.filter": ["foo"]}).startswith(
        "--set data.filter: data.filter.0: "
    )


def test_a_folder_in_place_of_a_prompt_file_is_reported_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert error_of(RECIPE, **{"prompts.path": str(tmp_path)}) == (
        f"--set prompts.path: data.prompts.path: {tmp_path} is a folder; name one file, such as "
        f"{tmp_path}/train.jsonl"
    )


def test_an_invalid_mirror_url_is_refused_without_repeating_credentials() -> None:
    region = {"rollout.regions.us-east.mirror": "s3://AKIA:hush@bucket/x"}
    message = error_of(RECIPE, **region)
    assert message.startswith(
        "--set rollout.regions.us-east.mirror: the store URL s3://…@bucket/x has more than"
    )
    assert "hush" not in message
    assert "unknown scheme 'gs'" in error_of(
        RECIPE, **{"rollout.regions.us-east.mirror": "gs://bucket/x"}
    )
    url = "s3://bucket/x?endpoint=http://127.0.0.1:9000&profile=eu"
    assert (
        load(RECIPE, {"rollout.regions.us-east.mirror": url}).rollout.regions["us-east"].mirror
        == url
    )


def test_a_mirror_folder_is_the_same_for_every_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    regions = load(
        RECIPE,
        {"rollout.regions.us-east.mirror": "near", "rollout.regions.eu-west.mirror": "s3://eu/x"},
    ).rollout.regions
    assert (regions["us-east"].mirror, regions["eu-west"].mirror) == (
        str(tmp_path / "near"),
        "s3://eu/x",
    )


def test_a_mirror_of_two_regions_is_refused_at_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    near, far = "rollout.regions.us-east.mirror", "rollout.regions.eu-west.mirror"
    for item, other in (
        ("s3://eu/x?profile=eu", "s3://eu/x/?profile=eu"),
        ("near", (tmp_path / "near").as_uri()),
    ):
        assert error_of(RECIPE, **{near: item, far: other}) == (
            f"--set {far}: is the mirror of us-east too, and both would copy into it; give each "
            "region its own bucket or prefix"
        )
    regions = load(
        RECIPE,
        {near: "s3://eu/x", far: "s3://eu/y", "rollout.regions.a": {}, "rollout.regions.b": {}},
    ).rollout.regions
    assert len(regions) == 4


def test_recipe_paths_as_overrides_refer_to_the_same_files_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (here / "base").mkdir(parents=True)
    elsewhere.mkdir()
    (here / "base/config.json").write_text("{}")
    for name in ("train.jsonl", "held.jsonl"):
        (here / name).write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    text = RECIPE.replace("{tiny: {}}", "{path: base}").replace(
        "{builtin: chained_addition}", "{path: train.jsonl}"
    )
    text += "  regions: {us-east: {mirror: near}, eu-west: {mirror: 's3://eu/x'}, mars: {}}\n"
    text += "evaluation: {prompts: {path: held.jsonl}}\n"
    monkeypatch.chdir(here)
    config = load(text)
    paths = absolute_paths(config)
    assert paths == {
        "data.prompts.path": str(here / "train.jsonl"),
        "evaluation.prompts.path": str(here / "held.jsonl"),
        "policies.solver.model.path": str(here / "base"),
        "rollout.regions.us-east.mirror": str(here / "near"),
    }
    monkeypatch.chdir(elsewhere)
    assert load(text, paths) == config
    assert absolute_paths(load("multi_policy_tiny")) == {}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("named", ["mine", "mine.yaml", "sub/other.yaml", "multi_policy_tiny"])
def test_a_recipe_is_the_same_in_a_process_of_another_folder(
    named: str, elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "recipes").mkdir(parents=True)
    (here / "sub").mkdir()
    (here / "recipes" / "mine.yaml").write_text(
        "extends: base\nname: mine\npolicies: {solver: {train: {lr: 5e-5}}}\n"
    )
    (here / "recipes" / "base.yaml").write_text("extends: single_policy_tiny\nsteps: 7\n")
    (here / "mine.yaml").write_text("extends: recipes/base.yaml\nname: in-the-folder\n")
    (here / "sub" / "other.yaml").write_text("extends: multi_policy_tiny\nseed: 5\n")
    monkeypatch.chdir(here)
    sent, meant = portable(named, elsewhere), load(named)
    if elsewhere:
        shutil.rmtree(here / "sub")
        shutil.rmtree(here / "recipes")
    monkeypatch.chdir(tmp_path)
    assert load(sent) == meant
    assert (sent == named) == (named == "multi_policy_tiny")


@pytest.mark.parametrize("named", ["mine.yaml", "./mine.yaml", "mine"])
def test_a_recipe_in_a_folder_whose_name_is_not_utf_8_is_refused(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "by\udcff"
    (here / "recipes").mkdir(parents=True)
    for folder in (here, here / "recipes"):
        (folder / "mine.yaml").write_text("extends: single_policy_tiny\n")
    monkeypatch.chdir(here)
    with pytest.raises(ConfigError, match=r"by\?.* is in a place whose name is not UTF-8"):
        load(named)
    assert load("single_policy_tiny").name


def test_a_recipe_given_as_text_is_sent_with_its_bases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("extends: single_policy_tiny\nsteps: 7\n")
    text = "extends: mine\nname: text\npolicies: {solver: {train: {lr: 5e-5}}}\n"
    monkeypatch.chdir(tmp_path)
    meant, sent = load(text), portable(text, elsewhere=False)
    assert portable(text, elsewhere=True) == sent
    monkeypatch.chdir("/")
    assert load(sent) == meant


def test_the_content_of_a_recipe_is_sent_unchanged() -> None:
    values = {
        "words": "😀 ä",
        "number": "1e-4",
        "small": 5e-05,
        "endless": float("inf"),
        "no": None,
        "yes": "yes",
        "list": [1, "2"],
    }
    source = parse("a: 1\n", "x")
    source.data = {"data": values}
    assert parse(dump(source), "y").data == {"data": values}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.curate", [{"name": "os:system", "args": {"command": "touch EVIL"}}]),
        ("data.filter", [{"name": "subprocess:Popen", "args": {"args": ["touch", "EVIL"]}}]),
        ("data.sample", ["os:_exit"]),
        ("rollout.workflow.name", "os:system"),
        ("rollout.workflow.reward", "time:sleep"),
        ("rollout.engine.name", "subprocess:Popen"),
        ("policies.solver.train.engine", "os:abort"),
    ],
)
def test_a_recipe_that_names_the_standard_library_is_refused_before_any_call(
    key: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = error_of(RECIPE, **{key: value})
    assert message.startswith(f"--set {key}: ")
    assert "is part of Python's standard library" in message or "is not an import path" in message
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_and_missing_methods_of_an_algorithm_are_reported_before_the_run() -> None:
    wrong = [{"name": "zero_advantage", "args": {"epsilon": 1}}]
    message = error_of(RECIPE, **{"data.sample": [NOT_ONE]})
    refused = "--set data.filter: data.filter.0.args: has no effect with name: zero_advantage; leave it out, or set name: "
    assert error_of(RECIPE, **{"data.filter": wrong}) == f"{refused}package.module:Name"
    assert (
        f"--set data.sample: data.sample.0: {NOT_ONE} has no arrange; a sampler is a class with "
        "arrange(draft)" in message
    )


NOT_ONE = "data_ops.algorithms.filters:ZeroAdvantage"


def test_unknown_engines_and_rewards_are_reported_with_lists_of_names() -> None:
    message = error_of(
        RECIPE,
        **{
            "rollout.engine.name": "warp",
            "policies.solver.train.engine": "warp",
            "rollout.workflow.reward": "maths",
        },
    )
    for key, known in (
        ("policies.solver.train.engine", "deepspeed, torch"), ("rollout.engine.name", "sglang, torch"), ("rollout.workflow.reward", "math"),
    ):  # fmt: skip
        assert f"--set {key}: '" in message
        assert f"is not known; use one of {known}, or an import path" in message


@pytest.mark.parametrize("device", ["warp9", "", "meta", "cuda:", "/dev/nvidia0"])
def test_a_text_that_is_no_device_of_torch_is_reported(device: str) -> None:
    text = error_of(
        RECIPE, **{"rollout.engine.device": device, "policies.solver.train.device": device}
    )
    for key in ("rollout.engine.device", "policies.solver.train.device"):
        assert f"--set {key}: {device!r} is not the name of a device; use cpu, cuda" in text
    elsewhere = {
        "policies.solver.train.engine": "elsewhere:Fast",
        "policies.solver.train.device": device,
        "rollout.engine.device": "cuda:1",
    }
    assert load(RECIPE, elsewhere).policies["solver"].train.device == device


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "policies.solver.train.betas",
            [0.1, 0.2, 0.3],
            "policies.solver.train.betas: must have at most 2 items, not [0.1, 0.2, 0.3]",
        ),
        (
            "policies.solver.train.betas",
            0.9,
            "policies.solver.train.betas: must be a list, not 0.9",
        ),
        (
            "data.prompts",
            {"path": "a.jsonl", "answer_after": ""},
            "data.prompts: data.prompts.answer_after: must have at least 1 character, not ''",
        ),
        (
            "data.task_runner.workers",
            3,
            "data.task_runner.workers: data.task_runner: name is missing; use one of threads, "
            "processes, dask, ray",
        ),
        (
            "data.filter",
            [{"args": {}}],
            "data.filter: data.filter.0: name is missing; use one of zero_advantage, or an import "
            "path like package.module:Name",
        ),
        (
            "data.filter.0",
            "zero_advantage",
            "data.filter.0: data.filter: is a list, which is replaced as a whole; write "
            "data.filter=[…, …]",
        ),
        (
            "rollout.lease_attempts_max",
            True,
            "rollout.lease_attempts_max: must be a number, not true",
        ),
        (
            "rollout.engine.max_tokens",
            True,
            "rollout.engine.max_tokens: must be a number, not true",
        ),
        (
            "policies.solver.train.loss.dual_clip",
            True,
            "policies.solver.train.loss.dual_clip: must be a number, not true",
        ),
        (
            "policies.solver.train.loss.dual_clip",
            1,
            "policies.solver.train.loss.dual_clip: must be greater than 1, not 1; null means no limit",
        ),
    ],
)
def test_a_wrong_setting_is_described_in_words_of_recipes(
    key: str, value: object, message: str
) -> None:
    assert error_of(RECIPE, **{key: value}) == f"--set {message}"


def test_a_mistake_of_a_recipe_as_a_whole_has_its_place_once() -> None:
    assert error_of(RECIPE, **{"rollout.regions.default.workers": 0}) == (
        "recipe: rollout.regions has no worker at all; set workers: 1 or more in at least one region"
    )


def test_regions_named_by_words_of_yaml_1_1_stay_apart() -> None:
    regions = with_line("rollout:", "  regions: {no: {workers: 1}, off: {workers: 2}, 1: {}}")
    assert {name: region.workers for name, region in load(regions).rollout.regions.items()} == {
        "no": 1,
        "off": 2,
        "1": 1,
    }
    assert load(RECIPE + "tracking: {enabled: off}\n").tracking.enabled is False


@pytest.mark.parametrize("dataset", ["", " ", "a\nb", "\x1b[31m"])
def test_a_name_of_the_held_out_set_that_cannot_be_shown_is_reported(dataset: str) -> None:
    held_out = {"prompts": {"builtin": "chained_addition", "split": "test", "limit": 5}}
    assert error_of(RECIPE, evaluation={**held_out, "dataset": dataset}) == (
        f"--set evaluation: evaluation.dataset: {dataset!r} cannot be shown as the name of a set; "
        "use printable characters"
    )
    assert load(RECIPE, {"evaluation": {**held_out, "dataset": "GSM8K, é"}}).evaluation is not None


def test_a_section_that_is_written_once_and_aliased_can_be_changed_in_one_place() -> None:
    filters = "  filter: [&a {name: zero_advantage, args: null}, *a]"
    named = load(with_line("data:", filters)).data.filter
    assert [each.name for each in named] == ["zero_advantage", "zero_advantage"]
    shared = "  regions: {x: &x {workers: 1}, y: *x}"
    recipe = with_line("rollout:", shared)
    regions = load(recipe, {"rollout.regions.x.workers": 3}).rollout.regions
    assert (regions["x"].workers, regions["y"].workers) == (3, 1)


def test_an_equals_sign_is_text() -> None:
    answer_after = "data: {prompts: {path: a.jsonl, answer_after: =}}\n"
    assert yaml_file.read(answer_after, "x").value == {
        "data": {"prompts": {"path": "a.jsonl", "answer_after": "="}}
    }


@pytest.mark.parametrize("experiment", ["", " ", "a\nb", "x" * 196])
def test_an_experiment_that_mlflow_cannot_have_is_reported(experiment: str) -> None:
    assert error_of(RECIPE, **{"tracking.experiment": experiment}) == (
        "--set tracking.experiment: MLflow's experiments have names of 1 to 195 printable "
        "characters; write such a name"
    )
    longest = load(RECIPE, {"tracking.experiment": "/team:é " + "x" * 187})
    assert len(longest.tracking.experiment) == 195


def test_a_split_that_the_built_in_source_does_not_have_is_reported() -> None:
    assert error_of(RECIPE, **{"data.prompts.split": "valid"}) == (
        "--set data.prompts.split: must be one of 'train' or 'test', not 'valid'"
    )
    assert error_of(RECIPE, **{"data.prompts.split": "v" * 1_000}) == (
        f"--set data.prompts.split: must be one of 'train' or 'test', not '{'v' * 56}…"
    )


def test_a_tiny_model_of_an_impossible_shape_is_reported() -> None:
    assert error_of(RECIPE, **{"policies.solver.model.tiny.heads": 5}) == (
        "recipe, line 5: policies.solver.model.tiny: heads 5 is not divisible by kv_heads 2: "
        "each key and value head serves the same number of heads; change either"
    )


def test_an_engine_installed_only_on_the_workers_is_not_imported_locally() -> None:
    config = load(
        RECIPE,
        {
            "rollout.engine.name": "elsewhere.engines:Fast",
            "policies.solver.train.engine": "elsewhere:Fast",
        },
    )
    assert config.rollout.engine.name == "elsewhere.engines:Fast"


@pytest.mark.parametrize(
    ("changes", "engines"),
    [
        ({}, 0),
        ({"rollout.regions.default.workers": 2}, 2),
        ({"evaluation": {"prompts": {"builtin": "chained_addition", "limit": 5}}}, 2),
    ],
)
def test_sglang_servers_by_url_serve_one_engine(changes: dict[str, object], engines: int) -> None:
    changes = {
        "rollout.engine.name": "sglang",
        "rollout.engine.sglang.urls": ["http://127.0.0.1:30000"],
        **changes,
    }
    if engines:
        assert f"urls: would serve {engines} engines" in error_of(RECIPE, **changes)
    else:
        assert len(load(RECIPE, changes).rollout.engine.sglang.urls) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        (
            {"policies.solver.train.adapter.rank": 9},
            "9 is above rollout.engine.sglang.adapter_rank 8",
        ),
        ({"policies.solver.train.adapter.publish": "merged"}, "no policy publishes adapters"),
    ],
)
def test_servers_that_apply_adapters_have_room_for_each(
    changes: dict[str, object], message: str
) -> None:
    changes = {
        "rollout.engine.name": "sglang",
        "rollout.engine.sglang.adapter_rank": 8,
        "policies.solver.train.adapter.name": "lora",
        "policies.solver.train.adapter.rank": 8,
        "policies.solver.train.adapter.publish": "adapter",
        **changes,
    }
    if message:
        assert message in error_of(RECIPE, **changes)
    else:
        assert load(RECIPE, changes).rollout.engine.sglang.adapter_rank == 8


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:30000", "must be an address of this machine with a port"),
        ("http://127.0.0.1", "must be an address of this machine with a port"),
        ("http://127.0.0.1:99999", "must be an address of this machine with a port"),
        ("http://[::1", "must be an address of this machine with a port"),
        ("ftp://127.0.0.1:21", "must be an address of this machine with a port"),
        ("http://user:secret@127.0.0.1:30000", "set ASTRAFLOW_SGLANG_API_KEY instead"),
    ],
)
def test_an_address_of_a_server_that_cannot_be_used_is_refused(url: str, message: str) -> None:
    error = error_of(
        RECIPE, **{"rollout.engine.name": "sglang", "rollout.engine.sglang.urls": [url]}
    )
    assert message in error
    assert "secret" not in error


def test_settings_of_sglang_have_no_effect_on_another_engine() -> None:
    assert "rollout.engine.sglang" in error_of(
        RECIPE, **{"rollout.engine.sglang.tensor_parallel": 2}
    )


def test_a_model_folder_with_a_symbolic_link_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "theirs").write_text("secret")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "theirs")
    text = RECIPE.replace("{tiny: {}}", "{path: " + str(tmp_path / "model") + "}")
    assert error_of(text).startswith(
        f"recipe, line 5: policies.solver.model.path: {tmp_path}/model/tokenizer.json is a "
        f"symbolic link to {tmp_path}/theirs; "
    )


def test_a_time_in_clock_notation_is_not_a_number() -> None:
    assert (
        error_of("single_policy_tiny", **{"steps": "1:30"})
        == "--set steps: must be a whole number, not '1:30'"
    )


def test_a_very_long_key_is_shortened_in_the_message() -> None:
    error = error_of("single_policy_tiny", **{"a" * 5000: 1})
    assert "aaa…" in error
    assert "unknown key" in error
    assert len(error) < 1000


def test_a_schedule_of_the_learning_rate_ends_with_the_run_unless_it_has_an_end() -> None:
    falling = with_line("    batch_size: 32", "    train: {lr_schedule: cosine, warmup_steps: 3}")
    assert load(falling).policies["solver"].train.schedule_steps == 10
    assert load(falling, {"steps": 25}).policies["solver"].train.schedule_steps == 25
    default = falling.replace("steps: 10\n", "", 1)
    assert load(default).policies["solver"].train.schedule_steps == 80
    with_end = falling.replace("cosine,", "cosine, schedule_steps: 7,")
    assert load(with_end).policies["solver"].train.schedule_steps == 7
    assert load(RECIPE).policies["solver"].train.schedule_steps is None


def test_a_share_of_the_learning_rate_without_a_schedule_is_refused() -> None:
    assert (
        "policies.solver.train.lr_min_share: has no effect with lr_schedule: constant"
        in error_of(with_line("    batch_size: 32", "    train: {lr_min_share: 0.1}"))
    )
    error = error_of(
        with_line("    batch_size: 32", "    train: {lr_schedule: linear, warmup_steps: 10}")
    )
    assert "schedule_steps 10 is not above warmup_steps 10" in error


def test_the_files_of_a_window_become_absolute_and_addresses_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = {"files": ["more/*.parquet", "s3://bucket/*.jsonl"], "since": "2026-11-01"}
    held = {"path": "s3://bucket/held.jsonl"}
    monkeypatch.chdir(tmp_path)
    config = load(RECIPE, {"prompts": {"window": window}, "evaluation.prompts": held})
    files = [f"{tmp_path}/more/*.parquet", "s3://bucket/*.jsonl"]
    assert config.data.prompts.model_dump()["window"]["files"] == files
    assert config.evaluation is not None
    assert config.evaluation.prompts.model_dump()["path"] == held["path"]
    paths = absolute_paths(config)
    assert paths == {"data.prompts.window.files": files}
    monkeypatch.chdir("/")
    again = {"prompts": {"window": window}, "evaluation.prompts": held, **paths}
    assert load(RECIPE, again) == config


def test_the_bounds_of_a_window_can_be_overridden_alone() -> None:
    text = RECIPE.replace(
        "{builtin: chained_addition}", "{window: {files: [/a/*.jsonl], since: 2026-11-01T00:00Z}}"
    )
    prompts = load(text, {"prompts.window.until": "2026-11-02"}).data.prompts
    dumped = prompts.model_dump(mode="json")["window"]
    assert (dumped["since"], dumped["until"]) == ("2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z")
    message = error_of(text, **{"prompts.window.until": "2026-11-01"})
    assert message.endswith(
        "data.prompts.window: since 2026-11-01T00:00:00Z is not before until 2026-11-01T00:00:00Z; "
        "exchange or correct them"
    )
    message = error_of(text, **{"prompts.window.until": "soon"})
    assert message == (
        "--set prompts.window.until: data.prompts.window.until: must be a date or a time from 1970 "
        "on, such as 2026-11-01 or 2026-11-01T06:00Z, not 'soon'"
    )


def test_a_credential_in_the_files_of_a_window_is_refused_and_not_repeated() -> None:
    files = ["a.jsonl", "s3://key:hidden@bucket/*.jsonl"]
    message = error_of(RECIPE, prompts={"window": {"files": files}})
    assert "data.prompts.window.files.1: contains a credential" in message
    assert "hidden" not in message


@pytest.mark.parametrize("place", ["data.prompts", "evaluation.prompts", "gate.datasets.near"])
@pytest.mark.parametrize("hub", ["https://me:hidden@huggingface.co/x", "https://h/x?token=hidden"])
def test_a_credential_in_the_name_of_a_data_set_is_refused_and_not_repeated(
    place: str, hub: str
) -> None:
    message = error_of(RECIPE, **{place: {"hub": hub}})
    assert f"{place}.hub: contains a user, a password or a token" in message
    assert "hidden" not in message


@pytest.mark.parametrize(
    "settings",
    [
        {"policies.solver.model": {"path": "https://me:hidden@huggingface.co/x"}},
        {
            "rollout.engine.name": "sglang",
            "rollout.engine.sglang.python": "https://me:hidden@huggingface.co/x",
        },
    ],
)
def test_a_credential_in_the_place_of_a_local_path_is_refused_and_not_repeated(
    settings: dict[str, str | dict[str, str]],
) -> None:
    message = error_of(RECIPE, **settings)
    assert "contains a user, a password or a token" in message
    assert "hidden" not in message


def test_the_same_window_for_training_and_evaluation_is_refused() -> None:
    prompts = {"window": {"files": ["/a/*.jsonl"]}}
    message = error_of(RECIPE, prompts=prompts, **{"evaluation.prompts": prompts})
    assert "is the training set itself; evaluate on prompts that are held out" in message


def test_a_policy_with_the_name_of_anothers_node_is_refused() -> None:
    wanted = "the trainer of this policy would have the name of node 1 of solver"
    for name, is_taken in (("solver-node-1", True), ("solver-node-2", False)):
        text = RECIPE.replace("data:", f"  {name}: {{model: {{tiny: {{}}}}}}\ndata:", 1)
        message = error_of(text, **{"policies.solver.train.nodes": 2})
        assert (wanted in message) == is_taken
        assert wanted not in error_of(text)
