"""One night of `astraflow/nightly` on the whole stack: it trains, plays, promotes, and Prefect shows
its steps as a graph.

The run is too short to learn: its reward only makes sure that the weights change, and the gate's
test promotes every candidate. All else is as in a real night.
"""

import json
import os
import signal
import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from deployments.registration import flow_runs
from deployments.stack import processes
from deployments.stack.state import MLFLOW, SERVER
from storage import layout
from storage.promotion import promotions
from storage.records.promotions import DecisionKind
from storage.weights import manifests
from tests.e2e.conftest import E2E_TIMEOUT_S, POLICIES, RECIPE, LocalStack
from tests.support.stacks import recorded_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(E2E_TIMEOUT_S)]

NAME, NIGHT = "lullaby", "20260105-0200"
RUN_ID = f"{NAME}-{NIGHT}"
STEPS = 2
OVERRIDES: dict[str, Any] = {
    "steps": STEPS,
    "evaluation.every": STEPS,
    "rollout.regions.eu-west.workers": 0,
    "tracking.experiment": "nights",  # its models are not among those of the other tests
    "rollout.workflow.reward": "tests.support.plugins:Parity",
    "policies.*.train.lr": 1e-3,
    "policies.*.train.warmup_steps": 0,
    "gate": {
        "test": {"name": "tests.support.plugins:AlwaysBetter"},
        "min_problems": 8,
        "samples": 1,
        "datasets": {"held_out": {"builtin": "chained_addition", "split": "test", "limit": 8}},
    },
}


@pytest.fixture(scope="module")
def night(laptop: LocalStack) -> str:
    """The flow run of the night, which has ended."""
    started = _start(laptop, NAME, OVERRIDES)
    assert laptop.wait_for_end(started) == "Promoted", laptop.flow_log(started)
    return started


def _start(laptop: LocalStack, name: str, overrides: Mapping[str, Any]) -> str:
    parameters = {
        "recipe": str(RECIPE),
        "name": name,
        "night_id": NIGHT,
        "catch_up": True,
        "overrides": overrides,
    }
    url = laptop.stack.prefect_url
    return str(flow_runs.start(url, "astraflow/nightly", parameters, "a night", []).id)


def test_the_night_promotes_the_best_version_of_its_run(laptop: LocalStack, night: str) -> None:
    decision = promotions.read(laptop.store, NAME, 1)
    assert decision.kind is DecisionKind.PROMOTED
    team = {policy: (each.run_id, each.version) for policy, each in decision.team.items()}
    assert team == dict.fromkeys(POLICIES, (RUN_ID, STEPS))
    (row,) = json.loads(laptop.astraflow("nights", NAME, "--json").stdout)
    assert (row["end"], row["run"], row["decision"]) == ("promoted", RUN_ID, 1)
    assert laptop.store.exists(layout.nights_report(NAME))
    verified = laptop.astraflow("verify", RUN_ID)
    assert verified.returncode == 0, verified.stdout


def test_the_champion_in_mlflow_is_the_promoted_version(laptop: LocalStack, night: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # created by MLflow itself
        from mlflow.tracking import MlflowClient

        client = MlflowClient(laptop.stack.mlflow_url, laptop.stack.mlflow_url)
        for policy in POLICIES:
            champion = client.get_model_version_by_alias(f"nights-{policy}", "champion")
            assert champion.tags["astraflow.run_id"] == RUN_ID
            assert champion.tags["astraflow.version"] == str(STEPS)


def test_prefect_shows_the_steps_of_the_night_as_a_graph(laptop: LocalStack, night: str) -> None:
    steps = laptop.task_runs(laptop.flow_run_id(f"{NAME} {NIGHT}"))
    resolve, freeze, train, play, decide, report = (
        f"resolve the champion of {NAME}",
        f"freeze the data of {RUN_ID}",
        "astraflow-0",
        f"play {RUN_ID} against the champion",
        f"promote or reject {RUN_ID}",
        f"report {NAME} {NIGHT}",
    )
    needed = {
        resolve: set[str](),
        freeze: {resolve},
        train: {freeze},
        play: {resolve, train},
        decide: {resolve, play},
        report: {decide},
    }
    assert set(steps) == set(needed)
    assert {name: step.after & needed[name] for name, step in steps.items()} == needed
    assert {step.state for step in steps.values()} == {"Completed"}
    assert {name for name, step in steps.items() if step.tags == ("night", f"night:{NAME}")} == {
        *set(needed) - {train}
    }


def test_the_run_of_the_night_has_closing_steps_of_its_own(laptop: LocalStack, night: str) -> None:
    steps = laptop.task_runs(laptop.flow_run_id(RUN_ID))
    assert steps[f"verify {RUN_ID}"].after == {f"last evaluation of {RUN_ID}"}
    assert steps[f"notify {RUN_ID}"].tags == ("closing", f"night:{NAME}", f"run:{RUN_ID}")
    assert {f"promotion-{NAME}", f"nights-{NAME}"} <= set(
        laptop.artifacts(laptop.flow_run_id(f"{NAME} {NIGHT}"))
    )


def test_a_night_promotes_although_its_supervisor_servers_and_a_worker_are_killed(
    laptop: LocalStack,
) -> None:
    """Nobody starts anything again by hand. The worker is killed first: nobody but the watchdog sees
    the end of its flow runs then.
    """
    name, steps = "insomnia", 24
    run_id = f"{name}-{NIGHT}"
    slowly = {
        "steps": steps,
        "evaluation.every": steps,
        "data.max_staleness": 0,
        "policies.*.train.checkpoint_every": 5,
    }
    first = _start(laptop, name, OVERRIDES | slowly)
    laptop.wait_for_version(run_id, 2)
    laptop.kill("worker-control")
    supervisor = laptop.member(run_id, "supervisor")
    os.kill(supervisor.pid, signal.SIGKILL)
    laptop.wait_until(lambda: laptop.member(run_id, "supervisor").pid != supervisor.pid)
    for part in (SERVER, MLFLOW):
        reached = min(manifests.latest(laptop.run(run_id), policy) or 0 for policy in POLICIES)
        laptop.kill(part)
        laptop.wait_for_version(run_id, min(reached + 3, steps))
    laptop.wait_until(lambda: laptop.store.exists(layout.night_outcome(name, NIGHT)))
    (row,) = json.loads(laptop.astraflow("nights", name, "--json").stdout)
    assert (row["end"], row["run"], row["decision"]) == ("promoted", run_id, 1)
    assert promotions.read(laptop.store, name, 1).team["solver"].version == steps
    flow_run_ids = [str(each) for each in laptop.flow_run_ids(f"{name} {NIGHT}")]
    assert flow_run_ids[0] == first
    assert [laptop.wait_for_end(each) for each in flow_run_ids] == ["Crashed", "Promoted"]
    assert laptop.run(run_id).exists(layout.REPORT)
    assert laptop.astraflow("verify", run_id).returncode == 0
    assert json.loads(laptop.astraflow("status", run_id, "--json").stdout)["state"] == "completed"
    laptop.wait_until(lambda: laptop.flow_processes() == [])
    stack = recorded_stack(laptop.home)
    assert [each.name for each in stack.processes if not processes.is_alive(each)] == []
