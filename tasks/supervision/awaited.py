"""Who a run waits for while its members are starting, in words for people."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.supervision.members import Phase

NAMED_MAX = 6
"""Members that are named; the others are counted."""
_WORDS = {
    Phase.NONE: "to be launched",
    Phase.SCHEDULED: "no worker has taken it yet",
    Phase.PENDING: "its process is starting",
    Phase.RUNNING: "its process is starting",
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
    """Example: `waiting for: trainer-solver (its process is starting, 12 s), dataflow (loading, 3 s)`; empty for nobody."""
    if not awaited:
        return ""
    named = ", ".join(_member_words(one) for one in awaited[:NAMED_MAX])
    more = len(awaited) - NAMED_MAX
    return f"waiting for: {named}" + (f" and {more} more" if more > 0 else "")


def _member_words(one: Awaited) -> str:
    state = "loading" if one.loading else _WORDS[one.phase]
    return f"{one.id} ({state})" if one.phase is Phase.NONE else f"{one.id} ({state}, {one.since_s:.0f} s)"
