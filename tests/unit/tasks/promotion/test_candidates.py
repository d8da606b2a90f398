"""Which versions of a run are promoted."""

import numpy as np
import pytest

from storage.errors import ConfigError, CorruptError
from storage.formats.json_objects import seal
from storage.run.evaluations import Evaluation
from storage.store.object_store import ObjectStore
from storage.weights import manifests, retention, tags
from storage.weights.retention import Retention
from tasks.promotion.candidates import best_versions, find
from tasks.recipes.loader import load
from tests.support.runs.promotable import (
    EVALUATED_RECIPE,
    POLICIES,
    create_run,
    evaluate,
    team,
)
from tests.support.runs.small_run import RECIPE

CONFIG = load(EVALUATED_RECIPE)


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    """Versions 0, 1, 2; version 1 solves three of four problems, the others two."""
    run = create_run(memory_store, "tiny-1")
    for version, right in ((0, 2), (1, 3), (2, 2)):
        evaluate(run, version, right)
    return run


def versions(run: ObjectStore, *words: str) -> dict[str, int]:
    found = find(run, "tiny-1", CONFIG, words)
    return {policy: version.version for policy, version in found.team.items()}


def test_the_best_evaluated_version_is_found_and_not_the_last(run: ObjectStore) -> None:
    found = find(run, "tiny-1", CONFIG)
    assert found.team == team(run, "tiny-1", 1)
    assert found.description == "accuracy 75.0% of 4 (held_out)"
    assert found.team["solver"].digest == manifests.read_manifest(run, "solver", 1).digest


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["best"], (1, 1)),
        (["latest"], (2, 2)),
        (["0"], (0, 0)),
        (["solver@2", "verifier@best"], (2, 1)),
        (["latest", "solver@0"], (0, 2)),
        (["solver@good", "1"], (0, 1)),
    ],
)
def test_words_name_versions_of_all_policies_or_of_one(
    run: ObjectStore, words: list[str], expected: tuple[int, int]
) -> None:
    tags.create(run, "good", "solver", 0)
    assert versions(run, *words) == dict(zip(POLICIES, expected, strict=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["3"], r"solver has no version 3; its newest is 2"),
        (["good"], r"'good' is no version of solver and none of its tags"),
        (["judge@1"], r"'judge@1' names no policy of the run; those are solver, verifier"),
        (["solver@1", "solver@2"], r"two versions of solver are named"),
        (["1", "2"], r"1 and 2 each name a version of every policy; .*solver@1"),
        (
            ["solver@1"],
            r"no version of verifier is named; .*promoted together, so name verifier@VER",
        ),
    ],
)
def test_words_that_name_no_team_are_refused(
    run: ObjectStore, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find(run, "tiny-1", CONFIG, words)


def test_versions_that_were_not_evaluated_together_say_so(run: ObjectStore) -> None:
    assert find(run, "tiny-1", CONFIG, ["solver@0", "verifier@1"]).description == "not evaluated"


def test_without_an_evaluation_the_version_must_be_named(memory_store: ObjectStore) -> None:
    unevaluated = create_run(memory_store, "tiny-1", recipe=RECIPE)
    with pytest.raises(ConfigError, match=r"recipe of tiny-1 has no evaluation, .* --version"):
        find(unevaluated, "tiny-1", load(RECIPE))
    evaluated = create_run(memory_store, "tiny-2")
    evaluate(evaluated, 2, 4, dataset="another")
    with pytest.raises(ConfigError, match=r"no version of tiny-2 was evaluated on 'held_out' yet"):
        find(evaluated, "tiny-2", CONFIG)


def test_an_unreadable_evaluation_is_named_where_no_other_exists(memory_store: ObjectStore) -> None:
    run = create_run(memory_store, "tiny-1")
    run.create("evals/solver-00000001_verifier-00000001.arrow", b"torn")
    with pytest.raises(ConfigError, match=r"evals/solver-00000001_verifier-00000001\.arrow"):
        find(run, "tiny-1", CONFIG)


def test_a_best_version_whose_weights_gc_has_deleted_is_refused_with_the_others(
    run: ObjectStore,
) -> None:
    settings = Retention(last=1, every=0, grace_s=0.0)
    retention.retire(run, retention.plan(run, "solver", settings, now_s=4e9))
    with pytest.raises(
        ConfigError,
        match=r"deleted the weights of solver@1; .*Evaluated: solver@1, verifier@1: accuracy 75\.0% "
        r"of 4 \(held_out\); solver@0",
    ):
        find(run, "tiny-1", CONFIG)
    assert versions(run, "latest") == {"solver": 2, "verifier": 2}


def evaluated(version: int, final: list[float], **policies: int) -> Evaluation:
    return Evaluation(
        versions={"solver": version, **policies}, dataset="held_out", workflow="w",
        rows=tuple("abcd"), first_attempt=np.ones(4, np.float32),
        final=np.array(final, np.float32),
    )  # fmt: skip


def test_of_equal_accuracies_the_earliest_version_is_the_best() -> None:
    listed = [evaluated(version, [1, 0, 0, 0]) for version in (0, 20, 40)]
    assert best_versions(listed, ["solver"], "held_out") == {"solver": 0}


def test_a_failed_episode_counts_as_wrong_when_versions_are_compared() -> None:
    listed = [evaluated(0, [1, 1, 0, 0]), evaluated(20, [1, np.nan, np.nan, np.nan])]
    assert best_versions(listed, ["solver"], "held_out") == {"solver": 0}


def test_an_evaluation_without_a_version_of_each_policy_does_not_count() -> None:
    listed = [evaluated(0, [1, 1, 1, 1]), evaluated(20, [1, 0, 0, 0], verifier=20)]
    assert best_versions(listed, POLICIES, "held_out") == {"solver": 20, "verifier": 20}
    assert best_versions(listed, POLICIES, "other") is None


def test_a_damaged_tag_is_reported(run: ObjectStore) -> None:
    run.put("tags/good.json", seal(tags.Tag(name="bad", policy="solver", version=1, at_s=0.0)))
    with pytest.raises(CorruptError, match=r"tags/good\.json holds the tag 'bad'"):
        find(run, "tiny-1", CONFIG, ["good"])


def test_an_unreadable_evaluation_does_not_count_and_is_named(
    run: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    key = "evals/solver-00000001_verifier-00000001.arrow"  # of the best version
    run.put(key, b"torn")
    assert versions(run) == {"solver": 0, "verifier": 0}
    (record,) = caplog.records
    assert key in record.getMessage()
    assert "an evaluation of tiny-1 does not count" in record.getMessage()
    named = find(run, "tiny-1", CONFIG, ["1"])
    assert named.description == "its evaluation cannot be read"


def test_a_damaged_manifest_is_named_with_the_remedy(run: ObjectStore) -> None:
    run.put("weights/verifier/00000001/manifest.json", b"torn")
    with pytest.raises(ConfigError, match=r"verifier@1 cannot be used: .*not JSON.*; put the obj"):
        versions(run, "1")
