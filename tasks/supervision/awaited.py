"""Text about the members that a starting run waits for: what each of them lacks, and since when."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.supervision.members import FlowRunPhase

NAMED_MAX = 6
"""Members of one state that are named; the others are counted."""
UNTAKEN_S = 60.0
"""After so long without a worker, the text has the command that starts one."""
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
    `Awaited("trainer-solver", Phase.PENDING, 12.0)`.
    """

    id: str
    phase: FlowRunPhase
    since_s: float
    """Since it was launched."""
    loading: bool = False
    """Its process has come up, and prepares."""
    queue: str = ""
    """The work queue into which it was launched; empty: its deployment's default."""


def words(awaited: Sequence[Awaited]) -> str:
    """Text for people; empty without members. Members with the same text are grouped.

    Example: `waiting for: dataflow (process starting, 12 s), evaluation (loading, 9 s)`.
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
    pool = f"--pool {ROLLOUT_POOL} --work-queue {member.queue}"
    return f"; start one: prefect worker start --type process {pool}"


def _group_words(state: str, remedy: str, members: Sequence[Awaited]) -> str:
    """One state and its members, with the longest of their waits."""
    named = ", ".join(member.id for member in members[:NAMED_MAX])
    more = f" and {len(members) - NAMED_MAX} more" if len(members) > NAMED_MAX else ""
    longest_s = max(member.since_s for member in members)
    since = "" if members[0].phase is FlowRunPhase.NONE else f", {longest_s:.0f} s"
    return f"{named}{more} ({state}{since}{remedy})"
