import json
from itertools import pairwise

import pytest

from storage import layout
from storage.errors import ConfigError
from storage.records.control import BudgetKind, Usage
from storage.records.progress import (
    MirrorProgress,
    RolloutProgress,
    SupervisorProgress,
    TrainerProgress,
)
from storage.run import shards, usage
from storage.store.object_store import ObjectStore
from tasks.monitoring import newest_objects
from tasks.monitoring.budget_status import BudgetStatus, budget_words
from tasks.monitoring.status import RunSummary, Status, runs, status
from tests.support.checkout import ROOT
from tests.support.runs import builders
from tests.support.runs.small_run import RUN_ID, SmallRun

NOW_S = 5_000_000_000.0


def running(name: str) -> SmallRun:
    """Step 2 of 4 is trained for the solver, step 1 for the verifier; one worker of two is
    alive.
    """
    small_run = SmallRun(name)
    for policy in ("solver", "verifier"):
        small_run.version(policy, 0)
        small_run.batch(policy, 1)
        small_run.version(policy, 1)
    small_run.version("solver", 2)
    small_run.batch(
        "solver",
        2,
        closed_below=3,
        reward__mean=0.75,
        accuracy__final=0.5,
        staleness__mean=0.5,
        staleness__max=1.0,
    )
    for number in range(5):
        small_run.order(number)
    small_run.beat("supervisor", "supervisor", NOW_S - 1, note="all members are alive")
    small_run.beat(
        "trainer", "trainer-solver", NOW_S - 1, progress=TrainerProgress(tokens_trained=12), versions={"solver": 2},
        seconds={"wait": 3.0, "step": 5.0, "publish": 2.0, "cpu": 40.0},
    )  # fmt: skip
    small_run.beat(
        "rollout",
        "rollout-us-east-0",
        NOW_S - 2,
        region="us-east",
        progress=RolloutProgress(orders_done=3, tokens_per_s=200.0),
    )
    small_run.beat(
        "rollout",
        "rollout-us-east-1",
        NOW_S - 90,
        region="us-east",
        progress=RolloutProgress(orders_done=1, tokens_per_s=99.0),
    )
    return small_run


def test_the_status_of_a_running_run_is_that_of_its_newest_objects() -> None:
    report = status(running("status-running").store, RUN_ID, NOW_S)
    assert (report.state, report.reason, report.deployment, report.steps) == (
        "running",
        "all members are alive",
        "astraflow/multi-policy",
        4,
    )
    solver, verifier = report.policies["solver"], report.policies["verifier"]
    assert (solver.step, solver.version, solver.batches, solver.tokens_trained) == (2, 2, 2, 12)
    assert solver.wait_fraction == pytest.approx(0.3)
    assert (solver.reward_mean, solver.accuracy, solver.staleness_mean, solver.staleness_max) == (
        0.75,
        0.5,
        0.5,
        1.0,
    )
    assert (verifier.step, verifier.version, verifier.wait_fraction, verifier.reward_mean) == (
        1,
        1,
        None,
        None,
    )
    assert report.counts == {"orders": 5, "orders_done": 3, "evaluations": 0}


def test_only_workers_with_a_fresh_heartbeat_count() -> None:
    region = status(running("status-regions").store, RUN_ID, NOW_S).regions["us-east"]
    assert (region.workers, region.tokens_per_s, region.orders_done) == (1, 200.0, 4)


def test_the_bytes_of_a_region_are_summed_over_its_workers_and_its_mirror() -> None:
    small_run = SmallRun("status-traffic")
    workers = (
        RolloutProgress(weights_bytes_home={"solver": 10, "verifier": 1}, shard_bytes=7),
        RolloutProgress(
            weights_bytes_home={"solver": 20}, weights_bytes_mirror={"solver": 300}, shard_bytes=8
        ),
    )
    for number, progress in enumerate(workers):
        small_run.beat(
            "rollout",
            f"rollout-us-east-{number}",
            NOW_S - 90 * number,
            region="us-east",
            progress=progress,
        )
    small_run.beat(
        "mirror",
        "mirror-us-east",
        NOW_S,
        region="us-east",
        progress=MirrorProgress(mirrored_bytes={"solver": 150}),
    )
    small_run.beat(
        "rollout",
        "rollout-eu-west-0",
        NOW_S,
        region="eu-west",
        progress=RolloutProgress(orders_done=1),
    )
    regions = status(small_run.store, RUN_ID, NOW_S).regions
    us = regions["us-east"]
    assert (us.weights_in_home, us.weights_in_mirror) == (
        {"solver": 30, "verifier": 1},
        {"solver": 300},
    )
    assert (us.mirrored, us.shards_out) == ({"solver": 150}, 15)
    eu = regions["eu-west"]
    assert (eu.weights_in_home, eu.weights_in_mirror, eu.mirrored, eu.shards_out) == ({}, {}, {}, 0)


