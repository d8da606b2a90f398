"""Decisions, and what follows from them: tags, aliases, problems that the next call repairs."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from storage import layout
from storage.errors import ConfigError, ConflictError
from storage.promotion import promotions
from storage.records.promotions import GateVerdict, PromotionDecision, TeamVersion
from storage.store.object_store import ObjectStore
from storage.weights import publisher, retention, tags
from storage.weights.retention import Retention
from tasks.promotion import announcements, decision_log
from tasks.promotion.promotion import decide, project, promote, roll_back
from tasks.tracking.mlflow_sync import URI_VARIABLE
from tests.support.http_servers import one_answer, refusing_port
from tests.support.runs import builders
from tests.support.runs.promotable import create_run, team
from tests.support.stores.killed_store import Killed, killed_at

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own imports and database layer warn

PASSED = GateVerdict(passed=True, reason="better", test="mcnemar", confidence=0.95, rows=())
FAILED = replace(PASSED, passed=False, reason="not better")


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    return create_run(memory_store, "tiny-1", versions=5)


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No MLflow, and no Prefect whose server the tests would start."""
    monkeypatch.delenv(URI_VARIABLE, raising=False)
    monkeypatch.setattr(announcements, "prefect_api_url", lambda: "")


def of(run: ObjectStore, version: int) -> Mapping[str, TeamVersion]:
    return team(run, "tiny-1", version)


def log_of(store: ObjectStore) -> list[tuple[int, str, int]]:
    """Number, kind and version of every decision."""
    return [
        (each.number, each.kind.value, each.team["solver"].version)
        for each in promotions.read_log(store, "tiny").readable
    ]


def kept(run: ObjectStore) -> set[int]:
    """Versions of the solver that are tagged."""
    return {tag.version for tag in tags.require_all(run) if tag.policy == "solver"}


def champion(store: ObjectStore) -> PromotionDecision | None:
    return decision_log.fold(promotions.read_log(store, "tiny")).champion


