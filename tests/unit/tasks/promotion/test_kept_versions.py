"""Tags that keep the weights of champion, previous and challenger from gc."""

from dataclasses import replace
from typing import Any

import pytest

from storage.errors import ConfigError, TransientError
from storage.promotion import promotions
from storage.promotion.promotions import PromotionLog
from storage.records.promotions import DecisionKind, PromotionDecision
from storage.store.backend import Backend
from storage.store.object_store import ObjectStore
from storage.weights import publisher, retention, tags
from storage.weights.retention import Retention
from tasks.promotion import decision_log, kept_versions
from tests.support.runs import builders
from tests.support.runs.promotable import create_run, team

PROMOTED, REJECTED = DecisionKind.PROMOTED, DecisionKind.REJECTED
ONLY_THE_NEWEST = Retention(last=1, every=0, grace_s=0.0)


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    return create_run(memory_store, "tiny-1", versions=6)


def decided(
    store: ObjectStore, run: ObjectStore, kind: DecisionKind, version: int, name: str = "tiny"
) -> PromotionLog:
    """Keep and add one decision, release what it replaces, and return the log."""
    drafted = PromotionDecision(
        name=name,
        number=0,
        kind=kind,
        at_s=0.0,
        by="",
        reason="",
        team=team(run, "tiny-1", version),
    )
    kept_versions.keep(store, name, drafted.team)
    decision_log.add(store, name, lambda standing, log: drafted)
    log = promotions.read_log(store, name)
    assert kept_versions.release(store, log, decision_log.fold(log)) == []
    return log


def names(run: ObjectStore) -> set[str]:
    return {tag.name for tag in tags.require_all(run)}


def test_each_version_of_a_team_is_tagged_in_its_run(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    kept_versions.keep(memory_store, "math-1.7b", team(run, "tiny-1", 3))
    kept_versions.keep(memory_store, "math-1.7b", team(run, "tiny-1", 3))
    stored = tags.require_all(run)
    assert [(tag.name, tag.policy, tag.version) for tag in stored] == [
        ("math-1_7b-solver-3-xd39f6fac", "solver", 3),
        ("math-1_7b-verifier-3-x194e7afa", "verifier", 3),
    ]


def test_gc_keeps_champion_previous_and_challenger_and_no_older_champion(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for kind, version in ((PROMOTED, 1), (PROMOTED, 2), (PROMOTED, 3), (REJECTED, 4)):
        decided(memory_store, run, kind, version)
    assert names(run) == {
        f"tiny-{policy}-{version}" for policy in ("solver", "verifier") for version in (2, 3, 4)
    }
    planned = retention.plan(run, "solver", ONLY_THE_NEWEST, now_s=4e9)
    assert set(planned.retired) == {1}


def test_tags_of_other_people_logs_and_undecided_candidates_stay(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    tags.create(run, "mine", "solver", 1)
    kept_versions.keep(memory_store, "tiny", team(run, "tiny-1", 5))  # not decided yet
    decided(memory_store, run, PROMOTED, 1, name="other")
    for version in (1, 2, 3):
        decided(memory_store, run, PROMOTED, version)
    assert names(run) == {
        "mine", "tiny-solver-5", "tiny-verifier-5", "other-solver-1", "other-verifier-1",
        "tiny-solver-2", "tiny-verifier-2", "tiny-solver-3", "tiny-verifier-3",
    }  # fmt: skip


def test_a_log_releases_no_version_of_a_log_with_a_similar_name(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    kept_versions.keep(memory_store, "a_b", team(run, "tiny-1", 1))
    for version in (1, 2, 3):
        decided(memory_store, run, PROMOTED, version, name="a.b")
    planned = retention.plan(run, "solver", ONLY_THE_NEWEST, now_s=4e9)
    assert set(planned.retired) == {4}


def test_a_policy_with_a_hyphen_has_other_tags_than_a_log_with_one(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for version in range(2):
        files = {} if version else {"config.json": b"{}"}
        publisher.publish(run, "b-solver", version, builders.tensors(version), extra_files=files)
    kept_versions.keep(memory_store, "a", {"b-solver": team(run, "tiny-1", 1)["solver"]})
    kept_versions.keep(memory_store, "a-b", team(run, "tiny-1", 1))
    kept = [(tag.policy, tag.version) for tag in tags.require_all(run)]
    assert kept == [("b-solver", 1), ("solver", 1), ("verifier", 1)]


def test_a_decision_whose_tags_cannot_exist_does_not_prevent_the_release_of_others(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for version in (1, 2, 3):
        decided(memory_store, run, PROMOTED, version)
    tags.create(run, "tiny-solver-1", "solver", 1)
    log = promotions.read_log(memory_store, "tiny")
    long = {"s" * 100: team(run, "tiny-1", 1)["solver"]}
    readable = (*log.readable, replace(log.readable[0], number=4, team=long))
    log = PromotionLog("tiny", readable, {})
    assert kept_versions.release(memory_store, log, decision_log.fold(log)) == []
    assert "tiny-solver-1" not in names(run)


def test_nothing_is_released_while_a_decision_cannot_be_read(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for version in (1, 2, 3):
        decided(memory_store, run, PROMOTED, version)
    log = promotions.read_log(memory_store, "tiny")
    standing = decision_log.fold(log)
    tags.create(run, "tiny-solver-1", "solver", 1)
    damaged = PromotionLog("tiny", log.readable, {4: "torn"})
    assert kept_versions.release(memory_store, damaged, standing) == []
    unknown = replace(standing, unknown="torn")
    assert kept_versions.release(memory_store, log, unknown) == []
    assert "tiny-solver-1" in names(run)
    kept_versions.release(memory_store, log, standing)
    assert "tiny-solver-1" not in names(run)


def test_a_version_without_data_is_refused(memory_store: ObjectStore, run: ObjectStore) -> None:
    retention.retire(run, retention.plan(run, "verifier", ONLY_THE_NEWEST, now_s=4e9))
    with pytest.raises(ConfigError, match="data of version 3 of verifier was retired"):
        kept_versions.keep(memory_store, "tiny", team(run, "tiny-1", 3))


def test_a_name_that_is_too_long_for_a_tag_is_refused_with_the_remedy(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be a tag, .* shorter name \(--name\)"):
        kept_versions.keep(memory_store, "x" * 98, team(run, "tiny-1", 3))


class UndeletableBackend:
    """Forwards every call except deletions, which fail."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def delete(self, key: str) -> None:
        raise TransientError(f"{key} is out of reach")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_tag_that_cannot_be_deleted_is_a_problem_and_the_next_call_deletes_it(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for version in (1, 2, 3):
        decided(memory_store, run, PROMOTED, version)
    for policy in ("solver", "verifier"):
        tags.create(run, f"tiny-{policy}-1", policy, 1)
    log = promotions.read_log(memory_store, "tiny")
    broken = replace(memory_store, backend=UndeletableBackend(memory_store.backend), patience_s=0.0)
    problems = kept_versions.release(broken, log, decision_log.fold(log))
    assert [problem.partition(" of")[0] for problem in problems] == [
        "the tag tiny-solver-1",
        "the tag tiny-verifier-1",
    ]
    assert kept_versions.release(memory_store, log, decision_log.fold(log)) == []
    assert "tiny-solver-1" not in names(run)
