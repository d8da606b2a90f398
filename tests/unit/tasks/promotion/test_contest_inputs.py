"""What the outcomes of a team depend on, and data sets that no contest is played on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from data_ops.prompts.builtin import BuiltinPrompts
from storage.errors import ConfigError
from storage.promotion import outcomes
from storage.records.promotions import Team
from storage.records.rollouts import Prompt
from storage.run import runs
from storage.store.object_store import ObjectStore
from storage.weights import publisher
from tasks.promotion import contest_inputs
from tasks.promotion.paired_play import GATE_SEED, paired_outcomes
from tasks.recipes.loader import load
from tasks.recipes.run_config import RunConfig
from tests.support.runs.adapter_versions import LORA, drawn
from tests.support.runs.contestants import (
    PROBLEMS,
    SkilledEngine,
    contest_config,
    create_contestants,
    team_of,
    version_of,
)

LOG = "tiny"
SINGLE_RECIPE = """\
policies:
  solver: {model: {tiny: {}}}
data:
  prompts: {builtin: chained_addition}
evaluation:
  prompts: {builtin: chained_addition, split: test, limit: 60}
"""
SKILLS = (20, 50, 90)
pytestmark = pytest.mark.usefixtures("no_requests", "shared_chats")


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """The run `one`, whose versions 0, 1 and 2 have the skills 20, 50 and 90."""
    return create_contestants(memory_store, "one", SKILLS)


@pytest.mark.parametrize(
    "changed",
    [
        {"gate__samples": 2},
        {"evaluation__temperature": 0.25},
        {"evaluation__dataset": "other"},
        {"evaluation__prompts__seed": 9},
        {"evaluation__prompts__limit": PROBLEMS - 1},
        {"rollout__workflow__timeout_s": 60.0},
        {"rollout__workflow__args": {"retry_message": "again: {verdict}"}},
        {"policies__verifier__sampling__max_new_tokens": 99},
        {"rollout__engine__max_tokens": 700},
    ],
    ids=str,
)
def test_outcomes_of_other_conditions_have_another_key(
    memory_store: ObjectStore, run: ObjectStore, changed: Mapping[str, Any]
) -> None:
    assert conditions_key(memory_store, run, contest_config(**changed)) != conditions_key(
        memory_store, run, contest_config()
    )


def test_settings_of_speed_and_of_training_do_not_change_the_key(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    changed = contest_config(
        rollout__engine__threads=3,
        rollout__engine__max_concurrent=9,
        evaluation__max_concurrent=9,
        evaluation__every=3,
        seed=8,
        gate__confidence=0.9,
        policies__solver__train__lr=0.5,
    )
    assert conditions_key(memory_store, run, changed) == conditions_key(
        memory_store, run, contest_config()
    )


def test_a_shared_server_does_not_change_the_key(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    adapter = {"name": "lora", "rank": 4, "publish": "adapter"}
    alone = contest_config(
        rollout__engine__name="sglang",
        rollout__engine__sglang__adapter_rank=4,
        policies__solver__train__adapter=adapter,
        policies__verifier__train__adapter=adapter,
    )
    sglang = alone.rollout.engine.sglang.model_copy(update={"shared": True})
    engine = alone.rollout.engine.model_copy(update={"sglang": sglang})
    shared = alone.model_copy(
        update={"rollout": alone.rollout.model_copy(update={"engine": engine})}
    )
    assert conditions_key(memory_store, run, shared) == conditions_key(memory_store, run, alone)


def test_another_tokenizer_or_other_weights_change_the_key(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    config = contest_config()
    template = {"chat_template.jinja": b"another one"}
    twin = create_contestants(memory_store, "twin", SKILLS)
    other = create_contestants(memory_store, "other", SKILLS, files=template)
    known = conditions_key(memory_store, run, config)
    assert conditions_key(memory_store, twin, config) == known
    assert conditions_key(memory_store, other, config) != known
    assert conditions_key(memory_store, run, config, version=2) != known
    assert conditions_key(memory_store, run, config, seed=7) != known


def conditions_key(
    store: ObjectStore,
    run: ObjectStore,
    config: RunConfig,
    version: int = 1,
    seed: int = GATE_SEED,
) -> str:
    versions = contest_inputs.versions_of(store, "champion", team_of(run, version), config)
    ((dataset, prompts),) = contest_inputs.prompts_by_dataset(
        *contest_inputs.gate_settings(config), run
    ).items()
    return outcomes.key(LOG, contest_inputs.conditions(dataset, prompts, versions, config, seed))


def test_data_sets_that_cannot_be_judged_are_refused_before_anything_is_played(
    memory_store: ObjectStore, run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    teams: tuple[Team, Team] = team_of(run, 1), team_of(run, 2)
    config = contest_config()
    assert config.gate is not None
    few = config.model_copy(update={"gate": config.gate.model_copy(update={"min_problems": 13})})
    with pytest.raises(ConfigError, match="held_out has 12 problems, and the gate needs 13"):
        paired_outcomes(memory_store, LOG, *teams, few)
    monkeypatch.setattr(contest_inputs, "EPISODES_MAX", 23)
    two = contest_config(gate__samples=2)
    with pytest.raises(ConfigError, match="so 24 episodes would be played by each team, and 23"):
        paired_outcomes(memory_store, LOG, *teams, two)
    monkeypatch.setattr(contest_inputs, "EPISODES_MAX", 24)
    assert list(contest_inputs.prompts_by_dataset(*contest_inputs.gate_settings(two), run))
    with pytest.raises(ConfigError, match="the recipe has no evaluation"):
        paired_outcomes(memory_store, LOG, *teams, config.model_copy(update={"evaluation": None}))
    assert SkilledEngine.made == []


def test_no_problem_is_made_of_a_data_set_that_is_refused(
    run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `run.json` may give any limit that a source takes."""

    def make(*_: object) -> Prompt:
        raise AssertionError("a problem was made")

    monkeypatch.setattr("data_ops.prompts.builtin.problem", make)
    gate, evaluation = contest_inputs.gate_settings(contest_config())
    many = BuiltinPrompts(builtin="chained_addition", split="test", limit=10_000_000)
    for selected, where in (
        (gate.model_copy(update={"datasets": {"far": many}}), evaluation),
        (
            gate.model_copy(update={"datasets": {}}),
            evaluation.model_copy(update={"prompts": many}),
        ),
    ):
        with pytest.raises(ConfigError, match="so 10,000,000 episodes would be played"):
            contest_inputs.prompts_by_dataset(selected, where, run)
    half = BuiltinPrompts(builtin="chained_addition", split="test", limit=50_001)
    two = gate.model_copy(update={"datasets": {"near": half, "far": half}})
    with pytest.raises(ConfigError, match="have 100,002 problems together, and at most 100,000"):
        contest_inputs.prompts_by_dataset(two, evaluation, run)