def test_a_member_without_fresh_heartbeats_is_silent() -> None:
    states = {
        member.id: member.state
        for member in status(running("status-silent").store, RUN_ID, NOW_S).members
    }
    assert states["rollout-us-east-0"] == "working"
    assert states["rollout-us-east-1"] == "silent"


def test_evaluations_list_the_solver_first_and_then_the_team() -> None:
    small_run = running("status-evals")
    small_run.evaluation(2, [1, 1, 0, 0], [1, 1, 1, 0])
    small_run.evaluation(0, [0, 0, 0, 1], [0, 0, 1, 1])
    results = [
        (e.versions["solver"], e.workflow, e.accuracy, e.n)
        for e in status(small_run.store, RUN_ID, NOW_S).evals
    ]
    assert results == [
        (0, "single_turn", 0.25, 4),
        (0, "actor_and_verify", 0.5, 4),
        (2, "single_turn", 0.5, 4),
        (2, "actor_and_verify", 0.75, 4),
    ]


def test_a_run_with_a_silent_supervisor_is_interrupted_with_a_hint_how_to_resume() -> None:
    report = status(running("status-interrupted").store, RUN_ID, NOW_S + 100)
    assert report.state == "interrupted"
    assert report.reason.startswith(
        "its supervisor is gone; start the run again with the same run id to go on"
    )
    assert report.started + report.elapsed_s == NOW_S - 1


def test_a_new_run_is_starting_before_the_first_heartbeat_of_its_supervisor() -> None:
    small_run = SmallRun("status-new")
    limit_s = small_run.config.supervise.heartbeat_limit_s
    for at_s, state in (
        (small_run.created_s + limit_s, "starting"),
        (small_run.created_s + limit_s + 1, "interrupted"),
    ):
        assert status(small_run.store, RUN_ID, at_s).state == state
        assert [run.state for run in runs(small_run.store, at_s)] == [state]


def test_a_run_without_batches_is_starting() -> None:
    small_run = SmallRun("status-starting")
    small_run.beat("supervisor", "supervisor", NOW_S, note="building the base model")
    report = status(small_run.store, RUN_ID, NOW_S)
    assert (report.state, report.reason) == ("starting", "building the base model")
    assert report.policies["solver"].version is None


def test_a_run_with_shards_and_no_batch_is_running() -> None:
    small_run = SmallRun("status-barren")
    small_run.beat(
        "supervisor", "supervisor", NOW_S, note="the last 64 groups held nothing to train solver on"
    )
    shards.create(small_run.run, builders.shard(order=0))
    assert status(small_run.store, RUN_ID, NOW_S).state == "running"
    assert [item.state for item in runs(small_run.store, NOW_S)] == ["running"]


def test_the_state_of_the_stop_has_priority_over_every_heartbeat() -> None:
    small_run = running("status-stopped")
    small_run.stop("cancelled", "the flow run was cancelled", small_run.created_s + 30)
    report = status(small_run.store, RUN_ID, NOW_S)
    assert (report.state, report.reason) == ("cancelled", "the flow run was cancelled")
    assert report.elapsed_s == pytest.approx(30)


def test_closing_steps_are_shown_while_the_supervisor_writes_heartbeats() -> None:
    small_run = running("status-closing")
    small_run.stop("completed", "all done", small_run.created_s + 30)
    assert status(small_run.store, RUN_ID, NOW_S).closing is None, (
        "the supervisor has not looked yet"
    )
    small_run.beat(
        "supervisor",
        "supervisor",
        NOW_S,
        state="verifying",
        note="shards",
        progress=SupervisorProgress(closing_share=0.42),
    )
    report = status(small_run.store, RUN_ID, NOW_S + 1).closing
    assert report is not None
    assert (report.step, report.part, report.share) == ("verifying", "shards", 0.42)
    assert status(small_run.store, RUN_ID, NOW_S + 100).closing is None, "the supervisor is gone"


