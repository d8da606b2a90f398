"""Who is compared with whom, and when nothing is decided."""

from typing import Any

import pytest

from storage.errors import ConfigError
from storage.promotion import promotions
from storage.records.promotions import DecisionKind
from storage.store.object_store import ObjectStore
from storage.weights import tags
from tasks.promotion import promotion
from tasks.promotion.contest import Contest, contest
from tasks.promotion.paired_play import PlayProgress
from tests.support.runs.contestants import (
    CONTEST_RECIPE,
    PROBLEMS,
    TWO_DATASETS,
    SkilledEngine,
    contest_config,
    create_contestants,
    evaluate_as_best,
    team_of,
)

LOG = "tiny"
pytestmark = pytest.mark.usefixtures("no_requests", "shared_chats")
LOOSE = {"gate__confidence": 0.6, "gate__samples": 2}


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """The run `one` with the skills 20, 90 and 50, whose version 1 is the best evaluated."""
    run = create_contestants(memory_store, "one", (20, 90, 50))
    evaluate_as_best(run, 1)
    return run


def decided(store: ObjectStore, held: Contest) -> DecisionKind:
    team = held.candidate.team
    return promotion.decide(store, LOG, team, held.verdict, held.champion, "ada").decision.kind


def test_without_a_champion_the_best_versions_are_compared_with_their_base_model(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    held = contest(memory_store, LOG, "one", contest_config(**LOOSE))
    assert held.champion is None
    assert (held.opponent, held.candidate.team) == (team_of(run, 0), team_of(run, 1))
    (row,) = held.verdict.rows
    assert (row.dataset, row.problems, row.passed) == ("held_out", PROBLEMS, True)
    assert row.candidate - row.champion == pytest.approx(row.gain)
    assert row.gain > 0.4
    assert promotions.read_log(memory_store, LOG).readable == ()


def test_a_promoted_team_is_the_champion_of_the_next_contest_and_is_not_played_again(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    config = contest_config(**LOOSE)
    assert decided(memory_store, contest(memory_store, LOG, "one", config)) is DecisionKind.PROMOTED
    other = create_contestants(memory_store, "two", (30, 60))
    evaluate_as_best(other, 1)
    SkilledEngine.forget()
    held = contest(memory_store, LOG, "two", config)
    assert held.champion == promotions.read(memory_store, LOG, 1)
    assert (held.opponent, held.candidate.team) == (team_of(run, 1), team_of(other, 1))
    assert {skill for skill, _, _ in SkilledEngine.asked_of_all} == {60}
    assert decided(memory_store, held) is DecisionKind.REJECTED


def test_other_versions_than_the_best_are_named_by_words(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    held = contest(memory_store, LOG, "one", contest_config(), ["latest"])
    assert held.candidate.team == team_of(run, 2)


def test_equal_weights_are_a_message_and_nothing_is_played_or_decided(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    promotion.promote(memory_store, LOG, team_of(run, 1), "ada", "")
    twin = create_contestants(memory_store, "twin", (20, 90))
    evaluate_as_best(twin, 1)
    for run_id in ("one", "twin"):
        with pytest.raises(ConfigError) as caught:
            contest(memory_store, LOG, run_id, contest_config())
        assert str(caught.value) == (
            f"solver@1 of {run_id}, verifier@1 of {run_id} has the weights of the champion of tiny "
            "(decision 1); nothing is decided: name other versions"
        )
    with pytest.raises(ConfigError, match="has the weights of its base model, with which it would"):
        contest(memory_store, "new", "one", contest_config(), ["0"])
    assert SkilledEngine.made == []
    assert promotions.read_log(memory_store, LOG).next_number == 2
    assert promotions.read_log(memory_store, "new").next_number == 1


def test_the_candidates_weights_are_kept_from_gc_before_they_are_played(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    kept: list[set[str]] = []

    def on_progress(progress: PlayProgress) -> None:
        kept.append({tag.name for tag in tags.require_all(run)})

    contest(memory_store, LOG, "one", contest_config(), on_progress=on_progress)
    assert kept[0] == {"tiny-solver-1", "tiny-verifier-1"}


def test_check_ends_a_contest(memory_store: ObjectStore, run: ObjectStore) -> None:
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        contest(memory_store, LOG, "one", contest_config(), check=stop)


def test_nothing_is_compared_with_an_unknown_champion(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    memory_store.put("promotions/tiny/00000001.json", b"torn")
    with pytest.raises(ConfigError, match="the champion of tiny is not known"):
        contest(memory_store, LOG, "one", contest_config())
    assert SkilledEngine.made == []


def test_every_data_set_is_judged(memory_store: ObjectStore, run: ObjectStore) -> None:
    config = contest_config(**TWO_DATASETS, **LOOSE, gate__gain_on="far")
    held = contest(memory_store, LOG, "one", config)
    assert [(row.dataset, row.requirement.value) for row in held.verdict.rows] == [
        ("near", "loss"),
        ("far", "gain"),
    ]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"gate": None, "evaluation__prompts__limit": 49}, "limit: 49 problems are fewer than"),
        (
            {"gate": {"gain_on": "math", "min_problems": 1}},
            "gate.gain_on: the gate has no data set",
        ),
    ],
)
def test_a_stored_recipe_that_cannot_be_judged_is_refused_before_anything_is_played(
    memory_store: ObjectStore, run: ObjectStore, stored: dict[str, Any], message: str
) -> None:
    from tasks.recipes.run_config import ContestConfig

    gate = stored.pop("gate")
    config = contest_config(**stored).model_copy(
        update={"gate": None if gate is None else ContestConfig(**gate)}
    )
    with pytest.raises(ConfigError, match=f"the recipe of one cannot be judged: .*{message}"):
        contest(memory_store, LOG, "one", config)
    assert SkilledEngine.made == []
    assert tags.require_all(run) == []


def test_a_recipe_without_evaluation_has_no_candidate(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    from tasks.recipes.loader import load

    config = load(CONTEST_RECIPE.split("evaluation:")[0])
    with pytest.raises(ConfigError, match="the recipe has no evaluation, which says how"):
        contest(memory_store, LOG, "one", config)
