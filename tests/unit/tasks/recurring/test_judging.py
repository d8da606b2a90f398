"""The last part of a night: which versions are judged, and how the night ends."""

import pytest

from storage.errors import AstraFlowError, ConfigError
from storage.promotion import nights, promotions
from storage.records.control import Stop
from storage.records.nights import NightEnd
from storage.records.promotions import GateVerdict
from storage.run import runs
from storage.store.object_store import ObjectStore
from tasks.promotion.candidates import Candidate
from tasks.promotion.contest import Contest
from tasks.recipes.stored_config import read_config
from tasks.recurring import judging, planning
from tests.support.runs.builders import heartbeat, put_heartbeat
from tests.support.runs.promotable import create_run, evaluate, team
from tests.support.runs.week_of_nights import plan

PLAN = plan(0)


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("tasks.promotion.announcements.prefect_api_url", lambda: "")


@pytest.fixture
def run(memory_store: ObjectStore) -> ObjectStore:
    return create_run(memory_store, PLAN.run_id)


def contest(run: ObjectStore, *, passed: bool) -> Contest:
    verdict = GateVerdict(passed=passed, reason="so", test="t", confidence=0.9, rows=())
    candidate = Candidate(team(run, PLAN.run_id, 2), "")
    return Contest(
        champion=None,
        opponent=team(run, PLAN.run_id, 0),
        candidate=candidate,
        outcomes=(),
        verdict=verdict,
    )


def test_the_candidate_is_the_best_trained_version(run: ObjectStore) -> None:
    for version, right in ((0, 4), (1, 1), (2, 3)):
        evaluate(run, version, right)
    assert judging.trained_versions(run, read_config(run)) == ("solver@2", "verifier@2")


def test_a_night_whose_training_was_not_evaluated_has_no_candidate(run: ObjectStore) -> None:
    evaluate(run, 0, 4)
    with pytest.raises(
        ConfigError, match="after version 0 was evaluated on 'held_out'; lower eval"
    ):
        judging.trained_versions(run, read_config(run))


def test_an_unreadable_evaluation_of_a_night_is_named(
    run: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    for version, right in ((1, 1), (2, 3)):
        evaluate(run, version, right)
    run.put("evals/solver-00000002_verifier-00000002.arrow", b"torn")
    assert judging.trained_versions(run, read_config(run)) == ("solver@1", "verifier@1")
    (record,) = caplog.records
    assert "does not count, since it cannot be read: evals/solver-00000002" in record.getMessage()
    run.delete("evals/solver-00000001_verifier-00000001.arrow")
    with pytest.raises(ConfigError, match=r"an evaluation cannot be read: evals/solver-00000002_"):
        judging.trained_versions(run, read_config(run))


@pytest.mark.parametrize(("passed", "end"), [(True, NightEnd.PROMOTED), (False, NightEnd.REJECTED)])
def test_the_verdict_is_the_end_of_the_night(
    passed: bool, end: NightEnd, memory_store: ObjectStore, run: ObjectStore
) -> None:
    outcome = judging.decide(memory_store, PLAN, contest(run, passed=passed))
    assert (outcome.end, outcome.reason, outcome.decision) == (end, "so", 1)
    assert nights.read_outcome(memory_store, PLAN.name, PLAN.night) == outcome
    decision = promotions.read(memory_store, PLAN.name, 1)
    assert (decision.by, decision.kind.value) == (f"night {PLAN.night}", end.value)


def test_nothing_is_decided_about_a_night_that_ended_meanwhile(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    planning.end(memory_store, PLAN.name, PLAN.night, NightEnd.ABANDONED, "dead")
    outcome = judging.decide(memory_store, PLAN, contest(run, passed=True))
    assert outcome.end is NightEnd.ABANDONED
    assert promotions.read_log(memory_store, PLAN.name).readable == ()


@pytest.mark.parametrize(
    ("state", "end"), [("cancelled", NightEnd.CANCELLED), ("failed", NightEnd.FAILED)]
)
def test_a_run_that_did_not_reach_its_end_ends_the_night(
    state: str, end: NightEnd, memory_store: ObjectStore, run: ObjectStore
) -> None:
    runs.request_stop(run, Stop(state, "why", 1.0))  # type: ignore[arg-type]
    assert not judging.is_completed(memory_store, PLAN)
    outcome = judging.unfinished(memory_store, PLAN)
    assert outcome is not None
    assert (outcome.end, outcome.reason) == (end, "why")


def test_a_night_whose_run_is_suspended_is_not_over(
    memory_store: ObjectStore, run: ObjectStore
) -> None:
    runs.request_stop(run, Stop("suspended", "by a person", 1.0))
    assert not judging.is_completed(memory_store, PLAN), "it is trained on"
    with pytest.raises(AstraFlowError, match=f"start it again with the night_id {PLAN.night}"):
        judging.unfinished(memory_store, PLAN)
    assert nights.read_outcome(memory_store, PLAN.name, PLAN.night) is None


@pytest.mark.parametrize("state", ["completed", "exhausted"])
def test_a_run_that_reached_its_end_or_its_budget_is_judged(
    state: str, memory_store: ObjectStore, run: ObjectStore
) -> None:
    with pytest.raises(ConfigError, match="has not ended"):
        judging.unfinished(memory_store, PLAN)
    runs.request_stop(run, Stop(state, "why", 1.0))  # type: ignore[arg-type]
    assert judging.is_completed(memory_store, PLAN)
    assert judging.unfinished(memory_store, PLAN) is None
    last = heartbeat("supervisor", "supervisor", state="verifying")
    put_heartbeat(run, last)
    assert not judging.is_completed(memory_store, PLAN), "its closing steps were interrupted"
