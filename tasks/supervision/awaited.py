"""Who a run waits for while its members are starting, in words for people."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.supervision.members import Phase

NAMED_MAX = 6
"""Members of one state that are named; the others are counted."""
LOADING = "loading"
_STATES = {
    Phase.NONE: "not launched yet",
    Phase.SCHEDULED: "no worker has taken it",
    Phase.PENDING: "process starting",
    Phase.RUNNING: "process starting",
    Phase.ENDED: "to be launched again",
}


@dataclass(frozen=True)
class Awaited:
    """A member that is not at work yet. Example: `Awaited("trainer-solver", Phase.PENDING, 12.0)`."""

    id: str
    phase: Phase
    since_s: float
    """Since it was launched."""
    loading: bool = False
    """Its process has come up, and prepares."""


def words(awaited: Sequence[Awaited]) -> str:
    """Example: `waiting for: dataflow (process starting, 12 s), evaluation (loading, 9 s)`; empty for nobody."""
    states = dict.fromkeys((*_STATES.values(), LOADING))
    groups = [(state, [one for one in awaited if _state(one) == state]) for state in states]
    told = ", ".join(_group_words(state, members) for state, members in groups if members)
    return f"waiting for: {told}" if told else ""


def _state(one: Awaited) -> str:
    return LOADING if one.loading else _STATES[one.phase]


def _group_words(state: str, members: Sequence[Awaited]) -> str:
    """The longest wait stands for all of them."""
    named = ", ".join(one.id for one in members[:NAMED_MAX])
    more = f" and {len(members) - NAMED_MAX} more" if len(members) > NAMED_MAX else ""
    since = "" if members[0].phase is Phase.NONE else f", {max(one.since_s for one in members):.0f} s"
    return f"{named}{more} ({state}{since})"