def test_the_budget_of_a_status_is_that_of_the_newest_start() -> None:
    small_run = running("status-budget")
    assert status(small_run.store, RUN_ID, NOW_S).budget == {}
    used: dict[BudgetKind, float] = {"hours": 6.4, "cost": 3.0}
    usage.write(small_run.run, Usage(limits={"hours": 8.0, "tokens": 100.0}, used=used))
    report = status(small_run.store, RUN_ID, NOW_S)
    assert report.budget == {
        "hours": BudgetStatus(used=6.4, limit=8.0),
        "tokens": BudgetStatus(used=0.0, limit=100.0),
    }
    assert budget_words(report.budget) == "budget: hours 6.4 of 8, tokens 0 of 100"
    small_run.run.put(layout.USAGE, b"torn")
    damaged = status(small_run.store, RUN_ID, NOW_S)
    assert damaged.budget == {}
    (problem,) = damaged.problems
    assert problem.startswith("what the run has used of its budget cannot be read: usage.json ")


def test_a_run_that_used_up_its_budget_has_a_state_of_its_own() -> None:
    small_run = running("status-exhausted")
    small_run.stop("exhausted", "budget: hours 8.0 of 8", NOW_S)
    report, (summary,) = status(small_run.store, RUN_ID, NOW_S), runs(small_run.store, NOW_S)
    for seen in (report, summary):
        assert (seen.state, seen.reason) == ("exhausted", "budget: hours 8.0 of 8")


def test_an_unknown_run_gives_similar_run_ids() -> None:
    with pytest.raises(ConfigError, match="did you mean tiny-1"):
        status(SmallRun("status-unknown").store, "tiny-2")


def test_a_damaged_batch_does_not_hide_the_rest_of_the_status() -> None:
    small_run = running("status-damaged")
    small_run.run.put("batches/solver/00000002.arrow", b"damage")
    solver = status(small_run.store, RUN_ID, NOW_S).policies["solver"]
    assert (solver.version, solver.batches, solver.reward_mean) == (2, 2, None)


def test_the_newest_batch_and_each_evaluation_are_read_once_by_a_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_run = SmallRun("status-read-once")
    for policy in ("solver", "verifier"):
        small_run.batch(policy, 1)
    small_run.evaluation(0, [1.0], [1.0])
    read: list[str] = []
    get = type(small_run.store).get

    def recorded(store: ObjectStore, key: str) -> bytes:
        read.append(key)
        return get(store, key)

    monkeypatch.setattr(type(small_run.store), "get", recorded)
    first, second = (status(small_run.store, RUN_ID, now_s=1.0) for _ in range(2))
    assert first == second
    for kind in ("batches/solver/", "batches/verifier/", "evals/"):
        assert sum(kind in key for key in read) == 1, kind


def test_the_newest_version_is_found_with_any_hint() -> None:
    small_run = running("status-hint")
    assert [newest_objects.version(small_run.run, "solver", hint) for hint in (0, 1, 2, 77)] == [
        2,
        2,
        2,
        2,
    ]
    assert newest_objects.version(small_run.run, "nobody", 5) is None


def test_runs_are_listed_with_their_versions() -> None:
    small_run = running("status-runs")
    small_run.stop("completed", "done", small_run.created_s + 30)
    (summary,) = runs(small_run.store, NOW_S)
    assert (summary.run_id, summary.state, summary.versions) == (
        RUN_ID,
        "completed",
        {"solver": 2, "verifier": 1},
    )


def parts_of_the_page() -> dict[str, str]:
    """The keys in docs/schemas.md of the run's status and of each of its parts."""
    page = (ROOT / "docs" / "schemas.md").read_text(encoding="utf-8")
    sections = dict(part.split("`", 2)[1:] for part in page.split("\n## ")[1:])
    whole = sections["astraflow status RUN --json"]
    starts = ["A policy:", "A region;", "An evaluation:", "A member:"]
    cuts = [0, *(whole.index(f"\n{start}") for start in starts), len(whole)]
    names = ["status", "policy", "region", "evaluation", "member"]
    parts = {
        name: whole[begin:end] for name, (begin, end) in zip(names, pairwise(cuts), strict=True)
    }
    return {**parts, "runs": sections["astraflow runs --json"]}


def test_each_key_of_the_json_is_documented() -> None:
    small_run = running("status-documented")
    small_run.evaluation(0, [1.0], [1.0])
    report = json.loads(status(small_run.store, RUN_ID, NOW_S).model_dump_json())
    keys = {
        "status": {*report, *report["counts"]},
        "policy": set(report["policies"]["solver"]),
        "region": set(report["regions"]["us-east"]),
        "evaluation": set(report["evals"][0]),
        "member": set(report["members"][0]),
        "runs": set(RunSummary.model_fields),
    }
    missing = {
        part: {key for key in keys[part] if f"`{key}`" not in told}
        for part, told in parts_of_the_page().items()
    }
    assert missing == {part: set() for part in keys}
    assert set(report) == set(Status.model_fields)
