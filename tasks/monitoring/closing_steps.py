"""Records the closing steps of a run, after its `stop.json`, in the supervisor's heartbeat, and
reads there whether a supervisor took all of them.
"""

from dataclasses import replace

from storage.coordination import heartbeats
from storage.coordination.heartbeat_writer import HeartbeatWriter
from storage.records.control import ClosingStep, ServiceState
from storage.records.progress import SupervisorProgress
from storage.store.object_store import ObjectStore


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


def all_taken(run: ObjectStore) -> bool:
    """Return whether the supervisor of a run that has ended took the last step, too, before it left
    or died. True where its heartbeat cannot be read.
    """
    states = [beat.state for beat in heartbeats.readable(run) if beat.kind == "supervisor"]
    return all(state is ServiceState.DONE for state in states)
