"""A run after kills, cancellations and restarts: it completes or is cancelled, and `verify` finds
no violation.

The runs here take one small step after the other, so that there is a middle to disturb.
"""

import json
import os
import signal
import time
from contextlib import suppress

import pytest

from deployments.registration import flow_runs
from storage import layout
from storage.coordination import heartbeats
from storage.errors import ConfigError
from storage.records.control import Stop
from storage.run import runs
from storage.weights import manifests
from tests.e2e.conftest import ASK_PREFECT_S, E2E_TIMEOUT_S, POLICIES, RECIPE, LocalStack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(E2E_TIMEOUT_S)]

STEPS = 30
SLOWLY = (
    f"steps={STEPS}",
    "data.max_staleness=0",
    "policies.*.train.checkpoint_every=5",
    "evaluation=null",
    "rollout.regions.eu-west.workers=0",
)
ENDLESSLY = ("steps=10000", *SLOWLY[1:])


def test_a_run_started_by_prefects_command_survives_kills_of_its_members(
    laptop: LocalStack,
) -> None:
    result = laptop.prefect(
        *(
            "deployment",
            "run",
            "astraflow/multi-policy",
            "--param",
            "run_id=killed",
            "--param",
            f"recipe={RECIPE}",
        ),
        *("--param", f"steps={STEPS}", "--param", "max_staleness=0"),
    )
    assert result.returncode == 0, result.stderr
    flow_run = result.stdout.split("UUID: ")[1].split()[0]
    victims = {"rollout-us-east-0": 2, "trainer-solver": 6, "dataflow": 10}
    for victim, version in victims.items():
        laptop.wait_for_version("killed", version)
        os.kill(laptop.member("killed", victim).pid, signal.SIGKILL)
    assert laptop.wait_for_end(flow_run) == "Completed"
    assert _last_version(laptop, "killed") == STEPS
    _is_clean(laptop, "killed")
    untouched = {"supervisor", "base-model", "trainer-verifier", "rollout-eu-west-0", "evaluation"}
    attempts = {beat.id: beat.attempt for beat in heartbeats.readable(laptop.run("killed"))}
    assert attempts == dict.fromkeys(victims, 1) | dict.fromkeys(untouched, 0)
    states = laptop.flow_runs("killed")
    assert states["killed"] == ["Completed"]
    assert {name: states[f"{name} #1 · killed"] for name in victims} == {
        key: ["Crashed"] for key in victims
    }
    assert {name: states[f"{name} #2 · killed"] for name in victims} == {
        key: ["Completed"] for key in victims
    }
    assert {state for found in states.values() for state in found} == {"Crashed", "Completed"}


def test_a_run_cancelled_in_prefect_is_resumed_also_after_its_supervisor_is_lost(
    laptop: LocalStack,
) -> None:
    flow_run = laptop.start("resumed", *SLOWLY)
    laptop.wait_for_version("resumed", 3)
    flow_runs.cancel(laptop.stack.prefect_url, flow_run)
    _has_left_cleanly(laptop, "resumed", flow_run)
    assert "its flow run was cancelled in Prefect" in laptop.astraflow("status", "resumed").stdout
    reached = _last_version(laptop, "resumed")
    assert 3 <= reached < STEPS

    flow_run = laptop.start("resumed", *SLOWLY)
    laptop.wait_for_version("resumed", reached + 2)
    laptop.wait_until(lambda: min(_attempts_of_members(laptop, "resumed").values()) >= 1)
    attempts = _attempts_of_members(laptop, "resumed")
    os.kill(laptop.member("resumed", "supervisor").pid, signal.SIGKILL)
    assert laptop.wait_for_end(flow_run) == "Crashed"
    assert _end_of_newest_supervisor(laptop, "resumed") == "Completed"
    assert laptop.run("resumed").exists(layout.REPORT), "the closing steps were taken"
    assert laptop.member("resumed", "supervisor").state == "done"
    assert _last_version(laptop, "resumed") == STEPS
    _is_clean(laptop, "resumed")
    assert _attempts_of_members(laptop, "resumed") == attempts, (
        "the third supervisor has taken over the members of the second"
    )
    assert laptop.flow_runs("resumed")["resumed"] == [*("Cancelled", "Crashed", "Completed")]


