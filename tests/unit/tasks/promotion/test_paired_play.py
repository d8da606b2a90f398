"""Both teams play the same problems with the same seeds, once, and their outcomes are stored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.engines.engine import ContextFullError, EngineFailedError
from storage import layout
from storage.errors import ConfigError, CorruptError
from storage.machine import gpu_locks
from storage.promotion import outcomes
from storage.store.object_store import ObjectStore
from tasks.evaluation import EVALUATION_SEED
from tasks.promotion import paired_play
from tasks.promotion.gate.outcomes import PairedOutcomes
from tasks.promotion.paired_play import GATE_SEED, PlayProgress, paired_outcomes
from tasks.recipes.run_config import RunConfig
from tests.support.runs.contestants import (
    POLICIES,
    PROBLEMS,
    TWO_DATASETS,
    SkilledEngine,
    contest_config,
    create_contestants,
    team_of,
    version_of,
)

LOG = "tiny"
SKILLS = (20, 50, 90)


pytestmark = pytest.mark.usefixtures("no_requests", "shared_chats")


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """The run `one`, whose versions 0, 1 and 2 have the skills 20, 50 and 90."""
    return create_contestants(memory_store, "one", SKILLS)


def skills_played() -> set[int]:
    return {skill for skill, _, _ in SkilledEngine.asked_of_all}


def keys(store: ObjectStore, name: str = LOG) -> list[str]:
    return store.list(f"promotions/{name}/outcomes")


def only(played: tuple[PairedOutcomes, ...]) -> PairedOutcomes:
    (outcome,) = played
    return outcome


def test_a_better_team_solves_what_the_other_solves_and_more(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    config = contest_config(gate__samples=3)
    teams = team_of(run, 1), team_of(run, 2)
    played = only(paired_outcomes(memory_store, LOG, *teams, config))
    assert played.dataset == "held_out"
    assert played.champion.shape == played.candidate.shape == (PROBLEMS, 3)
    assert played.problems == tuple(
        prompt.id for prompt in config.evaluation.prompts.stream().all(PROBLEMS)
    )
    assert (played.champion <= played.candidate).all()
    assert 0 < played.champion.sum() < played.candidate.sum() < played.candidate.size


def test_sample_s_of_a_problem_has_the_same_seed_for_both_teams_and_no_other_has_it(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    teams = team_of(run, 1), team_of(run, 2)
    paired_outcomes(memory_store, LOG, *teams, contest_config(gate__samples=2))
    first_answers = [
        (skill, prompt, seed)
        for skill, prompt, seed in SkilledEngine.asked_of_all
        if "boxed" not in prompt
    ]
    champion, candidate = (
        sorted((prompt, seed) for skill, prompt, seed in first_answers if skill == wanted)
        for wanted in (50, 90)
    )
    assert champion == candidate
    assert len(set(champion)) == len({seed for _, seed in champion}) == 2 * PROBLEMS


def test_equal_teams_have_equal_outcomes_whenever_they_play_and_another_seed_has_others(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    team, config = team_of(run, 1), contest_config(gate__samples=4)
    twin = team_of(create_contestants(memory_store, "twin", (50,)), 0)
    played = [
        only(paired_outcomes(memory_store, name, team, twin, config, seed=seed))
        for name, seed in (("one", GATE_SEED), ("two", GATE_SEED), ("three", 7))
    ]
    for each in played:
        np.testing.assert_array_equal(each.champion, each.candidate)
    np.testing.assert_array_equal(played[0].champion, played[1].champion)
    assert (played[0].champion != played[2].champion).any()


def test_a_contest_has_other_seeds_than_the_evaluations_that_chose_the_candidate() -> None:
    assert GATE_SEED != EVALUATION_SEED


def test_both_teams_play_by_the_candidates_recipe_at_the_evaluations_temperature(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    other = create_contestants(memory_store, "other", (30,), contest_config(seed=3))
    config = contest_config(policies__solver__sampling__max_new_tokens=33)
    paired_outcomes(memory_store, LOG, team_of(other, 0), team_of(run, 2), config)
    assert len(SkilledEngine.made) == 4
    for engine in SkilledEngine.made:
        assert {params.temperature for _, params in engine.asked} == {0.5}
        assert engine.closed
        assert engine.capacity() == 256  # evaluation.max_concurrent
    for engine in (SkilledEngine.made[0], SkilledEngine.made[2]):
        assert {params.max_new_tokens for _, params in engine.asked} == {33}


def test_what_is_stored_is_not_played_again(memory_store: ObjectStore, run: ObjectStore) -> None:
    config = contest_config()
    champion = team_of(run, 1)
    first = paired_outcomes(memory_store, LOG, champion, team_of(run, 2), config)
    stored = keys(memory_store)
    assert len(stored) == 2
    SkilledEngine.forget()
    again = paired_outcomes(memory_store, LOG, champion, team_of(run, 2), config)
    np.testing.assert_array_equal(only(first).champion, only(again).champion)
    np.testing.assert_array_equal(only(first).candidate, only(again).candidate)
    assert SkilledEngine.made == []
    paired_outcomes(memory_store, LOG, champion, team_of(run, 0), config)
    assert skills_played() == {20}
    assert len(keys(memory_store)) == 3
    paired_outcomes(memory_store, "another", champion, team_of(run, 2), config)
    assert len(keys(memory_store, "another")) == 2


def test_the_decisions_of_the_log_are_listed_as_if_there_were_no_outcomes(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    from storage.promotion import promotions

    paired_outcomes(memory_store, LOG, team_of(run, 1), team_of(run, 2), contest_config())
    log = promotions.read_log(memory_store, LOG)
    assert (log.readable, log.unreadable, log.next_number) == ((), {}, 1)


class KilledError(Exception):
    """Ends a contest as a kill would."""


@pytest.mark.parametrize(
    ("killed_at", "stored_before", "played_after"),
    [
        (("champion", "near"), 0, {("champion", "near"), ("champion", "far"), ("candidate", "near"), ("candidate", "far")}),
        (("champion", "far"), 1, {("champion", "far"), ("candidate", "near"), ("candidate", "far")}),
        (("candidate", "far"), 3, {("candidate", "far")}),
    ],
)  # fmt: skip
def test_a_contest_that_was_killed_plays_only_the_missing_data_sets(
    memory_store: ObjectStore,
    run: ObjectStore,
    killed_at: tuple[str, str],
    stored_before: int,
    played_after: set[tuple[str, str]],
) -> None:
    config, teams = contest_config(**TWO_DATASETS), (team_of(run, 1), team_of(run, 2))

    def kill(progress: PlayProgress) -> None:
        if (progress.side, progress.dataset) == killed_at and progress.episodes == 3:
            raise KilledError

    with pytest.raises(KilledError):
        paired_outcomes(memory_store, LOG, *teams, config, on_progress=kill)
    assert len(keys(memory_store)) == stored_before
    assert all(engine.closed for engine in SkilledEngine.made)
    seen: list[PlayProgress] = []
    resumed = paired_outcomes(memory_store, LOG, *teams, config, on_progress=seen.append)
    grown = {(each.side, each.dataset) for each in seen if 0 < each.episodes < each.episodes_all}
    assert grown == played_after
    whole = paired_outcomes(memory_store, "whole", *teams, config)
    for one, other in zip(resumed, whole, strict=True):
        assert one.dataset == other.dataset
        np.testing.assert_array_equal(one.champion, other.champion)
        np.testing.assert_array_equal(one.candidate, other.candidate)


def test_one_pool_of_engines_plays_all_data_sets_of_a_team(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    teams = team_of(run, 1), team_of(run, 2)
    played = paired_outcomes(memory_store, LOG, *teams, contest_config(**TWO_DATASETS))
    assert [each.dataset for each in played] == ["near", "far"]
    assert [len(each.problems) for each in played] == [PROBLEMS, PROBLEMS - 2]
    assert len(SkilledEngine.made) == 2 * len(POLICIES)


def test_progress_begins_with_every_part_and_ends_complete(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    config = contest_config(**TWO_DATASETS, gate__samples=2)
    seen: list[PlayProgress] = []
    paired_outcomes(
        memory_store, LOG, team_of(run, 1), team_of(run, 2), config, on_progress=seen.append
    )
    sizes = {"near": 2 * PROBLEMS, "far": 2 * (PROBLEMS - 2)}
    assert seen[:4] == [
        PlayProgress(dataset, side, 0, sizes[dataset])
        for side in paired_play.SIDES
        for dataset in sizes
    ]
    assert seen[4 : 4 + sizes["near"]] == [
        PlayProgress("near", "champion", count + 1, sizes["near"]) for count in range(sizes["near"])
    ]
    assert len(seen) == 4 + 2 * sum(sizes.values())
    again: list[PlayProgress] = []
    paired_outcomes(
        memory_store, LOG, team_of(run, 1), team_of(run, 2), config, on_progress=again.append
    )
    assert [each.episodes for each in again] == 2 * list(sizes.values())


def test_check_ends_a_contest_before_a_team_and_after_an_episode(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    calls = 0

    def check_of(limit: int) -> Any:
        def check() -> None:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise KilledError

        return check

    for limit, engines in ((0, 0), (4, len(POLICIES))):
        calls = 0
        with pytest.raises(KilledError):
            paired_outcomes(
                memory_store, LOG, team_of(run, 1), team_of(run, 2), contest_config(),
                check=check_of(limit),
            )  # fmt: skip
        assert len(SkilledEngine.made) == engines
    assert keys(memory_store) == []


def test_a_team_of_two_runs_plays_each_version_of_its_own_run(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    other = create_contestants(memory_store, "other", (0, 70))
    mixed = {"solver": version_of(other, "solver", 1), "verifier": version_of(run, "verifier", 2)}
    paired_outcomes(memory_store, LOG, mixed, team_of(run, 0), contest_config())
    champion = SkilledEngine.made[:2]
    assert sorted(engine.skill for engine in champion) == [70, 90]
    assert [engine.skill for engine in SkilledEngine.made[2:]] == [20, 20]


def test_a_version_with_other_weights_than_its_team_names_is_refused_with_both_digests(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    team = team_of(run, 1)
    right = team["verifier"].digest
    wrong = {**team, "verifier": replace(team["verifier"], digest="sha256:77")}
    for teams, side in (((wrong, team), "champion"), ((team, wrong), "candidate")):
        with pytest.raises(CorruptError) as caught:
            paired_outcomes(memory_store, LOG, *teams, contest_config())
        assert f"the {side}'s verifier@1 of the run one has the digest {right}" in str(caught.value)
        assert "the team names sha256:77" in str(caught.value)
    assert SkilledEngine.made == []


def test_teams_that_cannot_play_are_refused_before_anything_is_played(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    team = team_of(run, 1)
    alone = {"solver": team["solver"]}
    with pytest.raises(ConfigError, match="the champion is a team of solver, and the candidate's"):
        paired_outcomes(memory_store, LOG, alone, team, contest_config())
    lost = {**team, "solver": replace(team["solver"], run_id="gone")}
    with pytest.raises(ConfigError, match=r"champion's solver@1 of the run gone cannot be played"):
        paired_outcomes(memory_store, LOG, lost, team, contest_config())
    never = {**team, "solver": replace(team["solver"], version=8)}
    with pytest.raises(ConfigError, match=r"candidate's solver@8 of the run one cannot be played"):
        paired_outcomes(memory_store, LOG, team, never, contest_config())
    assert SkilledEngine.made == []


def retire(run: ObjectStore, policy: str, version: int) -> None:
    run.create(layout.retired(policy, version), b"{}")
    for key in run.list(layout.weights(policy, version)):
        if key.endswith(".safetensors"):
            run.delete(key)


def test_a_team_whose_weights_gc_has_deleted_is_compared_only_by_stored_outcomes(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    config, teams = contest_config(), (team_of(run, 0), team_of(run, 2))
    paired_outcomes(memory_store, LOG, *teams, config)
    retire(run, "solver", 0)
    paired_outcomes(memory_store, LOG, *teams, config)
    with pytest.raises(
        ConfigError, match=r"the champion cannot be played, since gc .* weights of solver@0 of one;"
    ):
        paired_outcomes(memory_store, "new", *teams, config)


def test_damaged_outcomes_are_named_and_not_played_again(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    config, teams = contest_config(), (team_of(run, 1), team_of(run, 2))
    paired_outcomes(memory_store, LOG, *teams, config)
    for key in keys(memory_store):
        body = memory_store.get(key)
        memory_store.put(key, body[:-3])
        SkilledEngine.forget()
        with pytest.raises(CorruptError, match=rf"{key}: .*put it back from a copy, or delete it"):
            paired_outcomes(memory_store, LOG, *teams, config)
        assert SkilledEngine.made == []
        memory_store.delete(key)
        paired_outcomes(memory_store, LOG, *teams, config)
        assert len(SkilledEngine.made) == len(POLICIES)


def test_outcomes_of_other_problems_under_the_same_key_are_refused(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    config, teams = contest_config(), (team_of(run, 1), team_of(run, 2))
    paired_outcomes(memory_store, LOG, *teams, config)
    key = keys(memory_store)[0]
    stored = outcomes.decode(memory_store.get(key))
    swapped = replace(stored, problems=stored.problems[::-1])
    memory_store.put(key, outcomes.encode(swapped))
    with pytest.raises(CorruptError, match=f"{key} has other problems than its digest; put it"):
        paired_outcomes(memory_store, LOG, *teams, config)


def test_of_two_contests_the_first_outcomes_are_kept_and_used_by_both(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    config, teams = contest_config(), (team_of(run, 1), team_of(run, 2))
    paired_outcomes(memory_store, "copy", *teams, config)
    rival = [outcomes.decode(memory_store.get(key)) for key in keys(memory_store, "copy")]
    rival = [replace(each, accuracies=np.full_like(each.accuracies, 0.25)) for each in rival]

    def rivals_write(progress: PlayProgress) -> None:
        if (progress.side, progress.episodes) == ("champion", 5):
            for each in rival:
                outcomes.create(memory_store, LOG, each)

    played = only(paired_outcomes(memory_store, LOG, *teams, config, on_progress=rivals_write))
    assert set(played.champion.ravel()) == set(played.candidate.ravel()) == {0.25}


def questions(config: RunConfig) -> list[str]:
    assert config.evaluation is not None
    return [prompt.fields["question"] for prompt in config.evaluation.prompts.stream().all(20)]


def test_a_failed_episode_has_no_outcome(
    memory_store: ObjectStore, run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = contest_config(evaluation__prompts__limit=20)
    monkeypatch.setattr(SkilledEngine, "fails_on", questions(config)[3])
    played = only(paired_outcomes(memory_store, LOG, team_of(run, 1), team_of(run, 2), config))
    for team in (played.champion, played.candidate):
        assert np.flatnonzero(np.isnan(team)).tolist() == [3]
    again = only(paired_outcomes(memory_store, LOG, team_of(run, 1), team_of(run, 2), config))
    np.testing.assert_array_equal(again.champion, played.champion)


def test_an_outage_is_not_stored_as_the_result_of_a_team(
    memory_store: ObjectStore, run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, teams = contest_config(gate__samples=5), (team_of(run, 1), team_of(run, 2))
    question = questions(config)[1]
    monkeypatch.setattr(SkilledEngine, "fails_on", question)
    paired_outcomes(memory_store, "few", *teams, config)  # 5 of 60 episodes
    monkeypatch.setattr(SkilledEngine, "fails_on", "=")
    with pytest.raises(ConfigError) as caught:
        paired_outcomes(memory_store, LOG, *teams, config)
    assert "60 of 60 episodes of the champion on held_out failed, the first with" in str(
        caught.value
    )
    assert "the judge is away; nothing is stored" in str(caught.value)
    assert keys(memory_store) == []
    monkeypatch.setattr(SkilledEngine, "fails_on", "")
    assert not np.isnan(only(paired_outcomes(memory_store, LOG, *teams, config)).champion).any()


def test_a_recipe_without_a_gate_is_played_with_its_defaults(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    config = contest_config(evaluation__prompts__limit=50).model_copy(update={"gate": None})
    played = only(paired_outcomes(memory_store, LOG, team_of(run, 1), team_of(run, 2), config))
    assert played.champion.shape == (50, 1)


def test_the_share_of_failures_that_is_still_stored_is_a_tenth(
    memory_store: ObjectStore, run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ten, nine = (contest_config(evaluation__prompts__limit=limit) for limit in (10, 9))
    monkeypatch.setattr(SkilledEngine, "fails_on", questions(ten)[1])
    teams = team_of(run, 1), team_of(run, 2)
    assert np.isnan(only(paired_outcomes(memory_store, LOG, *teams, ten)).champion).sum() == 1
    with pytest.raises(ConfigError, match="1 of 9 episodes of the champion on held_out failed"):
        paired_outcomes(memory_store, LOG, *teams, nine)


def test_failures_of_the_policies_own_answers_are_the_teams_result(
    memory_store: ObjectStore, run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SkilledEngine, "fails_on", "boxed")  # each context is full after one answer
    monkeypatch.setattr(SkilledEngine, "fails_with", ContextFullError)
    teams = team_of(run, 1), team_of(run, 2)
    played = only(paired_outcomes(memory_store, LOG, *teams, contest_config()))
    assert np.isnan(played.champion).all()
    assert np.isnan(played.candidate).all()


def test_an_engine_that_breaks_is_named_with_its_team(
    memory_store: ObjectStore, run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SkilledEngine, "fails_on", "boxed")
    monkeypatch.setattr(SkilledEngine, "fails_with", EngineFailedError)
    teams = team_of(run, 1), team_of(run, 2)
    with pytest.raises(ConfigError, match=r"^the champion cannot be played: the judge is away"):
        paired_outcomes(memory_store, LOG, *teams, contest_config())


def test_the_final_answer_of_the_team_counts_and_not_its_first(
    memory_store: ObjectStore, run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SkilledEngine, "rejects", True)
    teams = team_of(run, 0), team_of(run, 1)
    played = only(paired_outcomes(memory_store, LOG, *teams, contest_config()))
    assert (played.champion == 1).all()
    assert (played.candidate == 1).all()


def test_the_gpus_of_the_engines_are_held_while_a_team_plays(
    memory_store: ObjectStore, run: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = contest_config(rollout__engine__device="cuda", rollout__engine__device_share=0.5)
    held: dict[int, list[str]] = {}

    def look(progress: PlayProgress) -> None:
        files = sorted((tmp_path / "gpus").glob("*.*"))
        held[progress.episodes] = [json.loads(file.read_text())["holder"] for file in files]
        assert len(gpu_locks.descriptors()) == len(files)

    paired_outcomes(memory_store, LOG, team_of(run, 1), team_of(run, 2), config, on_progress=look)
    assert (held[0], held[1]) == ([], ["the gate of tiny"])
    assert gpu_locks.descriptors() == ()
