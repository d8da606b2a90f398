"""The recipe of a night's run: what differs from the recurring recipe."""

from dataclasses import replace

import pytest

from storage.errors import ConfigError
from storage.records.promotions import TeamVersion
from storage.records.rollouts import Order, Prompt
from storage.run import orders, runs
from storage.store.object_store import ObjectStore
from tasks.recipes.loader import load
from tasks.recurring import settings
from tests.support.runs.small_run import RECIPE
from tests.support.runs.week_of_nights import plan

WINDOW = RECIPE.replace(
    "prompts: {builtin: chained_addition}",
    'prompts: {window: {files: ["day/*.jsonl"], since: 2026-01-01}}',
)
TEAM = {
    policy: TeamVersion(run_id="tiny-0", version=version, digest="9f")
    for policy, version in (("solver", 3), ("verifier", 5))
}


def test_each_night_has_a_seed_of_its_own(memory_store: ObjectStore) -> None:
    config = load(RECIPE, {"seed": 7})
    seeds = [settings.of_night(memory_store, config, plan(number))["seed"] for number in range(3)]
    assert seeds == [7, 8, 9]


def test_the_run_begins_with_the_champions_versions(memory_store: ObjectStore) -> None:
    own = settings.of_night(memory_store, load(RECIPE), replace(plan(1), team=TEAM))
    config = load(RECIPE, own)
    begun = {
        name: policy.model.model_dump(exclude_unset=True)
        for name, policy in config.policies.items()
    }
    assert begun["solver"] == {"run": "tiny-0", "policy": "solver", "version": "3"}
    assert begun["verifier"] == {"run": "tiny-0", "policy": "verifier", "version": "5"}


def test_without_a_champion_the_models_are_those_of_the_recipe(memory_store: ObjectStore) -> None:
    assert settings.of_night(memory_store, load(RECIPE), plan(0)) == {"seed": 0}


def test_a_champion_of_other_policies_is_refused(memory_store: ObjectStore) -> None:
    other = replace(plan(1), team={"solver": TEAM["solver"]})
    with pytest.raises(
        ConfigError, match="has the policies solver, and the recipe has solver, ver"
    ):
        settings.of_night(memory_store, load(RECIPE), other)


def test_a_data_window_goes_from_the_last_verdict_to_the_due_time(
    memory_store: ObjectStore,
) -> None:
    first = settings.of_night(memory_store, load(WINDOW), plan(0))
    assert first == {"seed": 0, "data.prompts.window.until": "2026-01-01T02:00:00+00:00"}
    later = replace(plan(2), since_s=plan(0).due_s, prompts_of="tiny-0")
    own = settings.of_night(memory_store, load(WINDOW), later)
    assert own["data.prompts.window.since"] == "2026-01-01T02:00:00+00:00"
    assert own["data.prompts.window.until"] == "2026-01-03T02:00:00+00:00"
    assert "data.start" not in own
    window = load(WINDOW, own).data.prompts.window  # type: ignore[union-attr]
    assert (window.since_s, window.until_s) == (plan(0).due_s, plan(2).due_s)


def test_other_prompts_go_on_behind_those_of_the_last_judged_night(
    memory_store: ObjectStore,
) -> None:
    run = runs.create_run(memory_store, "tiny-0", load(RECIPE).model_dump(mode="json"))
    order = Order(
        number=0,
        prompts=(Prompt("a", {"question": "1+1=?", "answer": "2"}),),
        samples_per_prompt=4,
        seed=1,
        seen=(),
        cursor={"epoch": 0, "position": 40},
    )
    orders.create(run, order)
    night = replace(plan(1), prompts_of="tiny-0")
    own = settings.of_night(memory_store, load(RECIPE), night)
    assert own["data.start"] == {"epoch": 0, "position": 40}
    assert load(RECIPE, own).data.start.position == 40
    others = load(RECIPE, {"data.prompts.seed": 1})
    assert "data.start" not in settings.of_night(memory_store, others, night)