def test_a_run_stopped_during_its_start_leaves_no_process(laptop: LocalStack) -> None:
    flow_run = laptop.start("stopped", *SLOWLY)
    laptop.wait_until(lambda: laptop.run_folder("stopped").exists(layout.RUN))
    laptop.wait_until(lambda: len(heartbeats.readable(laptop.run("stopped"))) > 2)
    runs.request_stop(laptop.run("stopped"), Stop("cancelled", "enough", time.time()))
    _has_left_cleanly(laptop, "stopped", flow_run)


def test_a_run_has_one_supervisor_and_can_be_cancelled_before_its_start(laptop: LocalStack) -> None:
    first = laptop.start("twice", *ENDLESSLY)
    laptop.wait_for_version("twice", 1)
    assert laptop.wait_for_end(laptop.start("twice", *ENDLESSLY)) == "Failed"
    assert flow_runs.read(laptop.stack.prefect_url, first).state == "Running"
    assert laptop.astraflow("cancel", "twice").returncode == 0
    assert laptop.wait_for_end(first) == "Cancelled"

    again = laptop.start("twice", *ENDLESSLY)
    assert laptop.astraflow("cancel", "twice").stdout == "twice is cancelled; it had not resumed\n"
    assert laptop.wait_for_end(again) == "Cancelled"

    never = laptop.start("never", *SLOWLY)
    result = laptop.astraflow("cancel", "never")
    assert (result.returncode, result.stdout) == (0, "never is cancelled; it had not started\n")
    assert laptop.wait_for_end(never) == "Cancelled"
    assert not laptop.run_folder("never").exists(layout.batch("solver", 1)), (
        "its process may have begun meanwhile, and has left"
    )
    laptop.wait_until(lambda: laptop.flow_processes() == [])


def _end_of_newest_supervisor(laptop: LocalStack, run_id: str) -> str:
    """Wait for a supervisor that ends by itself; return Prefect's state of it."""
    newest: list[str] = []

    def has_ended() -> bool:
        with suppress(ConfigError):  # the server is away
            found = flow_runs.newest_supervisor(laptop.stack.prefect_url, run_id)
            if found is not None and found.final and found.state != "Crashed":
                newest.append(found.state)
        return bool(newest)

    laptop.wait_until(has_ended, ASK_PREFECT_S)
    return newest[0]


def _last_version(laptop: LocalStack, run_id: str) -> int:
    """The lowest version that every policy has reached."""
    return min(manifests.latest(laptop.run(run_id), policy) or 0 for policy in POLICIES)


def _is_clean(laptop: LocalStack, run_id: str) -> None:
    result = laptop.astraflow("verify", run_id)
    assert result.returncode == 0, result.stdout


def _attempts_of_members(laptop: LocalStack, run_id: str) -> dict[str, int]:
    """The attempts of all members that work as long as the run goes on."""
    return {
        beat.id: beat.attempt
        for beat in heartbeats.readable(laptop.run(run_id))
        if beat.kind not in ("supervisor", "base_model")
    }


def _has_left_cleanly(laptop: LocalStack, run_id: str, flow_run_id: str) -> None:
    """Check that the run is cancelled on the command line, in Prefect, in the store, and as
    processes.
    """
    assert laptop.wait_for_end(flow_run_id) == "Cancelled"
    laptop.wait_until(lambda: laptop.flow_processes() == [])
    assert json.loads(laptop.astraflow("status", run_id, "--json").stdout)["state"] == "cancelled"
    states = laptop.flow_runs(run_id)
    assert {state for found in states.values() for state in found} <= {"Cancelled", "Completed"}, (
        states
    )
    assert "Traceback" not in laptop.flow_log(flow_run_id)
    _is_clean(laptop, run_id)
