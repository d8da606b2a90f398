"""A run that continues another: its recipe, and two small runs that are really trained."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from data_ops.config import PolicyData
from data_ops.dataflow.service import Dataflow
from data_ops.prompts.source import PromptPosition
from rollout.agents.seeds import derived_seed
from storage import layout
from storage.errors import ConfigError
from storage.formats.json_objects import seal
from storage.records.control import Stop
from storage.records.rollouts import Group, Order, Shard
from storage.records.types import Json
from storage.run import batches, checkpoints, orders, runs, shards
from storage.store.object_store import ObjectStore, open_store
from storage.verify.verify import verify
from storage.weights import manifests, reader
from storage.weights.retention import Retention
from tasks.maintenance import garbage_collection
from tasks.recipes import loader, yaml_file
from tasks.recipes.continuation import continuation, parse_versions, prompts_end
from tasks.recipes.run_terms import run_terms
from tasks.services import run_service
from tasks.supervision import supervisor
from tests.support.runs.builders import episode, sequence
from tests.support.runs.lifetimes import lifetime_of
from tests.support.runs.small_run import SmallRun
from trainer.service.trainer import train

RECIPE = """\
name: small
steps: 2
seed: 7
policies:
  solver:
    model: {tiny: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, intermediate: 16,
            skill_iterations: 1, habit_iterations: 1, batch_size: 4}}
    batch_size: 4
    train: {lr: 1.0e-3, anchor_every: 2, checkpoint_every: 1, checkpoints_keep: 5}
data:
  prompts: {builtin: chained_addition}
  samples_per_prompt: 4
  prompts_per_order: 2
rollout:
  workflow: {name: single_turn}
tracking: {enabled: false}
"""
ROUNDS_MAX = 50


def answer(run: ObjectStore, order: Order) -> Shard:
    """Each prompt's four episodes, sampled by the newest version; two of them are right."""
    version = manifests.latest(run, "solver")
    assert version is not None
    groups = []
    for index, prompt in enumerate(order.prompts):
        plays = [
            episode(
                sequence(
                    prompt=(3, 4),
                    answer=(5 + sample % 2, 6 + derived_seed(order.seed, index) % 4, 2),
                    policies=("solver",),
                    version=version,
                    reward=float(sample % 2),
                ),
                reward=float(sample % 2),
                first_attempt=float(sample % 2),
                final=float(sample % 2),
            )
            for sample in range(order.samples_per_prompt)
        ]
        groups.append(Group(prompt, tuple(plays)))
    digest = manifests.read_manifest(run, "solver", version).digest
    return Shard(
        order=order.number,
        attempt=0,
        worker="rollout-default-0",
        region="default",
        groups=tuple(groups),
        weights={"solver": {version: digest}},
        started_s=1700000000.0,
        finished_s=1700000001.0,
    )


def trained(store: ObjectStore, run_id: str, recipe: str) -> ObjectStore:
    """Run the recipe to its end, with the project's own services and scripted answers."""
    config = loader.load(recipe)
    run = supervisor.start(store, run_id, config, "")
    assert run_service.run_base_model(run_id, "base-model", 0) is None
    policies = {"solver": PolicyData(batch_size=4, steps=config.steps)}
    dataflow = Dataflow(
        run, config.data, policies, config.seed, max_tokens=config.rollout.engine.max_tokens
    )
    answered = 0
    for step in range(1, config.steps + 1):
        for _ in range(ROUNDS_MAX):
            dataflow.round()
            if batches.exists(run, "solver", step):
                break
            while answered < orders.next_number(run):
                shards.create(run, answer(run, orders.read(run, answered)))
                answered += 1
        solver = config.policies["solver"]
        lifetime = lifetime_of(run, "trainer", None)
        train(
            lifetime,
            "solver",
            solver.train,
            step,
            config.seed,
            batch_size=solver.batch_size,
            max_tokens=config.rollout.engine.max_tokens,
        )
    assert manifests.latest(run, "solver") == config.steps
    runs.request_stop(run, Stop("completed", "all policies reached the last version", 1.0))
    return run


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setenv("ASTRAFLOW_STORE", str(tmp_path / "store"))
    return open_store(str(tmp_path / "store"))


