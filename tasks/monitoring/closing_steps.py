"""Records the closing steps of a run, after its `stop.json`, in the supervisor's heartbeat."""

from dataclasses import replace

from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.records.control import ClosingStep
from storage.records.progress import SupervisorProgress


def record(
    heartbeat: HeartbeatWriter, step: ClosingStep, part: str = "", share: float = 0.0
) -> None:
    """Put a closing step into the supervisor's next heartbeat.

    Args:
        part: part of the step that is being done, for people.
        share: completed share (0-1) of the part; 0 where it is not measured.
    """
    progress = heartbeat.last.progress
    assert isinstance(progress, SupervisorProgress), "only the supervisor closes a run"
    heartbeat.update(state=step, note=part, progress=replace(progress, closing_share=share))
