"""Text about the members that a run waits for: what each of them lacks, and since when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from storage.records.control import ServiceState
from tasks.supervision.member_watch import MemberWatch
from tasks.supervision.members import FlowRunPhase

NAMED_MAX = 6
"""Members of one state that are named; the others are counted."""
UNTAKEN_S = 60.0
"""After this time without a worker, the text has the command that starts one."""
ROLLOUT_POOL = "rollout"
"""The work pool whose queues are the regions."""
LOADING = "loading"
_STATES = {
    FlowRunPhase.NONE: "not launched yet",
    FlowRunPhase.SCHEDULED: "no worker has taken it",
    FlowRunPhase.PENDING: "process starting",
    FlowRunPhase.RUNNING: "process starting",
    FlowRunPhase.ENDED: "to be launched again",
}
_ORDER = (*dict.fromkeys(_STATES.values()), LOADING)


@dataclass(frozen=True, kw_only=True)
class Awaited:
    """A member that is not at work yet. Example:
    `Awaited(id="trainer-solver", phase=FlowRunPhase.PENDING, since_s=12.0)`.
    """

    id: str
    phase: FlowRunPhase
    since_s: float
    """Since it was launched."""
    loading: bool = False
    """Its process has started, and prepares."""
    queue: str = ""
    """The work queue into which it was launched; empty: its deployment's default."""


def waiting_note(watches: Mapping[str, MemberWatch], now: float) -> str:
    """Describe what the run waits for; empty when it waits for nothing.

    First the base models; then members that are not at work yet and what the dataflow waits for;
    after the last order the members that are not done.
    """
    base_model, dataflow = watches["base-model"], watches["dataflow"]
    if not base_model.done and base_model.note:
        return base_model.note
    pending = [watch for watch in watches.values() if not watch.is_over]
    if dataflow.done:
        named = ", ".join(
            f"{watch.member.id} ({watch.note or watch.state or 'starting'})" for watch in pending
        )
        return f"waiting for: {named}" if named else ""
    awaited = [
        Awaited(
            id=watch.member.id,
            phase=watch.phase,
            since_s=now - watch.launched_at,
            loading=watch.has_beaten,
            queue=watch.member.queue,
        )
        for watch in pending
        if not watch.has_beaten or watch.state == ServiceState.STARTING
    ]
    return "; ".join(filter(None, (words(awaited), dataflow.note)))


def words(awaited: Sequence[Awaited]) -> str:
    """Describe members that are not at work yet; those with the same text are grouped.

    Example: `waiting for: dataflow (process starting, 12 s), evaluation (loading, 9 s)`. Empty
    without members.
    """
    groups: dict[tuple[str, str], list[Awaited]] = {}
    for member in sorted(awaited, key=lambda member: _ORDER.index(_state(member))):
        groups.setdefault((_state(member), _remedy(member)), []).append(member)
    parts = [_group_words(state, remedy, members) for (state, remedy), members in groups.items()]
    return f"waiting for: {', '.join(parts)}" if parts else ""


def _state(member: Awaited) -> str:
    return LOADING if member.loading else _STATES[member.phase]


def _remedy(member: Awaited) -> str:
    """The command that starts a worker for a member's region which has had none for UNTAKEN_S."""
    untaken = member.phase is FlowRunPhase.SCHEDULED and not member.loading
    if not (untaken and member.queue and member.since_s >= UNTAKEN_S):
        return ""
    return f"; start one: astraflow worker --pool {ROLLOUT_POOL} --region {member.queue}"


def _group_words(state: str, remedy: str, members: Sequence[Awaited]) -> str:
    """One state and its members, with the longest of their waits."""
    named = ", ".join(member.id for member in members[:NAMED_MAX])
    more = f" and {len(members) - NAMED_MAX} more" if len(members) > NAMED_MAX else ""
    longest_s = max(member.since_s for member in members)
    since = "" if members[0].phase is FlowRunPhase.NONE else f", {longest_s:.0f} s"
    return f"{named}{more} ({state}{since}{remedy})"
