"""The last steps of a run, after its `stop.json` is written. The supervisor records each in its
heartbeat; `status` reads it.

state     the step, a `ClosingStep`
progress  `closing_share`: how much of the step is done, 0–1; 0 where nobody counts
note      a part of the step, for people
"""

from enum import StrEnum

from storage.coordination.heartbeats import HeartbeatWriter

SHARE = "closing_share"
"""Counter of the supervisor's heartbeat."""


class ClosingStep(StrEnum):
    """What is being done, in this order."""

    LEAVING = "leaving"
    """Members leave by themselves; those that do not are cancelled."""
    VERIFYING = "verifying"
    REPORTING = "reporting"
    TRACKING = "tracking"
    """MLflow gets the last metrics, the report and the models."""


def record(pulse: HeartbeatWriter, step: ClosingStep, part: str = "", share: float = 0.0) -> None:
    """Puts the step into the supervisor's next heartbeat."""
    pulse.update(state=step.value, note=part, progress={SHARE: share})