def test_a_promoted_team_is_the_champion_and_its_versions_are_kept(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    settled = promote(memory_store, "tiny", of(run, 2), "ada", "looked good")
    assert log_of(memory_store) == [(1, "promoted", 2)]
    assert (settled.decision.by, settled.decision.reason) == ("ada", "looked good")
    assert settled.standing.champion == settled.decision
    assert kept(run) == {2}


def test_without_mlflow_the_decision_stands_and_says_how_to_move_the_aliases(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    settled = promote(memory_store, "tiny", of(run, 2), "ada", "")
    assert settled.problems == (
        "MLFLOW_TRACKING_URI is not set, so MLflow's aliases stay; `astraflow promotions tiny "
        "--repair` moves them later",
    )


def test_an_mlflow_that_does_not_answer_is_a_problem_and_repaired_later(
    memory_store: ObjectStore, run: ObjectStore, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing_port() as port:
        monkeypatch.setenv(URI_VARIABLE, f"http://127.0.0.1:{port}")
        settled = promote(memory_store, "tiny", of(run, 2), "ada", "")
    assert [problem.partition(":")[0] for problem in settled.problems] == [
        "MLflow's aliases are not moved; `astraflow promotions tiny --repair` moves them",
        "MLflow does not show the decision",
    ]
    assert log_of(memory_store) == [(1, "promoted", 2)]
    monkeypatch.setenv(URI_VARIABLE, uri)
    _, problems = project(memory_store, "tiny")
    assert problems == ()
    from mlflow.tracking import MlflowClient

    model = MlflowClient(registry_uri=uri).get_registered_model("astraflow-solver")
    assert list(model.aliases) == ["champion"]


def test_a_prefect_server_that_refuses_does_not_undo_the_decision(
    memory_store: ObjectStore, run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_answer(400, b"{}", "application/json") as server:
        url = f"http://127.0.0.1:{server.port}/api"
        monkeypatch.setattr(announcements, "prefect_api_url", lambda: url)
        settled = promote(memory_store, "tiny", of(run, 2), "ada", "")
    assert server.requests[0].split("?")[0] in ("GET /api/csrf-token", "POST /api/artifacts/")
    assert settled.problems[-1].startswith("Prefect does not show the decision: ")
    assert log_of(memory_store) == [(1, "promoted", 2)]


def test_mlflow_shows_the_decision(
    memory_store: ObjectStore, run: ObjectStore, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URI_VARIABLE, uri)
    assert promote(memory_store, "tiny", of(run, 2), "ada", "").problems == ()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (experiment,) = client.search_experiments(filter_string="name = 'astraflow'")
    shown = [
        each.data.tags["astraflow.promotion"]
        for each in client.search_runs([experiment.experiment_id])
        if "astraflow.promotion" in each.data.tags
    ]
    assert shown == ["promoted: decision 1 of tiny"]


def test_a_candidate_that_passes_the_gate_is_promoted_with_its_table(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    first = promote(memory_store, "tiny", of(run, 1), "ada", "").decision
    settled = decide(memory_store, "tiny", of(run, 2), PASSED, first, "nightly")
    assert log_of(memory_store) == [(1, "promoted", 1), (2, "promoted", 2)]
    assert (settled.decision.gate, settled.decision.reason) == (PASSED, "better")
    assert settled.standing.previous is not None
    assert settled.standing.previous.number == 1


def test_a_candidate_that_fails_is_the_challenger_and_its_versions_are_kept(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    first = promote(memory_store, "tiny", of(run, 1), "ada", "").decision
    settled = decide(memory_store, "tiny", of(run, 2), FAILED, first, "nightly")
    assert log_of(memory_store)[-1] == (2, "rejected", 2)
    assert settled.standing.champion is not None
    assert settled.standing.champion.number == 1
    assert kept(run) == {1, 2}


@pytest.mark.parametrize("verdict", [PASSED, FAILED])
def test_a_verdict_against_another_champion_is_refused(
    memory_store: ObjectStore, run: ObjectStore, verdict: GateVerdict
) -> None:
    first = promote(memory_store, "tiny", of(run, 1), "ada", "").decision
    promote(memory_store, "tiny", of(run, 2), "ada", "")
    with pytest.raises(
        ConflictError,
        match=r"the champion of tiny is the team of decision 2 now, .*with the team of decision 1; "
        r"compare it with the new champion",
    ):
        decide(memory_store, "tiny", of(run, 3), verdict, first, "nightly")
    with pytest.raises(ConflictError, match="was compared with no team"):
        decide(memory_store, "tiny", of(run, 3), verdict, None, "nightly")
    assert len(log_of(memory_store)) == 2


def test_a_night_that_is_run_again_adds_no_second_decision(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    first = promote(memory_store, "tiny", of(run, 1), "ada", "").decision
    for _ in range(2):
        assert decide(memory_store, "tiny", of(run, 2), PASSED, first, "n").decision.number == 2
    second = champion(memory_store)
    for _ in range(2):
        assert decide(memory_store, "tiny", of(run, 3), FAILED, second, "n").decision.number == 3


def test_a_rollback_returns_to_the_champion_before_and_the_next_one_further(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for version in (1, 2, 3):
        promote(memory_store, "tiny", of(run, version), "ada", "")
    settled = roll_back(memory_store, "tiny", "bob", "")
    assert (settled.decision.returns_to, settled.decision.reason) == (2, "back to decision 2")
    assert settled.decision.team == of(run, 2)
    roll_back(memory_store, "tiny", "bob", "again")
    assert log_of(memory_store)[3:] == [(4, "rolled_back", 2), (5, "rolled_back", 1)]
    with pytest.raises(ConfigError, match=r"tiny has no earlier champion .*--to NUMBER names one"):
        roll_back(memory_store, "tiny", "bob", "")
    assert roll_back(memory_store, "tiny", "bob", "", to=3).decision.team == of(run, 3)
    assert champion(memory_store).number == 6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (1, r"the team of decision 1 was rejected and never the champion; `astraflow promote`"),
        (3, r"the team of decision 3 is the champion of tiny already"),
        (9, r"tiny has no decision 9; its decisions are 1 to 3"),
        (0, r"tiny has no decision 0"),
    ],
)
def test_a_rollback_to_no_earlier_champion_is_refused(
    memory_store: ObjectStore, run: ObjectStore, to: int, message: str
) -> None:
    decide(memory_store, "tiny", of(run, 4), FAILED, None, "nightly")
    for version in (1, 2):
        promote(memory_store, "tiny", of(run, version), "ada", "")
    with pytest.raises(ConfigError, match=message):
        roll_back(memory_store, "tiny", "bob", "", to=to)
    assert len(log_of(memory_store)) == 3


def test_a_rollback_to_a_champion_that_is_unknown_says_so(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for version in (1, 2):
        promote(memory_store, "tiny", of(run, version), "ada", "")
    memory_store.put(layout.promotion("tiny", 1), b"torn")
    with pytest.raises(
        ConfigError,
        match=r"champion of tiny before the present one is not known: promotions/tiny/00000001\.json"
        r".*; put the object back .*--to NUMBER",
    ):
        roll_back(memory_store, "tiny", "bob", "")
    assert len(log_of(memory_store)) == 1


def test_an_empty_log_cannot_be_rolled_back(memory_store: ObjectStore) -> None:
    with pytest.raises(ConfigError, match="nobody has no earlier champion"):
        roll_back(memory_store, "nobody", "bob", "")
    with pytest.raises(ConfigError, match="nobody has no decision 1; it has no decision yet"):
        roll_back(memory_store, "nobody", "bob", "", to=1)


def test_a_rollback_to_weights_that_gc_deleted_is_refused(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for version in (1, 2, 3):
        promote(memory_store, "tiny", of(run, version), "ada", "")
    settings = Retention(last=1, every=0, grace_s=0.0)
    retention.retire(run, retention.plan(run, "solver", settings, now_s=4e9))
    assert roll_back(memory_store, "tiny", "bob", "").decision.returns_to == 2
    with pytest.raises(ConfigError, match="the data of version 1 of solver was retired"):
        roll_back(memory_store, "tiny", "bob", "", to=1)


def test_an_unreadable_newest_decision_stops_promotions_until_a_champion_is_named(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for version in (1, 2):
        promote(memory_store, "tiny", of(run, version), "ada", "")
    memory_store.put("promotions/tiny/00000003.json", b"torn")
    for attempt in (
        lambda: promote(memory_store, "tiny", of(run, 3), "ada", ""),
        lambda: decide(memory_store, "tiny", of(run, 3), PASSED, None, "n"),
        lambda: roll_back(memory_store, "tiny", "ada", ""),
    ):
        with pytest.raises(ConfigError, match=r"champion of tiny is not known: promotions/tiny/0"):
            attempt()
    with pytest.raises(ConfigError, match="decision 3 of tiny cannot be read"):
        roll_back(memory_store, "tiny", "ada", "", to=3)
    settled = roll_back(memory_store, "tiny", "ada", "", to=2)
    assert settled.decision.number == 4
    assert settled.standing.previous is not None
    assert settled.standing.previous.number == 1
    promote(memory_store, "tiny", of(run, 3), "ada", "")
    assert champion(memory_store).number == 5  # type: ignore[union-attr]


@pytest.mark.parametrize("after", [False, True])
def test_a_promotion_that_is_killed_at_any_write_is_repaired_and_never_unprotected(
    memory_store: ObjectStore, run: ObjectStore, after: bool
) -> None:
    spare = create_run(memory_store, "spare", versions=5)
    for version in (1, 2):
        promote(memory_store, "rehearsal", team(spare, "spare", version), "ada", "")
    counted, backend = killed_at(memory_store, 10**6)
    promote(counted, "rehearsal", team(spare, "spare", 3), "ada", "")
    writes = len(backend.changes)
    assert writes == 9  # two tags, the decision, four tags that exist already, two tags deleted
    for number in range(1, writes + 1):
        for version in (1, 2):  # again: the state before the killed promotion
            promote(memory_store, "tiny", of(run, version), "ada", "")
        killed, _ = killed_at(memory_store, number, after)
        with pytest.raises(Killed):
            promote(killed, "tiny", of(run, 3), "ada", "")
        now = champion(memory_store)
        assert now is not None
        assert now.team["solver"].version in kept(run)
        _, problems = project(memory_store, "tiny")
        assert len(problems) == 1  # MLflow is not set
        standing, _ = project(memory_store, "tiny")
        assert {each.team["solver"].version for each in standing.roles.values()} <= kept(run)


def test_rollback_and_promotion_at_the_same_time_are_both_in_the_log(
    memory_store: ObjectStore, run: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rival promotes between the draft of the rollback and its create; the rollback is drafted
    again, from the new champion.
    """
    for version in (1, 2):
        promote(memory_store, "tiny", of(run, version), "ada", "")
    create, calls = promotions.create, []

    def late(store: ObjectStore, decision: PromotionDecision) -> None:
        calls.append(decision.kind)
        if len(calls) == 1:
            promote(memory_store, "tiny", of(run, 3), "rival", "")
        create(store, decision)

    monkeypatch.setattr(promotions, "create", late)
    roll_back(memory_store, "tiny", "bob", "")
    assert log_of(memory_store)[2:] == [(3, "promoted", 3), (4, "rolled_back", 2)]


def test_promotions_of_several_names_are_independent(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    for name, version in (("tiny", 1), ("other", 2)):
        promote(memory_store, name, of(run, version), "ada", "")
    assert log_of(memory_store) == [(1, "promoted", 1)]
    assert kept(run) == {1, 2}


def test_a_previous_champion_whose_run_was_deleted_leaves_the_others_protected(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    gone = create_run(memory_store, "tiny-2", versions=2)
    promote(memory_store, "tiny", of(run, 1), "ada", "")
    promote(memory_store, "tiny", team(gone, "tiny-2", 1), "ada", "")
    promote(memory_store, "tiny", of(run, 3), "ada", "")
    for key in gone.list(""):
        gone.delete(key)
    for tag in tags.require_all(run):
        tags.delete(run, tag.name)
    settled = decide(memory_store, "tiny", of(run, 4), FAILED, champion(memory_store), "ada")
    assert kept(run) == {3, 4}
    (problem, _) = settled.problems
    assert problem.startswith(
        "gc may delete weights of the previous, which is not tagged: there is no run 'tiny-2' in"
    )


def test_tags_of_earlier_champions_are_deleted_although_another_role_has_no_run(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    gone = create_run(memory_store, "tiny-2", versions=2)
    promote(memory_store, "tiny", of(run, 1), "ada", "")
    promote(memory_store, "tiny", team(gone, "tiny-2", 1), "ada", "")
    for key in gone.list(""):
        gone.delete(key)
    promote(memory_store, "tiny", of(run, 3), "ada", "")
    assert kept(run) == {3}


def recreate(store: ObjectStore, run: ObjectStore) -> None:
    """Delete the run `tiny-1`, and create another one with other weights under its id."""
    for key in run.list(""):
        run.delete(key)
    other = create_run(store, "tiny-1", versions=0)
    for policy in ("solver", "verifier"):
        for version in range(5):
            files = {} if version else {"config.json": b"{}"}
            weights = builders.tensors(version + 20)
            publisher.publish(other, policy, version, weights, extra_files=files)


def test_a_run_that_was_deleted_and_created_again_has_no_champion_of_the_log(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    promote(memory_store, "tiny", of(run, 1), "ada", "")
    promote(memory_store, "tiny", of(run, 2), "ada", "")
    before = of(run, 3)
    recreate(memory_store, run)
    with pytest.raises(ConfigError, match=r"solver@1 of tiny-1 is not what it was: .* had sha256:"):
        roll_back(memory_store, "tiny", "ada", "")
    with pytest.raises(ConfigError, match="solver@3 of tiny-1 is not what it was"):
        promote(memory_store, "tiny", before, "ada", "")
    _, problems = project(memory_store, "tiny")
    assert "gc may delete weights of the champion" in problems[0]
    assert log_of(memory_store) == [(1, "promoted", 1), (2, "promoted", 2)]
    assert kept(run) == set()


def test_a_rollback_to_a_version_that_cannot_be_read_is_refused(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    promote(memory_store, "tiny", of(run, 1), "ada", "")
    promote(memory_store, "tiny", of(run, 2), "ada", "")
    run.put("weights/verifier/00000001/manifest.json", b"torn")
    with pytest.raises(ConfigError, match=r"verifier@1 of tiny-1 cannot be used: .*not JSON"):
        roll_back(memory_store, "tiny", "ada", "")
    assert len(log_of(memory_store)) == 2


def test_an_invalid_name_is_refused_before_anything_is_tagged(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    with pytest.raises(ConfigError, match="'a b' cannot name a promotion log"):
        promote(memory_store, "a b", of(run, 1), "ada", "")
    with pytest.raises(ConfigError, match="'' cannot name a promotion log"):
        decide(memory_store, "", of(run, 1), PASSED, None, "ada")
    assert kept(run) == set()


def test_a_damaged_tag_is_named_with_the_command_that_removes_it(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    run.put("tags/tiny-solver-1.json", b"torn")
    remedy = "remove it with `astraflow tag tiny-1 --remove tiny-solver-1`"
    with pytest.raises(ConfigError, match=remedy):
        promote(memory_store, "tiny", of(run, 1), "ada", "")
