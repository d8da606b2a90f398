"""The closing steps of a run, after its members have left.

    last evaluation ─▶ verify ─▶ report ─▶ register ─▶ notify

A suspended run goes on, so only MLflow is sent what it lacks.

Each is a Prefect task, each arrow a dependency in Prefect's graph. A step that fails or exceeds its
time limit fails neither the run, whose results are in the store, nor a later step.
"""

import logging
from typing import Any

from prefect import Task, allow_failure
from prefect.client.schemas.objects import State

from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.records.control import ClosingStep, Stop
from tasks.monitoring import closing_steps
from tasks.services import prefect_tasks
from tasks.tracking.mlflow_sync import Tracker

log = logging.getLogger(__name__)


def suspend(tracker: Tracker | None, heartbeat: HeartbeatWriter) -> None:
    """Send MLflow what it lacks of a suspended run. The other steps follow when it is over."""
    if tracker is None:
        return
    closing_steps.record(heartbeat, ClosingStep.TRACKING)
    try:
        tracker.finish("suspended")
    except Exception:  # whatever MLflow's client raises: the run is suspended all the same
        log.exception("MLflow does not show that the run is suspended")


def close(
    run_id: str,
    stop: Stop,
    tracker: Tracker | None,
    heartbeat: HeartbeatWriter,
    timeout_s: float,
) -> None:
    """Take all steps, one after the other, in the main thread: there, a time limit ends also a step
    that waits in a system call.

    Args:
        tracker: None where the run is not tracked in MLflow.
        timeout_s: time limit of each step.
    """

    def take(step: Task[..., Any], *arguments: Any, after: State[Any] | None = None) -> State[Any]:
        state: State[Any] = step.with_options(timeout_seconds=timeout_s)(  # type: ignore[assignment]  # the overload for async tasks
            *arguments,
            return_state=True,
            wait_for=None if after is None else [allow_failure(after)],
        )
        return state

    def verifying(part: str, share: float) -> None:
        closing_steps.record(heartbeat, ClosingStep.VERIFYING, part, share)

    closing_steps.record(heartbeat, ClosingStep.VERIFYING)
    evaluated = take(prefect_tasks.last_evaluation, run_id)
    verified = take(prefect_tasks.verify_run, run_id, verifying, after=evaluated)
    closing_steps.record(heartbeat, ClosingStep.REPORTING)
    reported = take(prefect_tasks.write_report, run_id, after=verified)
    registered: State[Any] | None = None
    if tracker is not None:
        closing_steps.record(heartbeat, ClosingStep.TRACKING)
        registered = take(prefect_tasks.register, run_id, tracker, stop.state, after=reported)
    closing_steps.record(heartbeat, ClosingStep.NOTIFYING)
    results = map(allow_failure, (evaluated, verified, reported, registered))
    take(prefect_tasks.notify, run_id, stop, *results)
