"""A run that is suspended and resumed, on Prefect's page and on the command line: nothing is lost,
nothing is trained twice.
"""

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Suspended

from deployments.registration.client import connected
from storage import layout
from storage.coordination import heartbeats
from storage.run import checkpoints
from storage.weights import manifests
from tests.e2e.conftest import ASK_PREFECT_S, E2E_TIMEOUT_S, POLICIES, LocalStack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(E2E_TIMEOUT_S)]

RUN_ID = "suspended"
STEPS = 30
SLOWLY = (
    f"steps={STEPS}",
    "data.max_staleness=0",
    "policies.*.train.checkpoint_every=1000",
    "evaluation=null",
    "rollout.regions.eu-west.workers=0",
)


def test_a_run_that_is_suspended_and_resumed_completes(laptop: LocalStack) -> None:
    flow_run = laptop.start(RUN_ID, *SLOWLY)
    laptop.wait_for_version(RUN_ID, 3)
    _suspend_as_prefects_page_does(laptop, flow_run)
    reached = _left(laptop, flow_run, at_least=3)
    again = laptop.astraflow("suspend", RUN_ID)
    assert "suspended is already suspended: its flow run was suspended in Prefect" in again.stdout

    with connected(laptop.stack.prefect_url) as client:
        client.resume_flow_run(UUID(flow_run))
    laptop.wait_for_version(RUN_ID, max(reached.values()) + 2)
    assert laptop.astraflow("suspend", RUN_ID).returncode == 0
    _left(laptop, flow_run, at_least=max(reached.values()) + 2)

    resumed = laptop.astraflow("resume", RUN_ID)
    assert resumed.returncode == 0, resumed.stderr
    assert laptop.wait_for_end(flow_run) == "Completed"
    run = laptop.run(RUN_ID)
    assert [manifests.latest(run, policy) for policy in POLICIES] == [STEPS, STEPS]
    assert laptop.astraflow("verify", RUN_ID).returncode == 0
    assert run.exists(layout.REPORT), "the closing steps were taken"
    assert {beat.state for beat in heartbeats.readable(run) if beat.kind == "supervisor"} == {
        "done"
    }
    states = laptop.flow_runs(RUN_ID)
    assert states[RUN_ID] == ["Completed"], "it was the same flow run all the time"
    assert set(states["trainer-solver #2 · suspended"]) <= {"Completed", "Cancelled"}
    assert "Traceback" not in laptop.flow_log(flow_run)


def _suspend_as_prefects_page_does(laptop: LocalStack, flow_run_id: str) -> None:
    """Its dialog sets the state by force, with a time limit that the person may change."""
    limit = datetime.now(UTC) + timedelta(seconds=300)
    with connected(laptop.stack.prefect_url) as client:
        client.set_flow_run_state(
            UUID(flow_run_id), Suspended(pause_expiration_time=limit), force=True
        )


def _left(laptop: LocalStack, flow_run_id: str, at_least: int) -> dict[str, int]:
    """Wait until the run is suspended and no process of it is left; return the newest versions, of
    which the trainers have saved a checkpoint.
    """
    laptop.wait_until(lambda: _is_suspended(laptop, flow_run_id), ASK_PREFECT_S)
    laptop.wait_until(lambda: laptop.flow_processes() == [])
    seen = json.loads(laptop.astraflow("status", RUN_ID, "--json").stdout)
    assert (seen["state"], seen["closing"]) == ("suspended", None)
    assert "suspended" in laptop.astraflow("runs").stdout
    assert laptop.astraflow("verify", RUN_ID).returncode == 0
    members = {state for found in laptop.flow_runs(RUN_ID).values() for state in found}
    assert members <= {"Suspended", "Completed", "Cancelled"}, members
    run = laptop.run(RUN_ID)
    reached = {policy: manifests.latest(run, policy) or 0 for policy in POLICIES}
    assert at_least <= min(reached.values()) <= max(reached.values()) < STEPS
    saved = {policy: max(checkpoints.steps(run, policy), default=0) for policy in POLICIES}
    assert saved == reached, "no step is trained twice"
    return reached


def _is_suspended(laptop: LocalStack, flow_run_id: str) -> bool:
    with connected(laptop.stack.prefect_url) as client:
        flow_run: FlowRun = client.read_flow_run(UUID(flow_run_id))
    state = flow_run.state
    return (
        state is not None
        and state.name == "Suspended"
        and state.state_details.pause_timeout is None
        and bool(state.state_details.pause_reschedule)
    )