def violations(run: ObjectStore) -> list[str]:
    return [f"{each.where}: {each.what}" for each in verify(run, run_terms(run)).violations]


def prompt_ids(run: ObjectStore) -> list[str]:
    return [
        prompt.id
        for number in range(orders.next_number(run))
        for prompt in orders.read(run, number).prompts
    ]


def test_a_run_is_continued_and_still_read_after_gc_of_its_origin(store: ObjectStore) -> None:
    one = trained(store, "one", RECIPE)
    recipe = yaml_file.write(continuation(one, 2, {"solver": "1"}, with_optimizer=True))
    two = trained(store, "two", recipe)
    assert violations(one) == violations(two) == []
    origin = runs.read_run(two).origins["solver"]
    assert (origin.run, origin.version) == ("one", 1)
    assert origin.digest == manifests.read_manifest(one, "solver", 1).digest
    assert not [key for key in two.list(layout.weights("solver", 0)) if "model-0" in key]

    moments, state = checkpoints.load(one, "solver", 1)
    copied, first = checkpoints.load(two, "solver", 0)
    assert {name: tensor.bits.tobytes() for name, tensor in copied.items()} == {
        name: tensor.bits.tobytes() for name, tensor in moments.items()
    }
    assert (first.engine, first.tokens_trained) == (state.engine, 0.0)

    first_ids, second_ids = prompt_ids(one), prompt_ids(two)
    assert len({*first_ids, *second_ids}) == len(first_ids) + len(second_ids)
    assert orders.read(one, 0).seed != orders.read(two, 0).seed

    strict = Retention(last=1, every=0, grace_s=0.0)
    kept = garbage_collection.collect(store, ["one"], strict, [], apply=True)
    (plan,) = kept.surveys[0].home.plans
    assert plan.kept[1] == "run two continues from it"
    assert violations(one) == violations(two) == []
    assert reader.read(two, "solver", 0).manifest.digest == origin.digest

    shutil.rmtree(Path(two.url.removeprefix("file://")))  # as a person deletes a run
    gone = garbage_collection.collect(store, ["one"], strict, [], apply=True)
    assert list(gone.surveys[0].home.plans[0].retired) == [1]
    assert violations(one) == []


def test_the_recipe_goes_on_with_seed_prompts_and_schedule(request: pytest.FixtureRequest) -> None:
    small = SmallRun(request.node.name)
    small.order(0)
    order = orders.read(small.run, 0)
    orders.create(small.run, _numbered(order, 1, {"epoch": 2, "position": 30}))
    before = small.config.model_dump(mode="json")
    data = continuation(small.run, 9, {"solver": "best"})
    assert (data["steps"], data["seed"]) == (9, before["seed"] + 1)
    assert data["data"]["start"] == {"epoch": 2, "position": 30}
    assert data["policies"]["solver"]["model"] == {
        "run": "tiny-1",
        "policy": "solver",
        "version": "best",
        "with_optimizer": False,
    }
    assert data["policies"]["verifier"]["model"]["version"] == "latest"
    config = loader.load(yaml_file.write(data))
    assert config.rollout == small.config.rollout
    assert config.policies["solver"].train == small.config.policies["solver"].train


def _numbered(order: Order, number: int, cursor: Json) -> Order:
    return Order(
        number=number,
        prompts=order.prompts,
        samples_per_prompt=2,
        seed=0,
        seen=(),
        cursor=cursor,
    )