class Twins:
    """A source of prompts that all have one id."""

    def size(self) -> int:
        return 6

    def prompt(self, index: int) -> Any:

        return Prompt("same", {"question": f"{index}+1=?", "answer": "2"})


class Unstorable(Twins):
    def prompt(self, index: int) -> Any:
        prompt = super().prompt(index)
        return replace(
            prompt, id=str(index), fields={**prompt.fields, "score": {"x": float("nan")}}
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("Twins", "near: two problems have the id 'same'"),
        ("Unstorable", r"Unstorable cannot be stored: its 'score\.x' is nan"),
    ],
)
def test_problems_without_an_identity_are_refused(
    memory_store: ObjectStore, run: ObjectStore, source: str, message: str
) -> None:
    config = contest_config(gate__datasets={"near": {"custom": f"{__name__}:{source}"}})
    with pytest.raises(ConfigError, match=message):
        paired_outcomes(memory_store, LOG, team_of(run, 1), team_of(run, 2), config)


def test_a_base_model_with_other_weights_does_not_change_the_key_of_later_versions(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    other = create_contestants(memory_store, "other", (70, 50))
    config = contest_config()
    assert conditions_key(memory_store, other, config) == conditions_key(memory_store, run, config)


def test_another_scale_of_an_adapter_with_the_same_tensors_changes_the_key(
    memory_store: ObjectStore,
) -> None:
    config = load(SINGLE_RECIPE)
    keys = set()
    for run_id, alpha in (("one", 3.0), ("two", 4.0), ("three", 3.0)):
        run = runs.create_run(memory_store, run_id, config.model_dump(mode="json"))
        publisher.publish(run, "solver", 0, drawn(), adapter=replace(LORA, alpha=alpha))
        named = {"solver": version_of(run, "solver", 0)}
        versions = contest_inputs.versions_of(memory_store, "champion", named, config)
        keys.add(outcomes.key(LOG, contest_inputs.conditions("held_out", [], versions, config, 0)))
    assert len(keys) == 2