@pytest.mark.parametrize(
    ("written", "expected"), [({}, 9), ({"schedule_steps": 3}, 3), ({"schedule_steps": 4}, 9)]
)
def test_a_schedule_that_ended_with_the_run_ends_with_the_new_one(
    store: ObjectStore, written: dict[str, Any], expected: int
) -> None:
    overrides = {f"policies.solver.train.{key}": value for key, value in written.items()}
    config = loader.load(
        RECIPE, {"steps": 4, "policies.solver.train.lr_schedule": "linear", **overrides}
    )
    run = runs.create_run(store, "one", config.model_dump(mode="json"))
    again = loader.load(yaml_file.write(continuation(run, 9, {})))
    assert again.policies["solver"].train.schedule_steps == expected


def test_settings_without_effect_are_left_out_with_the_section_that_has_none(
    store: ObjectStore,
) -> None:
    stored = loader.load(RECIPE).model_dump(mode="json")
    stored["rollout"]["engine"] |= {
        "name": "torch",
        "sglang": {"urls": ["http://127.0.0.1:30000"], "python": "x", "shared": True},
    }
    run = runs.create_run(store, "one", stored)
    data = continuation(run, 9, {})
    assert "sglang" not in data["rollout"]["engine"]
    assert loader.load(yaml_file.write(data)).rollout.engine.name == "torch"


def test_the_reference_is_the_version_that_the_new_run_begins_with(store: ObjectStore) -> None:
    config = loader.load(
        RECIPE, {"policies.solver.train.reference": {"version": 1, "coefficient": 0.1}}
    )
    run = runs.create_run(store, "one", config.model_dump(mode="json"))
    data = continuation(run, 9, {})
    assert data["policies"]["solver"]["train"]["reference"]["version"] == 0


def test_prompts_go_on_behind_the_newest_order_that_can_be_read(
    request: pytest.FixtureRequest,
) -> None:
    small = SmallRun(request.node.name)
    assert prompts_end(small.run) == PromptPosition().model_dump() == {"epoch": 0, "position": 0}
    small.order(0)
    assert prompts_end(small.run) == {"epoch": 0, "position": 0}, "its cursor is {'next': 1}"
    order = orders.read(small.run, 0)
    for number in (1, 2):
        orders.create(small.run, _numbered(order, number, {"epoch": 0, "position": 10 * number}))
    assert prompts_end(small.run)["position"] == 20
    small.run.put(layout.order(2), b"torn")
    assert prompts_end(small.run)["position"] == 10
    cursors: list[Json] = [{"position": 10**10}, {"epoch": -1}, {"position": "1"}, {"x": 1}]
    for number, cursor in enumerate(cursors, 3):
        orders.create(small.run, _numbered(order, number, cursor))
    assert prompts_end(small.run)["position"] == 10


def test_the_newest_readable_order_is_found_below_a_stray_one_of_a_high_number() -> None:
    small = SmallRun("continue-stray-order")
    small.order(0)
    order = _numbered(orders.read(small.run, 0), 0, {"epoch": 0, "position": 7})
    small.run.put(layout.order(0), seal(order))
    for exponent in range(41):  # where the search for the newest order looks
        for number in (2**exponent - 1, 2**exponent, 2**exponent + 1):
            if number:
                small.run.put(layout.order(number), b"x")
    assert prompts_end(small.run)["position"] == 7


def test_versions_are_given_for_all_policies_or_for_one() -> None:
    policies = ("solver", "verifier")
    assert parse_versions([], policies) == {"solver": "latest", "verifier": "latest"}
    assert parse_versions(["40"], policies) == {"solver": "40", "verifier": "40"}
    assert parse_versions(["verifier@best", "40"], policies) == {
        "solver": "40",
        "verifier": "best",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["judge@4"],
            "--version judge@4 names none of the run's policies, which are solver, verifier",
        ),
        (["4", "5"], "--version 5: a version of all is given twice"),
        (["solver@4", "solver@5"], "--version solver@5: a version of solver is given twice"),
    ],
)
def test_versions_that_contradict_each_other_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_versions(words, ("solver", "verifier"))
